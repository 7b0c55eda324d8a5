"""The config reference as Markdown, made from the classes themselves."""

import ast
import inspect
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from shardwise.config.base import Config, groups_of, tag_of
from shardwise.config.command import AS_ENGINE


def describe(cls: type[Config]) -> None:
    """Gives the keys of a config class, and of the groups in it, the strings under them as descriptions.

    pydantic could do it wherever a class is made (use_attribute_docstrings), which took a third of the time that the
    configuration needs to be imported, in every process.
    """
    for group in _groups_within(cls):
        for part in reversed(group.__mro__):
            for name, text in _strings_of(part).items():
                if name in group.model_fields:  # a key, not a variable of the class
                    group.model_fields[name].description = text
        group.model_rebuild(force=True)


def markdown(cls: type[Config], *, title: str) -> str:
    """Returns a table of every key of a config class: key, default, meaning."""
    describe(cls)
    return "\n".join([*_heading(cls, title), *_rows(cls, ""), ""])


def page(commands: Mapping[str, type[Config]]) -> str:
    """Returns the tables of several commands, each key once: first keys of more than one command, then each one's
    own."""
    blocks = {name: _blocks(cls) for name, cls in commands.items()}
    owners: dict[tuple[str, ...], list[str]] = {}
    for name, found in blocks.items():
        for block in found:
            owners.setdefault(block, []).append(name)
    shared: dict[str, list[str]] = {}
    for block, names in owners.items():
        if len(names) > 1:
            which = "all" if len(names) == len(commands) else ", ".join(names)
            lines = shared.setdefault(_path_of(block[0]).partition(".")[0], [])
            lines += [f"{row} {which} |" for row in block]
    parts = [
        f"Keys of more than one command, by section: {_links(shared)}. Keys of one command: {_links(commands)}. "
        "`shardwise schema COMMAND --markdown` prints all keys of a command.",
        "",
    ]
    for section, lines in shared.items():
        parts += [f"## {section}", "", "| key | default | meaning | commands |", "|---|---|---|---|", *lines, ""]
    for name, cls in commands.items():
        own = [row for block in blocks[name] if len(owners[block]) == 1 for row in block]
        parts += [*_heading(cls, name), *own, ""] if own else [f"## {name}", "", "All of its keys are above.", ""]
    return "\n".join(parts)


def _blocks(cls: type[Config]) -> list[tuple[str, ...]]:
    """Returns the table rows of a config class: one block for each key of a section, with the rows of all keys below
    it."""
    describe(cls)
    found = []
    for name, field in cls.model_fields.items():
        match groups_of(field.annotation):
            case [section] if section == field.annotation:
                found += [_field_rows(key, inner, f"{name}.") for key, inner in section.model_fields.items()]
            case _:
                found.append(_field_rows(name, field, ""))
    return [tuple(rows) for rows in found if rows]


def _path_of(row: str) -> str:
    return row.split("`")[1]


def _links(names: Iterable[str]) -> str:
    return ", ".join(f"[{name}](#{name})" for name in names)


def _heading(cls: type[Config], title: str) -> list[str]:
    return [f"## {title}", "", _one_line(cls.__doc__ or ""), "", "| key | default | meaning |", "|---|---|---|"]


def _groups_within(cls: type[Config]) -> list[type[Config]]:
    """Returns the class and all groups in it, each once and after the groups that it holds."""
    found: dict[type[Config], None] = {}
    for field in cls.model_fields.values():
        for group in groups_of(field.annotation):
            found |= dict.fromkeys(_groups_within(group))
    return [*found, cls]


def _strings_of(cls: type[Any]) -> Mapping[str, str]:
    """Returns name -> the string under it, for the fields that the class itself declares."""
    if not issubclass(cls, Config) or cls is Config:
        return {}
    body = next(part.body for part in _classes_of(cls.__module__) if part.name == cls.__name__)
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


@cache
def _classes_of(module: str) -> list[ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return [part for part in ast.walk(tree) if isinstance(part, ast.ClassDef)]


def _rows(cls: type[Config], prefix: str) -> list[str]:
    return [row for name, field in cls.model_fields.items() for row in _field_rows(name, field, prefix)]


def _field_rows(name: str, field: FieldInfo, prefix: str) -> list[str]:
    rows, path, groups = [], f"{prefix}{name}", groups_of(field.annotation)
    if groups != [field.annotation]:  # an optional group, a list of groups and a choice of groups are values too
        followed = next((name for name in AS_ENGINE if path.startswith(name)), None)
        if followed is None or path.startswith("critic.engine.lora"):
            default = _default(field)
        else:
            default = f"as `engine.{path.removeprefix(followed)}`"
        rows.append(f"| `{path}` | {default} | {_one_line(field.description or '')} |")
    for group in groups:
        tag = tag_of(group) if len(groups) > 1 else None
        if tag is None:
            rows += _rows(group, f"{path}.")
            continue
        rows.append(f"| `{path}.{tag[0]}` = `{tag[1]}` | | {_one_line(group.__doc__ or '')} |")
        rows += [row for row in _rows(group, f"{path}.") if not row.startswith(f"| `{path}.{tag[0]}` |")]
    return rows


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    shown = _as_yaml(field.get_default(call_default_factory=True))
    choices = _choices(field.annotation)
    return f"`{shown}`" + (f" of {', '.join(f'`{choice}`' for choice in choices)}" if len(choices) > 1 else "")


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):  # 0 and 1 equal False and True, but are numbers
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Config) and (tag := tag_of(type(value))) is not None:
        return tag[1]
    return str(list(value) if isinstance(value, tuple) else value)


def _choices(annotation: Any) -> list[str]:
    """Returns the values of a Literal, also inside an optional, and the tags of choices."""
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return [choice for part in get_args(annotation) for choice in _choices(part)]
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [value for _, value in filter(None, [tag_of(annotation)])]
    return [value for value in get_args(annotation) if isinstance(value, str)]


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

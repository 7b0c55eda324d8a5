"""The config reference as Markdown, made from the classes themselves."""

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from shardwise.config.base import Config, groups_of, tag_of


def markdown(cls: type[Config], *, title: str) -> str:
    """A table of every key of a config class: key, default, meaning."""
    lines = [f"## {title}", "", _one_line(cls.__doc__ or ""), "", "| key | default | meaning |", "|---|---|---|"]
    return "\n".join([*lines, *_rows(cls, ""), ""])


def _rows(cls: type[Config], prefix: str) -> list[str]:
    rows = []
    for name, field in cls.model_fields.items():
        path, groups = f"{prefix}{name}", groups_of(field.annotation)
        if groups != [field.annotation]:  # an optional group, a list of groups and a choice of groups are values too
            rows.append(f"| `{path}` | {_default(field)} | {_one_line(field.description or '')} |")
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
    """The values of a Literal, also inside an optional, and the tags of choices."""
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return [choice for part in get_args(annotation) for choice in _choices(part)]
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [value for _, value in filter(None, [tag_of(annotation)])]
    return [value for value in get_args(annotation) if isinstance(value, str)]


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

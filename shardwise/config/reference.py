"""The config reference as Markdown, made from the classes themselves."""

from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from shardwise.config.base import Config, alternatives_of, group_of


def markdown(cls: type[Config], *, title: str) -> str:
    """A table of every key of a config class: key, default, meaning."""
    lines = [f"## {title}", "", _one_line(cls.__doc__ or ""), "", "| key | default | meaning |", "|---|---|---|"]
    return "\n".join([*lines, *_rows(cls, ""), ""])


def _rows(cls: type[Config], prefix: str) -> list[str]:
    rows = []
    for name, field in cls.model_fields.items():
        path, group = f"{prefix}{name}", group_of(field.annotation)
        if group is None or group is not field.annotation:  # an optional group and a list of groups are values too
            rows.append(f"| `{path}` | {_default(field)} | {_one_line(field.description or '')} |")
        if group is not None:
            rows += _rows(group, f"{path}.")
        shared: set[str] = set()
        for tag, alternative in alternatives_of(field.annotation).items():
            for row in _rows(alternative, f"{path}."):
                key, default, meaning = row.split(" | ", 2)
                if key not in shared:
                    rows.append(f"{key} | {default} | With {tag}: {meaning}")
                shared.add(key)
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
    return str(list(value) if isinstance(value, tuple) else value)


def _choices(annotation: Any) -> list[str]:
    """The values of a Literal, also inside an optional."""
    if get_origin(annotation) in (Union, UnionType):
        return [choice for part in get_args(annotation) for choice in _choices(part)]
    return [value for value in get_args(annotation) if isinstance(value, str)]


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

"""The config reference as Markdown, made from the classes themselves."""

import json
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from shardwise.config.base import Config


def markdown(cls: type[Config], *, title: str) -> str:
    """A table of every key of a config class: key, default, meaning."""
    lines = [f"## {title}", "", _one_line(cls.__doc__ or ""), "", "| key | default | meaning |", "|---|---|---|"]
    return "\n".join([*lines, *_rows(cls, ""), ""])


def _rows(cls: type[Config], prefix: str) -> list[str]:
    rows = []
    for name, field in cls.model_fields.items():
        group = _group(field.annotation)
        if group is not None:
            in_list = get_origin(field.annotation) is list
            if group is not field.annotation:
                rows.append(f"| `{prefix}{name}` | {_default(field)} | {_one_line(field.description or '')} |")
            rows += _rows(group, f"{prefix}{name}{'[]' if in_list else ''}.")
        else:
            rows.append(f"| `{prefix}{name}` | {_default(field)} | {_one_line(field.description or '')} |")
    return rows


def _group(annotation: Any) -> type[Config] | None:
    """The config class of a group of keys, also of an optional group and of a list of them."""
    parts = (annotation, *get_args(annotation))
    return next((part for part in parts if isinstance(part, type) and issubclass(part, Config)), None)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    shown = json.dumps(value) if value is None or isinstance(value, bool) else value
    choices = _choices(field.annotation)
    return f"`{shown}`" + (f" of {', '.join(f'`{choice}`' for choice in choices)}" if len(choices) > 1 else "")


def _choices(annotation: Any) -> list[str]:
    """The values of a Literal, also inside an optional."""
    if get_origin(annotation) in (Union, UnionType):
        return [choice for part in get_args(annotation) for choice in _choices(part)]
    return [value for value in get_args(annotation) if isinstance(value, str)]


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

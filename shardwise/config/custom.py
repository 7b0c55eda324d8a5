"""How a function is chosen: by its name, which alone takes its defaults (`advantage: rloo`), or by the import path of a
custom one (`advantage: rules.py:my_advantage`)."""

from typing import Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from shardwise.config.base import Arguments, Choice, PathText


def named(default: str) -> BeforeValidator:
    """Reads a name, or an import path, as the choice with that name; keys without a name belong to the default one, or
    to custom where `function` is one of them."""

    def expand(value: Any) -> Any:
        if isinstance(value, str):
            return {"name": "custom", "function": value} if ":" in value else {"name": value}
        if isinstance(value, dict):
            return {"name": "custom" if "function" in value else default, **value}
        return value

    return BeforeValidator(expand)


class Custom(Choice):
    """A custom function."""

    import_key: ClassVar[str] = "function"
    name: Literal["custom"] = "custom"
    function: PathText
    """`path/to/file.py:name` or `package.module:name`; docs/algorithms.md says how it is called."""
    parameters: Arguments = Field(default_factory=dict)
    """Keyword arguments that it is called with."""

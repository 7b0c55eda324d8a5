"""The base of every config class: frozen, no unknown keys, errors that name the key path and the nearest valid one."""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from shardwise.config.errors import ConfigError


class Config(BaseModel):
    """A node of the config tree. The YAML file is exactly this tree; a string under a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Sequence[str] = ()) -> Self:
        """Reads a YAML file, applies dotted overrides (`trainer.total_steps=20`) and validates the result.

        Args:
            path: the YAML file; None starts from the defaults.
            overrides: `key.path=value`, the value in YAML syntax; later ones win.
        Raises:
            ConfigError: lists every problem at once: key path, what was given, what is allowed, the nearest name.
        """
        tree = _read_yaml(Path(path)) if path is not None else {}
        for override in overrides:
            _apply_override(tree, override)
        return cls.parse(tree, origin=str(path) if path is not None else "the command line")

    @classmethod
    def parse(cls, tree: dict[str, Any], *, origin: str) -> Self:
        """Validates a tree of plain values; `origin` names where it came from in errors."""
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            lines = [_explain(cls, problem) for problem in error.errors()]
            raise ConfigError(f"{origin}: " + ("\n  " if len(lines) > 1 else "") + "\n  ".join(lines)) from None

    def to_yaml(self) -> str:
        """The resolved config, every default written out; `load` reads it back to an equal object."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist; give the path of a YAML file with -c")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__} at the top level, expected keys and values")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f'override "{override}" is not of the form key.path=value, e.g. trainer.total_steps=20')
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f'override "{override}": the value is not valid YAML; quote it') from None
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f'override "{override}": {parent} is a value, not a group of keys')
    node[leaf] = value


def _explain(cls: type[Config], problem: Any) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    match problem["type"]:
        case "extra_forbidden":
            return f"{path}: unknown key{_suggest(cls, problem['loc'])}"
        case "missing":
            return f"{path}: required, but not given; set it in the file or as an override {path}=..."
        case "value_error":
            message = str(problem["ctx"]["error"])
            return f"{path}: {message}" if path else message
        case _:
            return f"{path}={problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _suggest(cls: type[Config], location: tuple[Any, ...]) -> str:
    siblings = [path for path in key_paths(cls) if path.count(".") == len(location) - 1]
    wanted = ".".join(map(str, location))
    everything = list(key_paths(cls))
    same_leaf = [path for path in everything if path.rsplit(".", 1)[-1] == str(location[-1])]
    nearest = same_leaf or difflib.get_close_matches(wanted, siblings, n=1, cutoff=0.6)
    nearest = nearest or difflib.get_close_matches(wanted, everything, n=1, cutoff=0.6)
    if nearest:
        return f"; did you mean {nearest[0]}?"
    group = ".".join(map(str, location[:-1]))
    valid = [path for path in siblings if path.startswith(f"{group}.")] if group else siblings
    return f"; valid keys here: {', '.join(valid)}" if valid else ""


def key_paths(cls: type[Config], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a config class, groups included, in the order they are declared."""
    for name, field in cls.model_fields.items():
        yield prefix + name
        for candidate in (field.annotation, *get_args(field.annotation)):
            if isinstance(candidate, type) and issubclass(candidate, Config):
                yield from key_paths(candidate, f"{prefix}{name}.")

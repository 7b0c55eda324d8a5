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
        if node.get(parent) is None:  # absent, or a group whose keys are all commented out
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ConfigError(f'override "{override}": {parent} is a value, not a group of keys')
    node[leaf] = value


def _explain(cls: type[Config], problem: Any) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    match problem["type"]:
        case "extra_forbidden":
            return f"{path}: unknown key{_suggest(cls, problem['loc'])}"
        case "missing":
            return "\n  ".join(
                f"{leaf}: required, but not given; set it in the file or as an override {leaf}=..."
                for leaf in _required_leaves(cls, path)
            )
        case "value_error":
            message = str(problem["ctx"]["error"])
            return f"{path}: {message}" if path else message
        case _:
            return f"{path}={problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _suggest(cls: type[Config], location: tuple[Any, ...]) -> str:
    """The same name elsewhere, else the most similar one beside it, else one anywhere, else what is valid here."""
    everything = list(key_paths(cls))
    group, _, name = ".".join(map(str, location)).rpartition(".")
    siblings = [path for path in everything if path.rpartition(".")[0] == group]
    for candidates in ([path for path in everything if path.rpartition(".")[2] == name], siblings, everything):
        by_name = {path.rpartition(".")[2]: path for path in reversed(candidates)}
        nearest = difflib.get_close_matches(name, by_name, n=1, cutoff=0.6)
        if nearest:
            return f"; did you mean {by_name[nearest[0]]}?"
    return f"; valid keys here: {', '.join(siblings)}" if siblings else ""


def _required_leaves(cls: type[Config], path: str) -> list[str]:
    """`path` itself, or the required keys of the group it names."""
    node: Any = cls
    for name in path.split("."):
        node = node.model_fields[name].annotation if _is_config(node) else None
    if not _is_config(node):
        return [path]
    return [f"{path}.{name}" for name, field in node.model_fields.items() if field.is_required()]


def _is_config(node: Any) -> bool:
    return isinstance(node, type) and issubclass(node, Config)


def key_paths(cls: type[Config], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a config class, groups included, in the order they are declared."""
    for name, field in cls.model_fields.items():
        yield prefix + name
        for candidate in (field.annotation, *get_args(field.annotation)):
            if _is_config(candidate):
                yield from key_paths(candidate, f"{prefix}{name}.")

"""The base of every config class: frozen, no unknown keys, errors that name the key path and the nearest valid one."""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

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
            lines = list(dict.fromkeys(_explain(cls, problem) for problem in error.errors()))
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
    location = _without_alternatives(cls, problem["loc"])
    path = ".".join(map(str, location))
    match problem["type"]:
        case "extra_forbidden":
            return f"{path}: unknown key{_suggest(cls, location)}"
        case "missing":
            return "\n  ".join(
                f"{leaf}: required, but not given; set it in the file"
                + ("" if any(isinstance(part, int) for part in location) else f" or as an override {leaf}=...")
                for leaf in _required_leaves(cls, path)
            )
        case "value_error":
            message = str(problem["ctx"]["error"])
            return f"{path}: {message}" if path else message
        case _:
            return f"{path}={problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _without_alternatives(cls: type[Config], location: tuple[Any, ...]) -> tuple[Any, ...]:
    """pydantic names the alternative of a union after the key (`reshard_after_forward.bool`); no key is called that."""
    node: Any = cls
    kept = []
    for part in location:
        if get_origin(node) in (Union, UnionType) and not isinstance(part, int):
            continue
        kept.append(part)
        if isinstance(node, type) and issubclass(node, Config) and part in node.model_fields:
            annotation = node.model_fields[part].annotation
            node = group_of(annotation) or annotation
        elif not isinstance(part, int) and part in alternatives_of(node):
            kept.pop()
            node = alternatives_of(node)[part]
    return tuple(kept)


def _suggest(cls: type[Config], location: tuple[Any, ...]) -> str:
    """The same name elsewhere, else the most similar one beside it, else one anywhere, else what is valid here."""
    everything = list(key_paths(cls))
    group, _, name = ".".join(part for part in map(str, location) if not part.isdigit()).rpartition(".")
    siblings = [path for path in everything if path.rpartition(".")[0] == group]
    for candidates in ([path for path in everything if path.rpartition(".")[2] == name], siblings, everything):
        by_name = {path.rpartition(".")[2]: path for path in reversed(candidates)}
        nearest = difflib.get_close_matches(name, by_name, n=1, cutoff=0.6)
        if nearest:
            return f"; did you mean {by_name[nearest[0]]}?"
    return f"; valid keys here: {', '.join(siblings)}" if siblings else ""


def _required_leaves(cls: type[Config], path: str) -> list[str]:
    """`path` itself, or the required keys of the group it names."""
    node: type[Config] | None = cls
    for name in path.split("."):
        field = node.model_fields.get(name) if node is not None else None
        node = group_of(field.annotation) if field is not None else node  # a number is the place in a list of groups
    if node is None:
        return [path]
    return [f"{path}.{name}" for name, field in node.model_fields.items() if field.is_required()]


def group_of(annotation: Any) -> type[Config] | None:
    """The config class in the type of a field: itself, optional, or in a list; None for a value, and for a list of
    several classes told apart by a tag (see `alternatives_of`)."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Config):
            return candidate
    return None


def alternatives_of(annotation: Any) -> dict[str, type[Config]]:
    """The config classes of a list of tagged groups (`list[Annotated[A | B, Field(discriminator=...)]]`), by tag."""
    if get_origin(annotation) is not list or get_origin(element := get_args(annotation)[0]) is not Annotated:
        return {}
    union, field = get_args(element)
    return {tag: cls for cls in get_args(union) for tag in get_args(cls.model_fields[field.discriminator].annotation)}


def key_paths(cls: type[Config], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a config class, groups included, in the order they are declared."""
    for name, field in cls.model_fields.items():
        yield prefix + name
        if (group := group_of(field.annotation)) is not None:
            yield from key_paths(group, f"{prefix}{name}.")
        alternatives = alternatives_of(field.annotation).values()
        # Keys that several alternatives share are one key.
        yield from dict.fromkeys(key for cls in alternatives for key in key_paths(cls, f"{prefix}{name}."))

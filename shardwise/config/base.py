"""The base of every config class: frozen, no unknown keys, errors that name the key path and the nearest valid one."""

import difflib
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from shardwise.config.errors import ConfigError
from shardwise.config.yaml_values import RefusedYamlError, commented_out, read_yaml, value_of, yaml_of

_LONGEST_SECONDS = 1_000_000
Deadline = Annotated[float, Field(gt=0, le=_LONGEST_SECONDS)]
"""A time limit in seconds, up to eleven days: from 50 days on, sockets, which count milliseconds in 32 bits, may time
out at once."""
WholeDeadline = Annotated[int, Field(gt=0, le=_LONGEST_SECONDS)]
"""A time limit in whole seconds, up to eleven days."""
EXAMPLE_OVERRIDE = "engine.param_dtype=bfloat16"
"""An override that every command takes, for help and errors."""
_TOO_LARGE = 1 << 63
_COMMAND_LINE = "the command line"
_MOST_LISTED = 8

T = TypeVar("T")


class Config(BaseModel):
    """A node of the config tree. The YAML file is exactly this tree; a string under a field is its description, which
    config/reference.py reads."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        defer_build=True,  # a command needs one tree of a hundred classes, and --help none
    )

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Sequence[str] = ()) -> Self:
        """Reads a YAML file, applies dotted overrides (`trainer.total_steps=20`) and validates the result.

        Args:
            path: the YAML file; None starts from the defaults.
            overrides: `key.path=value`, the value in YAML syntax; later ones win. A key below a name or an
                import path that stands alone (`placement: split`) is added to it.
        Raises:
            ConfigError: lists every problem at once, each with where it came from (file or command line), key path,
                what was given, what is allowed, and the nearest name.
        """
        tree = read_yaml(Path(path)) if path is not None else {}
        brought = [_brought(tree, override) for override in overrides]
        for override in overrides:
            _apply_override(cls, tree, override)
        if path is None:
            return cls.parse(tree, origin=_COMMAND_LINE)

        def origin_of(problem: Any, line: str) -> str:
            return _COMMAND_LINE if _is_of_overrides(cls, problem, line, brought) else str(path)

        return cls._validated(tree, origin_of)

    @classmethod
    def parse(cls, tree: dict[str, Any], *, origin: str) -> Self:
        """Validates a tree of plain values; `origin` names where it came from in errors."""
        return cls._validated(tree, lambda _problem, _line: origin)

    @classmethod
    def _validated(cls, tree: dict[str, Any], origin_of: Callable[[Any, str], str]) -> Self:
        """
        Args:
            origin_of: (one of pydantic's problems, the line of the message about it) -> where it came from.
        """
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            lines: defaultdict[str, dict[str, None]] = defaultdict(dict)  # by origin, without repetitions
            for problem in error.errors():
                for line in _explain(cls, problem).splitlines():
                    lines[origin_of(problem, line)][line] = None
            told = [f"{origin}: {line}" for origin, own in lines.items() for line in own]
            if len(told) > 1:
                told = ["\n  ".join([f"{origin}:", *own]) for origin, own in lines.items()]
            raise ConfigError("\n".join(told)) from None

    @classmethod
    def defaults(cls) -> Self:
        """Returns a config with every key at its default, for a class without required keys. Unlike `cls()` it builds
        no validators, which would take milliseconds for each class wherever the configuration is imported."""
        return cls.model_construct()

    @classmethod
    def commands(cls) -> Mapping[str, type["Config"]]:
        """Returns command name -> config class of all commands, if this class is one of them: a key that is unknown
        here may be a key of another command."""
        return {}

    def to_yaml(self) -> str:
        """Writes the resolved config as YAML, with every default; `load` reads it back to an equal object."""
        return yaml_of(self.model_dump(mode="json"))

    @model_validator(mode="before")
    @classmethod
    def _truth_values_are_no_numbers(cls, given: Any) -> Any:
        """Keeps pydantic from taking true for the number 1."""
        if not isinstance(given, dict):
            return given
        cleared = {
            key: _without_truth_values(given[key])
            for key, field in cls.model_fields.items()
            if key in given and not _takes_truth_values(field.annotation)
        }
        return given | cleared

    @field_validator("*")
    @classmethod
    def _fits_64_bits(cls, value: Any) -> Any:
        """Refuses integers beyond 64 bits, which nothing that computes with them would take."""
        if isinstance(value, int) and not -_TOO_LARGE <= value < _TOO_LARGE:
            raise ValueError(f"{value} does not fit in 64 bits; give {-_TOO_LARGE} to {_TOO_LARGE - 1}")
        return value


class _TruthValue:
    """Takes the place of true or false where neither is allowed, so that neither passes for a number or text."""

    def __init__(self, value: bool) -> None:
        self._value = value

    def __repr__(self) -> str:
        return repr(self._value)


def _without_truth_values(value: Any) -> Any:
    match value:
        case bool():
            return _TruthValue(value)
        case list():
            return [_without_truth_values(part) for part in value]
        case dict():
            return {key: _without_truth_values(part) for key, part in value.items()}
    return value


def _takes_truth_values(annotation: Any) -> bool:
    """Whether a field of this type may hold true or false. For a group it is true: groups check their own keys."""
    if annotation in (bool, Any, object) or isinstance(annotation, bool):
        return True
    return bool(groups_of(annotation)) or any(map(_takes_truth_values, get_args(annotation)))


class Choice(Config):
    """One alternative of a union, told from the others by the field that `tag` names."""

    tag: ClassVar[str] = "name"
    import_key: ClassVar[str | None] = None
    """The key that an import path gives where it stands alone."""

    def arguments(self) -> dict[str, Any]:
        """Returns the other keys and their values: the keyword arguments of the function of that name."""
        return {key: getattr(self, key) for key in type(self).model_fields if key != self.tag}


def _plain(value: Any, path: str = "") -> Any:
    """Returns the value. Raises ValueError: JSON, in which it reaches ranks and checkpoints, would change it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{path}{key}: keys are text here; write it in quotes")
            _plain(inner, f"{path}{key}.")
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            _plain(inner, f"{path}{place}.")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path.removesuffix('.')}={value}: numbers are finite here; null may stand for none")
    return value


Arguments = Annotated[dict[str, Any], AfterValidator(_plain)]
"""Keyword arguments for code that is not Shardwise's. Numbers in them are finite and keys are text."""


def as_list(given: object) -> object:
    return [given] if isinstance(given, str) else given


OneOrMore = Annotated[list[str], BeforeValidator(as_list)]
"""A list, or its only entry by itself."""
PathText = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path, or text that may be one. `~` at its start becomes the home folder: shells do not expand it after `key=`."""
Paths = Annotated[list[PathText], BeforeValidator(as_list)]
"""A list of paths, or its only one by itself."""


def by_type(default: str) -> BeforeValidator:
    """Reads a type alone as the choice of that type with its defaults; keys without one belong to the default type."""

    def expand(given: Any) -> Any:
        if isinstance(given, str):
            return {"type": given}
        return {"type": default, **given} if isinstance(given, dict) else given

    return BeforeValidator(expand)


def _apply_override(cls: type[Config], tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    *parents, leaf = key.split(".")
    if not separator or not all((*parents, leaf)):
        raise ConfigError(f'override "{override}" is not of the form key.path=value, e.g. {EXAMPLE_OVERRIDE}')
    try:
        value = value_of(text)
    except RefusedYamlError as error:
        raise ConfigError(f'override "{key}=...": {error}') from None
    except yaml.YAMLError:
        raise ConfigError(f'override "{override}": the value is not valid YAML; quote it') from None
    if comment := commented_out(text):
        raise ConfigError(
            f'override "{override}": to YAML "{comment}" is a comment and no part of the value; put the value in '
            f"quotes that the shell leaves alone: {key}='\"...\"'"
        )
    node = tree
    for depth, parent in enumerate(parents, start=1):
        if node.get(parent) is None:  # absent, or a group whose keys are all commented out
            node[parent] = {}
        _, alternatives = _place(cls, tuple(parents[:depth]))
        if isinstance(node[parent], str) and (meant := _key_of(node[parent], alternatives)) is not None:
            node[parent] = {meant: node[parent]}
        node = node[parent]
        if not isinstance(node, dict):
            path = ".".join(parents[:depth])
            raise ConfigError(f'override "{override}": {_why_no_group(path, node, leaf, alternatives)}')
    node[leaf] = value


def _brought(tree: dict[str, Any], override: str) -> tuple[str, ...]:
    """Returns what an override adds to the file's tree: the path of its key or of the outermost new group around it."""
    path = tuple(override.partition("=")[0].split("."))
    node: Any = tree
    for depth, part in enumerate(path, start=1):
        if not isinstance(node, dict) or part not in node:
            return path[:depth]
        node = node[part]
    return path


def _is_of_overrides(cls: type[Config], problem: Any, line: str, brought: Sequence[tuple[str, ...]]) -> bool:
    """Whether a problem lies in what overrides added. One of several keys does if its line names such a key."""
    location, alternatives = _place(cls, problem["loc"])
    if problem["type"] == "union_tag_invalid" and issubclass(alternatives[0], Choice):
        location = (*location, alternatives[0].tag)
    for path in brought:
        if location[: len(path)] == path:
            return True
        name = re.escape(".".join(path[len(location) :]))
        if path[: len(location)] == location and re.search(rf"(?<![\w.]){name}\b", line):
            return True
    return False


def _why_no_group(path: str, given: Any, leaf: str, alternatives: Sequence[type[Config]]) -> str:
    if isinstance(given, list):
        return f"{path} is a list, and an override gives all of it: '{path}=[...]'"
    if any(issubclass(group, Choice) for group in alternatives):
        return (
            f"{path}={given} is a value, not a group of keys; where it is a name that takes parameters, give them "
            f"together: '{path}={{name: {given}, {leaf}: ...}}'"
        )
    if alternatives:
        return f"{path}={given!r} stands where a group of keys belongs; correct it in the file"
    return f"{path} is one value, not a group of keys; remove .{leaf}"


def _key_of(alone: str, alternatives: Sequence[type[Config]]) -> str | None:
    """Returns the key that a name or an import path gives where it stands alone."""
    choices = [group for group in alternatives if issubclass(group, Choice)]
    if alone in _tags(choices):
        return choices[0].tag
    return next((group.import_key for group in choices if group.import_key is not None and ":" in alone), None)


def _explain(cls: type[Config], problem: Any) -> str:
    location, alternatives = _place(cls, problem["loc"])
    path = ".".join(map(str, location))
    match problem["type"]:
        case "extra_forbidden":
            chosen = tag_of(alternatives[0]) if len(alternatives) == 1 else None
            if chosen is not None:
                keys = ", ".join(name for name in alternatives[0].model_fields if name != chosen[0])
                return f"{path}: {chosen[0]}={chosen[1]} has no such key; it has {keys or 'none'}"
            return f"{path}: unknown key{_suggest(cls, location)}"
        case "missing":
            return "\n".join(
                f"{leaf}: required, but not given; set it in the file"
                + ("" if any(isinstance(part, int) for part in location) else f" or as an override {leaf}=...")
                for leaf in _required_leaves(cls, path)
            )
        case "union_tag_invalid":
            given, tags = str(problem["ctx"]["tag"]), _tags(alternatives)
            nearest = difflib.get_close_matches(given, tags, n=1)
            return f"{path}={given}: {f'did you mean {nearest[0]}? ' if nearest else ''}use one of {', '.join(tags)}"
        case "model_type" | "model_attributes_type" if alternatives:
            return f"{path}={problem['input']!r}: {_what_stands_here(alternatives)}"
        case "invalid_key":
            return f"{path.rpartition('.')[0] or 'the file'}: {problem['input']!r} is no key; keys are text"
        case "string_type" if isinstance(problem["input"], int | float | _TruthValue):
            how = "" if any(isinstance(part, int) for part in location) else f": '{path}=\"...\"' as an override"
            return f"{path}={problem['input']!r}: expected text; put it in quotes{how}"
        case "value_error":
            message = str(problem["ctx"]["error"])
            return f"{path}: {message}" if path else message
        case _:
            return f"{path}={problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _place(cls: type[Config], location: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[type[Config]]]:
    """Returns the keys of a location, and the config classes that its last key may be in, or, if it is a group, that
    may stand there.

    pydantic names the alternative of a union after the key (`reshard_after_forward.bool`); no key is called that.
    """
    kept: list[Any] = []
    inside: list[type[Config]] = [cls]
    leaf: Any = None
    for part in location:
        fields = [group.model_fields[part] for group in inside if part in group.model_fields]
        named = [group for group in inside if (tag := tag_of(group)) is not None and tag[1] == part]
        if named and len(inside) > 1:
            inside = named
        elif fields:
            kept.append(part)
            leaf = fields[0].annotation
            inside = groups_of(leaf)
        elif inside or isinstance(part, int) or get_origin(leaf) not in (Union, UnionType):
            kept.append(part)
    return tuple(kept), inside


def tag_of(cls: type[Config]) -> tuple[str, str] | None:
    """Returns the key that tells this choice from the others of its union, and its value; None for other configs."""
    if not issubclass(cls, Choice):
        return None
    (value,) = get_args(cls.model_fields[cls.tag].annotation)
    return cls.tag, str(value)


def _tags(alternatives: Sequence[type[Config]]) -> list[str]:
    return [value for _, value in filter(None, map(tag_of, alternatives))]


def _what_stands_here(alternatives: Sequence[type[Config]]) -> str:
    """Says what to give where a value stands in the place of a group of keys, or of a name."""
    tag, tags = tag_of(alternatives[0]), _tags(alternatives)
    if tag is None:
        return f"expected a group of keys: {_nearest(list(alternatives[0].model_fields))}"
    if tag[0] == "name":
        return f"use one of {', '.join(tags)}, alone or as the name in a group of keys"
    return f"expected a group of keys with {tag[0]}={' or '.join(tags)}"


def _suggest(cls: type[Config], location: tuple[Any, ...]) -> str:
    """Returns the end of the error about an unknown key, which names the commands that have it, or the nearest key.

    The nearest is the first of: the same name deeper in its group, a name much like it beside it, the same name
    elsewhere (the least deep), a name a little like it beside it, and, for a key in a group, a name much like it
    anywhere. The valid keys beside it are listed if they are few and the nearest is elsewhere, or if none is near.
    """
    path = ".".join(part for part in location if isinstance(part, str))
    if commands := [f"`shardwise {name}`" for name, other in cls.commands().items() if path in key_paths(other)]:
        return f"; it is a key of {', '.join(commands)}"
    everything = list(key_paths(cls))
    group, _, name = path.rpartition(".")
    siblings = [other for other in everything if other.rpartition(".")[0] == group]
    same = [other for other in everything if other.rpartition(".")[2] == name]
    same.sort(key=lambda other: other.count("."))
    below = [other for other in same if other.startswith(f"{group}.")]
    valid = f"valid keys here: {_nearest(siblings, path)}"
    near = ((below, 1.0), (siblings, 0.7))
    far = ((same, 1.0), (siblings, 0.6), (everything if group else [], 0.8))
    for candidates, cutoff in (*near, *far):
        by_name = {other.rpartition(".")[2]: other for other in reversed(candidates)}
        nearest = difflib.get_close_matches(name, by_name, n=1, cutoff=cutoff)
        if nearest:
            found = by_name[nearest[0]]
            is_far = bool(group) and not found.startswith(f"{group}.") and 0 < len(siblings) <= _MOST_LISTED
            return f"; did you mean {found}?{f' {valid}' if is_far else ''}"
    return f"; {valid}" if siblings else ""


def _nearest(names: Sequence[str], near: str | None = None) -> str:
    """Lists the names; if there are many, only the first ones, or those most similar to `near`."""
    if len(names) <= _MOST_LISTED:
        return ", ".join(names)
    some = names if near is None else difflib.get_close_matches(near, names, n=_MOST_LISTED, cutoff=0.0)
    return ", ".join([*some[:_MOST_LISTED], "..."])


def _required_leaves(cls: type[Config], path: str) -> list[str]:
    """Returns `path` itself or, if it names a group, the required keys of that and of the groups in it."""
    nodes: list[type[Config]] = [cls]
    for name in path.split("."):
        fields = [node.model_fields[name] for node in nodes if name in node.model_fields]
        nodes = groups_of(fields[0].annotation) if fields else nodes  # a number is the place in a list of groups
    if len(nodes) != 1:
        return [path]
    required = [f"{path}.{name}" for name, field in nodes[0].model_fields.items() if field.is_required()]
    return [leaf for key in required for leaf in _required_leaves(cls, key)]


def groups_of(annotation: Any) -> list[type[Config]]:
    """Returns the config classes in the type of a field: the type itself, optional or in a list, or the alternatives of
    a union; none for a value."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [group for part in get_args(annotation) for group in groups_of(part)]


def below(key: str, name: str | int) -> str:
    """Returns the dotted key of what has this name, or place in a list, in the group of that key; "" is the tree."""
    return f"{key}.{name}" if key else str(name)


def key_paths(cls: type[Config], key: str = "") -> Iterator[str]:
    """Yields every dotted key of a config class, groups included, in the order they are declared."""
    for name, field in cls.model_fields.items():
        yield below(key, name)
        groups = groups_of(field.annotation)
        yield from dict.fromkeys(path for group in groups for path in key_paths(group, below(key, name)))


def parts_of(config: Any, kind: type[T], key: str = "") -> Iterator[tuple[str, T]]:
    """Yields (dotted key, part) for every part of a config that is of one class, those in lists with their places in
    the key; what is within such a part is not looked at."""
    if isinstance(config, kind):
        yield key, config
        return
    inner = enumerate(config) if isinstance(config, list) else config if isinstance(config, Config) else ()
    for name, part in inner:
        yield from parts_of(part, kind, below(key, name))


def leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for every value in a tree of plain values, those in lists of groups with their places
    in the key. Empty groups are values."""
    children: list[tuple[Any, Any]] = []
    if isinstance(tree, dict):
        children = list(tree.items())
    elif isinstance(tree, list) and all(isinstance(item, dict) for item in tree):
        children = list(enumerate(tree))
    if not children:
        yield key, tree
    for name, child in children:
        yield from leaves(child, below(key, name))

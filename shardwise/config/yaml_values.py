"""YAML as config files and overrides use it: numbers as YAML 1.2 reads them, no key twice, and no aliases that blow a
small text up."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shardwise.config.errors import ConfigError, in_one_line

_MOST_LEVELS = 100
_TOO_DEEP = f"it is nested more than {_MOST_LEVELS} levels deep"
_MOST_NODES = 100_000
"""The most nodes that aliases may make of fewer that are written."""


class RefusedYamlError(yaml.YAMLError):
    """The text uses something that YAML allows and no config needs."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which PyYAML would keep the last, and a value that contains itself, or that
    grows beyond all bounds where its aliases are written out."""

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            sizes: dict[yaml.Node, _Size | None] = {}
            num_nodes = _size_of(node, sizes).num_nodes
            if num_nodes > max(_MOST_NODES, len(sizes)):
                raise RefusedYamlError(
                    f"its aliases stand for {num_nodes:,} values, more than {_MOST_NODES:,}; write out what is meant"
                )
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        given = {key.value: key for key in reversed(keys)}
        for key in keys:
            if given[key.value] is not key:
                first, second = (mark.line + 1 for mark in (given[key.value].start_mark, key.start_mark))
                raise RefusedYamlError(f"the key {key.value} is given twice, in line {first} and in line {second}")
        return node


@dataclass(frozen=True, slots=True)
class _Size:
    """The size of a node, with every alias in it written out."""

    num_nodes: int
    num_levels: int


def _size_of(node: yaml.Node, sizes: dict[yaml.Node, _Size | None]) -> _Size:
    """Measures a node.

    Args:
        sizes: the sizes of the nodes that are known, to which it adds; None for the nodes that this one is in.
    Raises:
        RefusedYamlError: it contains itself, or has too many levels.
    """
    if node not in sizes:
        sizes[node] = None
        parts = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in parts for part in pair]
        found = [_size_of(part, sizes) for part in parts]
        size = _Size(1 + sum(one.num_nodes for one in found), 1 + max((one.num_levels for one in found), default=0))
        if size.num_levels > _MOST_LEVELS:
            raise RefusedYamlError(_TOO_DEEP)
        sizes[node] = size
    known = sizes[node]
    if known is None:
        raise RefusedYamlError(
            f"what the anchor in line {node.start_mark.line + 1} names contains itself; write it out"
        )
    return known


class _Dumper(yaml.SafeDumper):
    """Puts quotes around text that _Loader would take for something else."""


_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)",
    "tag:yaml.org,2002:float": (
        r"[-+]?([0-9][0-9_]*\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)"
        r"|\.(nan|NaN|NAN)"
    ),
}
"""YAML 1.1, which PyYAML reads, takes 010 for 8, 1:30 for 90, 2024-01-01 for a date, and 1e-6 for text. Here 1e-6 is a
number and the others are text, of which a key that holds a number takes 010 for 10."""
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS and not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for _tag, _pattern in _NUMBERS.items():
        _class.add_implicit_resolver(_tag, re.compile(f"({_pattern})$"), list("-+.0123456789"))


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads the tree in a file. Raises ConfigError: it cannot be read, or holds something else."""
    if not path.is_file():
        problem = "is no file" if path.exists() else "does not exist"
        raise ConfigError(f"config file {path} {problem}; give the path of a YAML file with -c")
    try:
        tree = value_of(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {in_one_line(error)}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__} at the top level, expected keys and values")
    return tree


def value_of(text: str) -> Any:
    """Reads a value in YAML. Raises yaml.YAMLError; RefusedYamlError for what no config needs."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise RefusedYamlError(_TOO_DEEP) from None


def commented_out(text: str) -> str:
    """Returns the comment at the end of a valid value in YAML, which is no part of it; "" if there is none."""
    end = max(
        (token.end_mark.index for token in yaml.scan(text) if not isinstance(token, yaml.StreamEndToken)), default=0
    )
    return text[end:].strip()


def yaml_of(tree: dict[str, Any]) -> str:
    """Writes a tree of plain values as text that `read_yaml` reads back."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)

"""Who may import whom. Every import of shardwise/ is checked, lazy ones too; `if TYPE_CHECKING:` blocks are not."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

PACKAGE = Path(__file__).parents[2] / "shardwise"

SHARED = {"config", "types", "observability", "fault_plan", "scratch", "processes", "console", "durable", "region"}
TENSORS = {"codec", "checksum", "memfd"}
"""Of weights and messages between processes."""
MODELS = {"model_config", "stored_dtypes"}
"""Of models, as folders hold them."""
MAY_IMPORT = {
    "__init__": set(),
    "__main__": {"cli", "controller"},
    "cli": {"command_line", "recipes", "controller", "observability", "config"},
    "command_line": {"config"},
    "recipes": SHARED
    | TENSORS
    | MODELS
    | {
        "engine",
        "rollout",
        "environments",
        "transfer",
        "controller",
        "data",
        "rewards",
        "algorithms",
        "ops",
        "families",
    },
    "engine": SHARED | MODELS | {"ops", "families", "uploads"},
    "rollout": SHARED | TENSORS | MODELS | {"ops", "families"},
    "environments": SHARED,
    "transfer": SHARED | TENSORS | {"ops"},
    "controller": SHARED | {"codec"},
    "data": SHARED | MODELS | {"families"},
    "rewards": SHARED,
    "algorithms": {"types"},
    "observability": {"types", "fault_plan", "console", "durable"},
    "config": {"fault_plan"},
    "types": {"uploads"},
    "uploads": set(),
    "fault_plan": set(),
    "scratch": set(),
    "processes": set(),
    "console": set(),
    "durable": {"fault_plan"},
    "region": set(),
    "codec": {"types"},
    "checksum": {"ops"},
    "memfd": set(),
    "model_config": {"config"},
    "stored_dtypes": set(),
    "families": {"ops", "types", "uploads"},
    "ops": {"uploads"},
}
"""Folders and top-level modules. Each may import itself too, and `shardwise`, which holds only the version."""

THIRD_PARTY = {
    "config": {"pydantic", "yaml"},
    "types": {"torch"},
    "uploads": {"torch"},
    "fault_plan": set(),
    "scratch": set(),
    "processes": set(),
    "console": set(),
    "durable": set(),
    "region": {"torch"},
    "codec": {"torch"},
    "checksum": {"torch", "xxhash"},
    "memfd": {"torch"},
    "model_config": {"transformers"},
    "stored_dtypes": {"torch", "transformers"},
    "families": {"torch"},
    "ops": {"torch"},
    "algorithms": {"torch"},
}
"""All that these import beside the standard library."""

TORCH_FREE = {"cli", "command_line", "config", "rewards"}
HEAVY = {"ray": "ray", "vllm": "vllm", "sglang": "sglang", "peft": "lora", "wandb": "wandb", "mlflow": "mlflow"}
HEAVY |= {"reasoning_gym": "reasoning_gym", "verifiers": "verifiers"}
"""Packages that only files of one name import, or of one that begins so, by that name."""


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below this one that exists at run time."""
    children = node.orelse if is_type_checking(node) else ast.iter_child_nodes(node)
    for child in children:
        yield child
        yield from running_nodes(child)


def imported_names(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import; `from a import b` gives a.b. `package` anchors relative ones."""
    for node in running_nodes(ast.parse(source)):
        match node:
            case ast.Import(names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module, names, level):
                parents = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                base = ".".join([*parents, *([module] if module else [])])
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(func, [ast.Constant(str(name)), *_]) if ast.unparse(func).endswith(
                ("import_module", "__import__")
            ):
                yield node.lineno, name


def broken_rule(layer: str, stem: str, name: str) -> str | None:
    """The rule that importing `name` breaks in a file of this layer, in words."""
    top, _, rest = name.partition(".")
    if top == "shardwise":
        target = rest.partition(".")[0]
        if target in MAY_IMPORT and target != layer and target not in MAY_IMPORT[layer]:
            return f"{layer} may import {', '.join(sorted(MAY_IMPORT[layer])) or 'no other folder'}"
    elif top in HEAVY and stem != HEAVY[top] and not stem.startswith(f"{HEAVY[top]}_"):
        return f"{top} belongs in a file named {HEAVY[top]}.py"
    elif layer in TORCH_FREE and top in {"torch", "transformers"}:
        return f"{layer} is free of torch and transformers"
    elif layer in THIRD_PARTY and top not in THIRD_PARTY[layer] | sys.stdlib_module_names:
        return f"{layer} imports the standard library and {', '.join(sorted(THIRD_PARTY[layer]))}"
    return None


def violations(path: PurePosixPath, source: str) -> list[str]:
    """One line per forbidden import of shardwise/`path`: file, line, name, rule."""
    layer = path.with_suffix("").parts[0]
    if layer not in MAY_IMPORT:
        return [f"shardwise/{path}: {layer} has no row in MAY_IMPORT; decide what it may import"]
    imports = imported_names(source, package=".".join(["shardwise", *path.parent.parts]))
    found = ((line, name, broken_rule(layer, path.stem, name)) for line, name in imports)
    return [f"shardwise/{path}:{line}: imports {name}, but {rule}" for line, name, rule in found if rule]


def test_every_import_follows_the_matrix():
    problems = []
    for file in sorted(PACKAGE.rglob("*.py")):
        path = PurePosixPath(file.relative_to(PACKAGE).as_posix())
        problems += violations(path, file.read_text(encoding="utf-8"))
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("engine/mesh.py", "import os\nfrom shardwise.data import packing", ":2: imports shardwise.data.packing"),
        (
            "engine/mesh.py",
            "from shardwise import rollout",
            ":1: imports shardwise.rollout, but engine may import config",
        ),
        ("engine/mesh.py", "from ..data.packing import pack", "imports shardwise.data.packing.pack"),
        ("engine/__init__.py", "from .. import data", "imports shardwise.data,"),
        ("engine/mesh.py", "def f():\n    import shardwise.recipes.rl", ":2: imports shardwise.recipes.rl"),
        ("engine/mesh.py", "import importlib\nimportlib.import_module('shardwise.data')", ":2: imports shardwise.data"),
        ("algorithms/kl.py", "from shardwise.config import Config", "algorithms may import types"),
        ("algorithms/kl.py", "import numpy as np", "algorithms imports the standard library and torch"),
        (
            "observability/sinks.py",
            "from shardwise.config.base import Config",
            "observability may import console, durable, fault_plan, types",
        ),
        ("types.py", "import shardwise.config", "types may import uploads"),
        ("types.py", "import pydantic", "types imports the standard library and torch"),
        ("config/base.py", "import torch", "config is free of torch"),
        ("config/base.py", "import numpy", "config imports the standard library and pydantic, yaml"),
        ("cli.py", "def main():\n    from transformers import AutoModel", ":2: imports transformers.AutoModel"),
        ("rewards/math.py", "import torch.nn", "rewards is free of torch"),
        ("recipes/rl.py", "from shardwise.cli import main", "imports shardwise.cli.main"),
        ("recipes/rl.py", "import ray", "ray belongs in a file named ray.py"),
        ("rollout/vllm.py", "import sglang", "sglang belongs in a file named sglang.py"),
        ("engine/mesh.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import ray", ":4: imports ray"),
        ("tools/x.py", "", "tools has no row in MAY_IMPORT"),
    ],
)
def test_checker_names_file_line_and_rule(path, source, expected):
    (problem,) = violations(PurePosixPath(path), source)
    assert problem.startswith(f"shardwise/{path}:")
    assert expected in problem


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "engine/mesh.py",
            "import torch\nfrom shardwise.types import Sample\nfrom shardwise.engine.model import build",
        ),
        ("engine/mesh.py", "from . import model\nfrom .wrap import shard\nfrom ..ops import rope"),
        ("engine/mesh.py", "from shardwise import __version__"),
        (
            "engine/mesh.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shardwise.data import packing",
        ),
        ("controller/ray.py", "def f():\n    import ray.util"),
        ("recipes/rl.py", "from shardwise import algorithms, data, engine, ops, rollout"),
        ("config/base.py", "import pathlib, yaml\nfrom pydantic import BaseModel"),
        ("__main__.py", "from shardwise.cli import main"),
    ],
)
def test_checker_allows_what_the_matrix_allows(path, source):
    assert violations(PurePosixPath(path), source) == []

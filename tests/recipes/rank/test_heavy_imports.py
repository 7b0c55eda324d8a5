"""Imports that the garbage collector does not look through."""

import gc
import subprocess
import sys

import torch  # noqa: F401

from shardwise.recipes.rank.heavy_imports import heavy_imports


def said(script: str) -> str:
    """By a process of its own, where torch is not imported yet."""
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_what_is_imported_is_frozen_and_the_collector_goes_on():
    script = (
        "import gc\nfrom shardwise.recipes.rank.heavy_imports import heavy_imports\nwith heavy_imports():\n"
        "    print(gc.isenabled())\n    import torch\nprint(gc.isenabled(), gc.get_freeze_count() > 100_000)"
    )
    assert said(script) == "False\nTrue True\n"


def test_the_process_of_a_rollout_engine_freezes_what_it_imports():
    script = "import gc, shardwise.recipes.rank.engine_child\nprint(gc.isenabled(), gc.get_freeze_count() > 100_000)"
    assert said(script) == "True True\n"


def test_a_failed_import_leaves_the_collector_on():
    script = (
        "import gc\nfrom shardwise.recipes.rank.heavy_imports import heavy_imports\ntry:\n"
        "    with heavy_imports():\n        import no_such_package\nexcept ImportError:\n    print(gc.isenabled())"
    )
    assert said(script) == "True\n"


def test_where_torch_is_there_already_nothing_is_frozen():
    before = gc.get_freeze_count()
    with heavy_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() <= before  # what was frozen may be freed

"""What a user meets first stays light, and every source file has its tests."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = ROOT / "shardwise", ROOT / "tests"

HELP = """
from shardwise.cli import main
sys.argv = ["shardwise", "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


@pytest.mark.parametrize("code", ["import shardwise", HELP], ids=["import", "help"])
def test_startup_imports_neither_torch_nor_transformers(code):
    script = f"import sys\n{code}\nprint(sorted({{'torch', 'transformers'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_rank_starts_without_what_few_runs_need():
    """Each of these packages takes a second or more of every start. What is imported is no work for the collector."""
    script = (
        "import gc, sys\nfrom shardwise.cli import main\ncode = main(['replay', 'nowhere'])\n"
        "print(code, sorted({'peft', 'datasets', 'math_verify'} & sys.modules.keys()))\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 100_000)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "2 []\nTrue True\n"), done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import shardwise.data.packing, shardwise.engine, shardwise.recipes.losses, benchmarks.gpu_train, conftest",
        "import pytest\nassert pytest.main(['tests/gpu', '--collect-only', '-p', 'no:cacheprovider']) == 0",
    ],
    ids=["engine", "gpu-tests"],
)
def test_the_engine_and_its_gpu_tests_start_without_what_only_runs_need(code):
    """A machine with a GPU may have little more than torch and transformers: see `make gpu-test`."""
    packages = ["rich", "xxhash", "datasets", "pyarrow", "peft", "math_verify", "tensorboard", "hypothesis"]
    script = f"import sys\nsys.modules.update(dict.fromkeys({packages}))\nsys.path.append({str(TESTS)!r})\n{code}"
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


def test_every_source_file_has_a_test_file():
    """engine/mesh.py is tested by test_mesh.py, or test_engine_mesh.py where another folder has a mesh.py too."""
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    tests = list(TESTS.rglob("test_*.py"))

    def is_tested(source: Path) -> bool:
        folder = source.relative_to(PACKAGE).parent.name
        others = folders - {folder}
        names = {f"test_{source.stem}.py", f"test_{folder}_{source.stem}.py"}
        return any(test.name in names and test.parent.name not in others for test in tests)

    sources = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name not in {"__init__.py", "__main__.py"}]
    untested = [str(path.relative_to(ROOT)) for path in sources if not is_tested(path)]
    assert not untested, f"source files without a test file: {', '.join(untested)}"


def test_every_test_file_has_a_name_of_its_own():
    """tests/ has no packages, so pytest cannot tell two files of one name apart."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]

"""The code for CUDA on a pretended device: no tensor of the host meets one of the device, and what only CUDA has
is called as it is declared. What is computed there only a GPU can tell (tests/gpu)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_backend import build_backend

HERE = Path(__file__).parent
PATHS = [HERE, HERE.parent, HERE.parent / "gpu", HERE.parent.parent]
NUM_CASES = {"core": 4, "options": 20, "rollout": 3, "layouts": 4, "families": 6, "vision": 10}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("g++") is None or torch.version.cuda is not None:
        pytest.skip("the pretended device needs g++, and a torch without CUDA, whose place it takes")
    return build_backend(tmp_path_factory.mktemp("backend"))


def outcomes_of(library: Path, group: str) -> dict[str, str | None]:
    """Name of each case -> its error."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "cuda_backend.py"), str(library), str(HERE / "dry_run.py"), group]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line["error"] for line in lines}


@pytest.mark.parametrize(
    "group", ["core", *(pytest.param(name, marks=pytest.mark.full) for name in NUM_CASES if name != "core")]
)
def test_nothing_but_a_gpu_is_missing(library, group):
    outcomes = outcomes_of(library, group)
    assert {name: error for name, error in outcomes.items() if error is not None} == {}
    assert len(outcomes) == NUM_CASES[group]


def test_a_tensor_of_the_host_among_those_of_the_device_is_found(library):
    (error,) = outcomes_of(library, "mistake").values()
    assert "at least two devices, cuda:0 and cpu" in error

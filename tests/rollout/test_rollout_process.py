"""What an engine's process is told of the world; what happens to it is in test_supervised.py."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch

from shardwise.config import ConfigError, EngineProcessConfig
from shardwise.rollout import EngineProcess, environment_of
from shardwise.rollout.process import ProcessLost

CPU = torch.device("cpu")


@pytest.fixture
def job(monkeypatch):
    """This process is rank 3 of a job."""
    variables = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0"}
    for name, value in {**variables, "SHARDWISE_FAULTS": "phase=serve", "OWN": "kept"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_process_is_alone_in_its_world(job):
    found = environment_of(CPU)
    told = {"LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "GROUP_RANK", "SHARDWISE_FAULTS"}
    assert not told & found.keys()
    assert (found["RANK"], found["OWN"]) == ("3", "kept")
    assert found["OMP_NUM_THREADS"] == str(torch.get_num_threads())
    assert str(Path(__file__).parents[2]) in found["PYTHONPATH"].split(os.pathsep)
    assert "CUDA_VISIBLE_DEVICES" not in found


def test_warnings_that_the_user_has_asked_for_are_kept(job, monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    assert environment_of(CPU)["PYTHONWARNINGS"] == "error,ignore:resource_tracker:UserWarning"


@pytest.mark.parametrize(
    ("visible", "index", "num_devices", "expected"),
    [(None, 2, 1, "2"), (None, 1, 2, "1,2"), ("7,5,GPU-ab", 1, 1, "5"), ("7,5,GPU-ab", 1, 2, "5,GPU-ab")],
)
def test_on_cuda_it_sees_the_device_of_its_rank_and_those_after_it(
    job, monkeypatch, visible, index, num_devices, expected
):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = environment_of(torch.device("cuda", index), num_devices=num_devices)
    assert found["CUDA_VISIBLE_DEVICES"] == expected


def test_devices_of_other_ranks_are_refused(job, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: .* which are those of other ranks here \(3 on"):
        environment_of(torch.device("cuda", 1), num_devices=2)
    assert environment_of(torch.device("cuda", 2), num_devices=2)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment_of(torch.device("cuda", 1))["CUDA_VISIBLE_DEVICES"] == "1"


def test_devices_that_are_not_there_are_refused(job, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2: an engine takes the device of its rank, 3, and"):
        environment_of(torch.device("cuda", 3), num_devices=2)
    with pytest.raises(ConfigError, match="works on CUDA and CPU devices, not on xpu"):
        environment_of(torch.device("xpu", 0))


def start(code: str, **keys) -> EngineProcess:
    """A process that is no engine's."""
    return EngineProcess(
        [sys.executable, "-c", code],
        json.dumps({"some": "setup"}),
        environment=environment_of(CPU),
        memory_fd=os.memfd_create("test"),
        config=EngineProcessConfig(**keys),
        name="the engine",
    )


def test_what_a_process_printed_is_passed_on_and_quoted_when_it_is_gone(capfd):
    code = "import sys; print('a | b'); print(sys.stdin.read(), file=sys.stderr); sys.exit(4)"
    process = start(code)
    with pytest.raises(ProcessLost, match=r"ended its process with exit code 4; it last printed: a \| b \| \{\"some\""):
        process.start()
    process.close()
    said = capfd.readouterr().err
    assert said.startswith('a | b\n{"some": "setup"}\n')
    assert said.count("warning: the engine ended its process with exit code 4") == 1


def test_a_process_that_does_not_get_there_in_time_is_ended(capfd):
    process = start("import time; time.sleep(1000)", start_timeout_seconds=2)
    with pytest.raises(ProcessLost, match=r"was ended: after \d s it was not done with `start`"):
        process.start()
    assert process.is_gone
    process.close()
    assert "the engine: waiting for `start`, " in capfd.readouterr().err


def test_a_process_that_is_closed_is_gone_without_a_word(capfd):
    process = start("import time; time.sleep(1000)")
    process.close()
    assert process.is_gone
    assert capfd.readouterr().err == ""


def test_a_command_that_is_not_there_is_an_error():
    with pytest.raises(OSError, match="nowhere"):
        EngineProcess(
            ["/nowhere"],
            "",
            environment={},
            memory_fd=os.memfd_create("test"),
            config=EngineProcessConfig(),
            name="the engine",
        )


WITH_A_WORKER = """
import os, signal, subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL)
print(worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_process_had_started_ends_with_it_also_where_it_died_by_itself(capfd):
    """Workers of vLLM's hold a device."""
    memory_fd = os.memfd_create("test")
    process = EngineProcess(
        [sys.executable, "-c", WITH_A_WORKER],
        "",
        environment=environment_of(CPU),
        memory_fd=memory_fd,
        config=EngineProcessConfig(),
        name="the engine",
    )
    with pytest.raises(ProcessLost, match="SIGKILL"):
        process.start()
    process.close()
    os.close(memory_fd)
    pid = int(re.search(r"^\d+$", capfd.readouterr().err, re.MULTILINE)[0])
    deadline = time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < deadline, "the worker lives on"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

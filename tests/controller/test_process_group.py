import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.config import ConfigError
from shardwise.controller.process_group import Rank, backend_of, open_store, process_group


def test_a_process_alone_is_rank_0_of_1(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert Rank.from_environment() == Rank(rank=0, world_size=1, local_rank=0)


def test_ranks_are_read_from_what_torchrun_sets(monkeypatch):
    for name, value in {"RANK": "13", "WORLD_SIZE": "16", "LOCAL_RANK": "5"}.items():
        monkeypatch.setenv(name, value)
    assert Rank.from_environment() == Rank(rank=13, world_size=16, local_rank=5)


def test_group_of_one_computes_collectives_and_is_left_at_the_end():
    with process_group(Rank(0, 1, 0), device_type="cpu", timeout_seconds=5) as control:
        assert dist.get_world_size() == control.size() == 1
        value = torch.tensor([3.5])
        dist.all_reduce(value)
        control.allreduce([value]).wait()
        assert value.item() == 3.5
    assert not dist.is_initialized()


def test_group_is_left_after_an_error_too():
    with pytest.raises(KeyError, match="inside"), process_group(Rank(0, 1, 0), device_type="cpu", timeout_seconds=5):
        raise KeyError("inside")
    assert not dist.is_initialized()


def test_a_rank_that_never_comes_is_an_error_within_the_timeout(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDWISE_STORE", str(tmp_path / "store"))
    expected = "rank 0 could not join the other ranks of 2 within 1 s: "
    start = time.monotonic()
    with (
        pytest.raises(RuntimeError, match=expected),
        process_group(Rank(0, 2, 0), device_type="cpu", timeout_seconds=1),
    ):
        pytest.fail("joined a group of two alone")
    assert time.monotonic() - start < 10


def test_f16_a_port_that_another_job_has_is_named_at_once(monkeypatch):
    for name in ("SHARDWISE_STORE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        start = time.monotonic()
        with pytest.raises(ConfigError, match=rf"^MASTER_PORT={port} is in use on this machine, perhaps by another "):
            open_store(Rank(0, 2, 0), timeout_seconds=60)
        assert time.monotonic() - start < 5


def test_backend_follows_the_device_and_not_the_build_of_torch(monkeypatch):
    """A CUDA build of torch on a machine without a GPU knows NCCL, whose group cannot be made there."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert backend_of("cpu") == "gloo"
    assert backend_of("cuda") == "cpu:gloo,cuda:nccl"


MEETS = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from shardwise.controller.process_group import Rank, process_group
with process_group(Rank.from_environment(), device_type="cpu", timeout_seconds=20) as control:
    print("met", control.size())
"""


def test_ranks_whose_agents_count_restarts_differently_meet_in_the_store_of_all_attempts():
    """As where the rank of one host died: its agent counts that, and the other one follows."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
        "WORLD_SIZE": "2",
    }
    environment = {name: value for name, value in os.environ.items() if name != "SHARDWISE_STORE"} | torchrun
    for counts in ("00", "02"):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", MEETS],
                env=environment | {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": count},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, count in enumerate(counts)
        ]
        assert [rank.communicate()[0] for rank in ranks] == ["met 2\n"] * 2

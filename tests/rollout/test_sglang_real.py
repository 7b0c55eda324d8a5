"""What tests/sglang_stub takes for granted, of the real server (sglang_engines.py)."""

import http.client
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sglang_engines
import torch
from sglang_engines import needs_sglang
from stubbed_sglang import request
from test_sglang import weights_of
from test_sglang_server import is_running

from shardwise.config import ConfigError, SglangRollout, TrainingError
from shardwise.processes import mapped_files
from shardwise.rollout import SglangEngine

pytestmark = [needs_sglang, pytest.mark.slow]
CONTEXT = 40


@pytest.fixture(scope="module", autouse=True)
def variables():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sglang_engines.VARIABLES.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def folder(model_folders):
    return model_folders["llama"]


def open_engine(folder, *, args=(), **keys) -> SglangEngine:
    config = SglangRollout(python=sglang_engines.PYTHON, args=sglang_engines.ARGS | dict(args), **keys)
    return SglangEngine.from_folder(
        folder, config, dtype=torch.float32, max_rows=4, device=sglang_engines.GPU, stop_token_ids=[7]
    )


@pytest.fixture(scope="module")
def engine(folder, tmp_path_factory):
    keys = {"weights_folder": str(tmp_path_factory.mktemp("weights")), "sleep_level": 2}
    engine = open_engine(folder, args={"context_length": CONTEXT}, **keys)
    yield engine
    engine.close()


def test_an_argument_that_sglang_does_not_know_is_named(folder):
    with pytest.raises(ConfigError, match=r"SGLang cannot start: .*unrecognized arguments: --attention-bakend fa3"):
        open_engine(folder, args={"attention_bakend": "fa3"})


def test_without_the_key_nothing_is_answered(engine):
    def status(path, key):
        connection = http.client.HTTPConnection("127.0.0.1", engine._server._port, timeout=30)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection.request("POST", path, "{}", headers)
        return connection.getresponse().status

    for path, other in [("/generate", None), ("/update_weights_from_disk", engine._server._key)]:
        assert status(path, None) == status(path, "guessed") == 401
        assert other is None or status(path, other) == 401


def test_a_completion_that_the_server_cuts_short_is_an_error_and_not_a_sample(engine):
    with pytest.raises(TrainingError, match=f"answered /generate with status 400: .*context length of {CONTEXT}"):
        engine.generate([request(max_tokens=CONTEXT - 1)])
    many = [request(prompt_ids=[prompt, 6], max_tokens=CONTEXT - 2, temperature=0.0) for prompt in range(8, 40)]
    with pytest.raises(TrainingError, match=r"ended a completion of a after 3\d of max_tokens=38: .*raise context_len"):
        engine.generate(many)  # one of them does not end by itself


def test_a_completion_of_another_version_is_an_error(engine):
    engine._server.administer("/update_weight_version", {"new_version": "9", "abort_all_requests": False})
    with pytest.raises(TrainingError, match="the SGLang server of rank 0 sampled with version 9, 0 is due"):
        engine.generate([request()])
    engine.commit_weights(0)
    assert engine.generate([request()])


def test_weights_that_give_no_numbers_are_an_error(folder, engine):
    weights = weights_of(folder)
    norm = weights["model.norm.weight"]
    engine.load_weights((weights | {"model.norm.weight": norm * torch.nan}).items())
    engine.commit_weights(0)
    with pytest.raises(TrainingError, match="gives no distribution for a token"):
        engine.logprobs([[5, 6, 7]])
    with pytest.raises(TrainingError, match=r"gives no distribution|SGLang"):
        engine.generate([request()])
    engine.load_weights(weights.items())
    engine.commit_weights(0)
    assert engine.generate([request()])


def test_sleep_drops_the_weights_and_a_sync_brings_them_back(folder, engine):
    before = engine.generate([request(num_completions=8)])
    engine.sleep()
    engine.wake("weights")
    with pytest.raises(TrainingError, match="sleep_level=2 dropped the weights, and no weight sync came since"):
        engine.generate([request()])
    engine.load_weights(weights_of(folder).items())
    engine.commit_weights(0)
    engine.wake("weights", "kv_cache")
    assert engine.generate([request(num_completions=8)]) == before


def test_sleep_may_follow_a_generation_at_once(folder, engine):
    """However the last of its completions ended, and however many were computed beside it."""
    for num_completions in (1, 3, 9, 1, 5):
        engine.generate([request(num_completions=num_completions, max_tokens=2 + num_completions)])
        engine.sleep()
        engine.wake("weights", "kv_cache")
        engine.load_weights(weights_of(folder).items())
        engine.commit_weights(0)


def test_weights_that_move_to_the_host_while_it_sleeps_come_back_by_themselves(folder, tmp_path):
    engine = open_engine(folder, sleep_level=1, weights_folder=str(tmp_path))
    before = engine.generate([request(num_completions=4)]), engine.logprobs([[5, 6, 7, 8]])
    engine.sleep()
    engine.wake("weights", "kv_cache")
    assert (engine.generate([request(num_completions=4)]), engine.logprobs([[5, 6, 7, 8]])) == before
    engine.close()


@pytest.mark.alone
def test_a_stopped_server_is_an_error_after_the_health_timeout_and_can_be_closed(folder, monkeypatch):
    engine = open_engine(folder, health_timeout_seconds=5.0)
    monkeypatch.setattr("shardwise.rollout.sglang_server._GLANCE_SECONDS", 0.5)  # /health takes a second at least
    children = children_of(engine._server._process.pid)
    assert len(children) >= 2
    engine._server._process.send_signal(signal.SIGSTOP)
    with pytest.raises(TrainingError, match="no sign of life for health_timeout_seconds=5; it printed last"):
        engine.generate([request()])
    engine._server._process.send_signal(signal.SIGCONT)
    engine.close()
    await_end(children)


def test_a_server_has_no_names_in_shared_memory_that_could_outlive_it(folder):
    engine = open_engine(folder)
    files = mapped_files(engine._server._process.pid)
    assert len(files) > 50, "its libraries"
    assert not [file for file in files if file.is_relative_to("/dev/shm")]  # semaphores: by Python's resource tracker
    engine.close()


def test_a_killed_scheduler_is_an_error(folder):
    """The process that computes: SGLang's own watchdog ends the server that waits for it."""
    engine = open_engine(folder)
    assert engine.generate([request()])
    scheduler, *_ = [pid for pid in children_of(engine._server._process.pid) if "scheduler" in command_of(pid)]
    subprocess.run(["kill", "-KILL", str(scheduler)], check=True)
    with pytest.raises(TrainingError, match=r"the SGLang server of rank 0 (died|showed no sign of life|ended)"):
        engine.generate([request(num_completions=50)])
    engine.close()


RANK = """
import sys, time
sys.path[:0] = {paths!r}
from pathlib import Path
from test_sglang_real import open_engine
print(open_engine(Path({folder!r}))._server._process.pid, flush=True)
time.sleep(600)
"""


def test_no_server_outlives_its_rank(folder):
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    body = RANK.format(paths=paths, folder=str(folder))
    with subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True) as rank:
        pid = int(rank.stdout.readline())
        children = children_of(pid)
        rank.kill()
    await_end([pid, *children])


def children_of(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    found = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    return [each for child in found for each in (child, *children_of(child))]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def await_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while running := [command_of(pid) for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.1)

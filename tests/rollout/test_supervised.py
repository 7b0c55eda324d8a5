"""What happens to a rollout engine's own process (F6 to F9), and that nobody can tell afterwards. What every engine
does is in tests/contract."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from forgetful_engine import ForgetfulEngine

from shardwise import fault_plan
from shardwise.config import ConfigError, EngineLostError, EngineProcessConfig, ModelConfig, SamplingConfig
from shardwise.fault_plan import begin_plan
from shardwise.recipes.rank.rollout_engines import build_rollout
from shardwise.recipes.sampling.rollouter import rest_of
from shardwise.rollout import EngineProcess, SupervisedEngine, environment_of
from shardwise.rollout.process import ProcessLost
from shardwise.rollout.serving import _Served
from shardwise.rollout.shared_weights import packed
from shardwise.transfer import WeightSyncError, sync_local
from shardwise.types import GenerateRequest

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CHILD = Path(__file__).parent / "stubborn_child.py"
SECONDS = 60
REQUESTS = [
    GenerateRequest(uid=f"row {i}", prompt_ids=[5, 6 + i], num_completions=4, max_tokens=40, temperature=1.0)
    for i in range(6)
]


@pytest.fixture(scope="module")
def open_engine(model_folders):
    """`open_engine(process=None)`: the same model in this process, or in one of its own with these keys."""
    opened = []

    def build(process=None):
        config = SamplingConfig(engine={"process": process}, max_concurrent_sequences=16)
        opened.append(
            build_rollout(ModelConfig(path=str(model_folders["llama"])), config, dtype=torch.float32, device=CPU)
        )
        return opened[-1]

    yield build
    for engine in opened:
        engine.close()


@pytest.fixture(scope="module")
def undisturbed(open_engine):
    return open_engine()


@pytest.fixture(scope="module")
def supervised(open_engine):
    """Which may lose many processes: every test that takes it takes one or two."""
    return open_engine({"max_restarts": 50, "health_timeout_seconds": 8})


@pytest.fixture
def planned():
    """`planned("phase=serve action=kill")`: faults of this test alone."""
    yield begin_plan
    fault_plan.plan.cache_clear()


class Sender:
    """The weights of an engine, changed by a seed. Before the tensor `at` it calls `disturb`."""

    def __init__(self, engine, seed, *, at=None, disturb=None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = {
            name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in sorted(engine.served_weights())
        }
        self._at, self._disturb = at, disturb

    def named_weights(self, dtype):
        for place, (name, tensor) in enumerate(self.weights.items()):
            if place == self._at:
                self._disturb()
            yield name, tensor


@pytest.fixture
def synced(undisturbed, supervised):
    """`synced(seed)`: both engines serve weights of that seed, and what they are."""

    def sync(seed):
        original = {name: tensor.clone() for name, tensor in undisturbed.served_weights()}
        sender = Sender(undisturbed, seed)
        sync_both(undisturbed, supervised, sender, version=seed)
        return original

    return sync


def sync_both(undisturbed, supervised, sender, *, version):
    receipts = [
        sync_local(sender.named_weights(torch.float32), engine, version=version) for engine in (undisturbed, supervised)
    ]
    assert receipts[0] == receipts[1]
    assert receipts[1].num_proven == receipts[1].num_tensors > 10


def wait_until(condition, seconds=SECONDS) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        time.sleep(0.02)
    return time.monotonic() - began


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.full
def test_the_engine_is_in_another_process_and_computes_the_same(undisturbed, supervised):
    assert isinstance(supervised, SupervisedEngine)
    assert supervised.pid != os.getpid()
    expected = undisturbed.generate(REQUESTS)
    assert supervised.generate(REQUESTS) == expected
    assert supervised.logprobs([[5, 6, 7]]) == undisturbed.logprobs([[5, 6, 7]])
    assert dict(supervised.served_checksums()) == dict(undisturbed.served_checksums())


def test_a_sync_proves_what_the_process_serves(undisturbed, supervised, synced):
    before = supervised.generate(REQUESTS)
    synced(2)
    after = supervised.generate(REQUESTS)
    assert after == undisturbed.generate(REQUESTS) != before
    assert {completion.policy_version for group in after for completion in group} == {2}
    assert all(torch.equal(tensor, dict(undisturbed.served_weights())[n]) for n, tensor in supervised.served_weights())


def test_f06_trap_25_a_process_killed_while_idle_is_noticed_in_seconds_and_replaced_with_its_weights(
    undisturbed, supervised, synced, capfd
):
    synced(3)
    supervised.take_restarts()
    killed = supervised.pid
    os.kill(killed, signal.SIGKILL)
    said = ""

    def noticed():
        nonlocal said
        said += capfd.readouterr().err
        return "ended its process by SIGKILL" in said

    assert wait_until(noticed) < 5
    assert supervised.generate(REQUESTS) == undisturbed.generate(REQUESTS)
    assert supervised.pid != killed
    assert supervised.take_restarts() == 1
    assert supervised.take_restarts() == 0
    assert "the rollout engine of rank 0: restart" in capfd.readouterr().err


def test_f06_trap_25_requests_of_a_process_killed_while_serving_are_asked_of_the_next_one_to_the_same_bits(
    undisturbed, supervised, synced, planned
):
    synced(4)
    supervised.take_restarts()
    planned(["phase=serve action=kill"])
    assert supervised.generate(REQUESTS) == undisturbed.generate(REQUESTS)
    assert supervised.take_restarts() == 1


def test_f06_trap_25_a_process_killed_while_weights_stream_serves_no_mixture(undisturbed, supervised, synced):
    synced(5)
    supervised.take_restarts()
    killed = supervised.pid
    streaming = Sender(undisturbed, 6, at=4, disturb=partial(_kill, killed))
    sync_local(Sender(undisturbed, 6).named_weights(torch.float32), undisturbed, version=6)
    sync_local(streaming.named_weights(torch.float32), supervised, version=6)
    assert supervised.take_restarts() == 1
    assert supervised.generate(REQUESTS) == undisturbed.generate(REQUESTS)


@pytest.mark.full
def test_f06_trap_25_a_process_killed_while_it_loads_weights_serves_no_mixture(
    undisturbed, supervised, synced, planned
):
    synced(6)
    supervised.take_restarts()
    planned(["phase=load action=kill"])
    sync_both(undisturbed, supervised, Sender(undisturbed, 7), version=7)
    assert supervised.generate(REQUESTS) == undisturbed.generate(REQUESTS)
    assert supervised.take_restarts() == 1


def _kill(pid: int) -> None:
    if is_alive(pid):
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))


@pytest.mark.full
def test_f06_trap_25_after_a_sync_that_broke_off_no_process_generates_until_a_whole_one(
    undisturbed, supervised, synced
):
    synced(8)
    sender = Sender(undisturbed, 9)
    sender.weights["model.norm.weight"] = sender.weights["model.norm.weight"] * torch.nan
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight holds values that are not finite"):
        sync_local(sender.named_weights(torch.float32), supervised, version=9)
    _kill(supervised.pid)
    with pytest.raises(RuntimeError, match="cannot generate: the last weight sync broke off"):
        supervised.generate(REQUESTS)
    sync_both(undisturbed, supervised, Sender(undisturbed, 10), version=10)
    assert supervised.generate(REQUESTS) == undisturbed.generate(REQUESTS)


@pytest.mark.full
def test_f06_trap_25_a_process_killed_as_it_is_interrupted_loses_no_token(undisturbed, supervised, synced):
    """The next one is interrupted in its place; what both have not sampled is asked for afterwards."""
    synced(13)
    supervised.take_restarts()
    victim = supervised.pid

    def kill_and_interrupt():
        _kill(victim)
        return True

    groups = supervised.generate(REQUESTS, is_interrupted=kill_and_interrupt)
    assert supervised.take_restarts() == 1
    assert "interrupted" in {completion.finish_reason for group in groups for completion in group}
    for request, expected, group in zip(REQUESTS, undisturbed.generate(REQUESTS), groups, strict=True):
        for part in rest_of(request, group):
            ((*rest,),) = supervised.generate([part])
            for index, completion in enumerate(rest, start=part.first_index):
                group[index] = group[index].then(completion)
        for completion, other in zip(group, expected, strict=True):
            assert completion.token_ids == other.token_ids
            assert completion.logprobs == pytest.approx(other.logprobs, rel=1e-5, abs=1e-5)
            assert completion.versions == [13] * len(completion.token_ids)


@pytest.mark.parametrize("when", ["idle", pytest.param("serving", marks=pytest.mark.full)])
def test_f07_a_stopped_process_is_found_by_its_health_and_replaced(
    undisturbed, supervised, synced, planned, capfd, when
):
    synced(11 if when == "idle" else 12)
    supervised.take_restarts()
    stopped = supervised.pid
    if when == "serving":
        planned(["phase=serve action=stop"])
    else:
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: not is_alive(stopped))
    assert supervised.generate(REQUESTS) == undisturbed.generate(REQUESTS)
    assert not is_alive(stopped)
    assert supervised.take_restarts() == 1
    assert "was ended: it did not answer a health probe within 8 s" in capfd.readouterr().err


class InThisProcess:
    """Stands in for an EngineProcess: what a process does with its calls, without one."""

    def __init__(self, engine, memory_fd) -> None:
        self._served = _Served(engine, memory_fd, self._tell, lambda: False)

    def start(self):
        return packed(self._served.forms)

    def call(self, method, *arguments, on_finished=None, **_):
        self._on_finished = on_finished
        return self._served.do(method, arguments)

    def _tell(self, place) -> None:
        self._on_finished(place)

    def close(self) -> None:
        pass


def test_requests_are_told_as_they_are_finished(supervised):
    """An interruption follows the first one, and meets the others in the middle."""
    first, *others = REQUESTS
    told = []
    groups = supervised.generate(
        [replace(first, num_completions=1, max_tokens=1), *(replace(other, max_tokens=100) for other in others)],
        on_finished=told.append,
        is_interrupted=lambda: bool(told),
    )
    assert told[0] == 0
    assert len(told) < len(REQUESTS)
    assert "interrupted" in {completion.finish_reason for group in groups for completion in group}
    assert "interrupted" not in {completion.finish_reason for place in told for completion in groups[place]}


def test_a_request_is_told_once_where_it_is_asked_of_two_processes(open_engine):
    told, engine = [], open_engine()

    class LostAfterTwo(InThisProcess):
        def _tell(self, place):
            super()._tell(place)
            if len(told) == 2:
                raise ProcessLost("died")

    processes = iter([LostAfterTwo, InThisProcess])
    supervised = SupervisedEngine(lambda memory_fd: next(processes)(engine, memory_fd), max_restarts=1, name="it")
    assert supervised.generate(REQUESTS, on_finished=told.append) == engine.generate(REQUESTS)
    assert supervised.take_restarts() == 1
    assert sorted(told) == list(range(len(REQUESTS)))


def test_weights_that_sleeping_dropped_are_loaded_again_from_memory_before_anything_is_sampled(open_engine):
    inner, sender = ForgetfulEngine(open_engine()), Sender(open_engine(), 14)
    engine = SupervisedEngine(partial(InThisProcess, inner), max_restarts=0, name="the rollout engine of rank 0")
    engine.sleep()
    engine.wake("weights")
    sync_local(sender.named_weights(torch.float32), engine, version=14)
    engine.wake("weights", "kv_cache")
    before = engine.generate(REQUESTS)
    assert inner.num_syncs == 1
    engine.sleep()
    assert not engine.lacks_weights
    engine.wake("weights")  # for a sync, which brings others
    assert inner.lacks_weights
    engine.wake("weights", "kv_cache")
    assert engine.generate(REQUESTS) == before
    assert {completion.policy_version for group in before for completion in group} == {14}
    assert (inner.num_dropped, inner.num_syncs) == (2, 2)


def test_signals_to_the_job_do_not_reach_the_process(supervised):
    assert os.getpgid(supervised.pid) == supervised.pid != os.getpgid(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(supervised.pid, number)
    pid = supervised.pid
    assert supervised.generate(REQUESTS[:1])
    assert supervised.pid == pid


def open_stubborn(folder, *, name="the rollout engine of rank 0", exits=False, **keys) -> SupervisedEngine:
    config = EngineProcessConfig(**keys)
    setup = json.dumps({"folder": str(folder), "exits": exits})

    def start(memory_fd):
        return EngineProcess(
            [sys.executable, str(CHILD)],
            setup,
            environment=environment_of(CPU),
            memory_fd=memory_fd,
            config=config,
            name=name,
        )

    return SupervisedEngine(start, max_restarts=config.max_restarts, name=name)


@pytest.mark.full
def test_f08_when_the_restarts_are_used_up_the_error_tells_the_history(model_folders, planned):
    engine = open_stubborn(model_folders["llama"], max_restarts=1)
    planned(["phase=serve nth=1 action=kill", "phase=serve nth=2 action=kill"])
    with pytest.raises(EngineLostError) as caught:
        engine.generate(REQUESTS[:1])
    engine.close()
    first, *history = str(caught.value).splitlines()
    assert first == ("the rollout engine of rank 0 was lost 2 times, and rollout.engine.process.max_restarts=1:")
    for number, line in enumerate(history, start=1):
        assert re.match(rf"  {number}\. after \d+ s, in `generate`, it ended its process by SIGKILL", line)
    assert len(history) == 2


@pytest.mark.full
def test_f08_a_process_that_never_gets_there_is_no_endless_loop(model_folders):
    with pytest.raises(EngineLostError, match="was lost 2 times") as caught:
        open_stubborn(model_folders["llama"], max_restarts=1, exits=True)
    assert str(caught.value).count("ended its process with exit code 7; it last printed: no device here") == 2


def test_f08_a_model_that_cannot_be_loaded_is_no_reason_to_restart(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = SamplingConfig(engine={"process": {}})
    with pytest.raises(Exception, match=r"config\.json is not a model config: ") as caught:
        build_rollout(ModelConfig(path=str(tmp_path)), config, dtype=torch.float32, device=CPU)
    assert type(caught.value).__name__ == "ModelError"


@pytest.mark.parametrize("uid", ["waits", "raises"])
def test_f08_an_engine_that_has_lost_a_worker_is_lost_whatever_it_makes_of_that(model_folders, uid):
    engine = open_stubborn(model_folders["llama"], max_restarts=0)
    with pytest.raises(EngineLostError, match="was lost 1 times") as caught:
        engine.generate([GenerateRequest(uid=uid, prompt_ids=[5], max_tokens=1, temperature=1.0)])
    engine.close()
    history = str(caught.value).splitlines()[-1]
    assert "in `generate`, it ended its process with exit code 1; it last printed: " in history
    assert history.endswith("generating 1 | its worker Worker-1 ended its process by SIGKILL (out of memory?)")


@pytest.mark.full
def test_f09_a_row_that_never_finishes_is_asked_once_more_and_then_named(model_folders, capfd):
    engine = open_stubborn(model_folders["llama"], max_restarts=5, request_timeout_seconds=8)
    stuck = GenerateRequest(uid="stuck", prompt_ids=[5], max_tokens=1, temperature=1.0)
    with pytest.raises(EngineLostError, match="did not get done with the same requests twice") as caught:
        engine.generate([*REQUESTS[:2], stuck])
    engine.close()
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    for line in lines[1:]:
        assert "it was not done with uid stuck; it last printed: " in line
        assert line.endswith("generating 3")
    said = capfd.readouterr().err
    assert re.search(r"the rollout engine of rank 0: waiting for uid stuck, \d+ s", said)


PARENT = """
import sys, time
sys.path[:0] = {paths!r}
from test_supervised import open_stubborn
print(open_stubborn({folder!r}).pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("state", [pytest.param("idle", marks=pytest.mark.full), "stopped"])
def test_the_process_ends_with_its_parent(model_folders, state):
    paths = [str(folder) for folder in reversed(Path(__file__).parents[:3])]
    code = PARENT.format(paths=paths, folder=str(model_folders["llama"]))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    if state == "stopped":
        os.kill(child, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_alive(child), seconds=10)


def test_a_trace_is_refused(supervised):
    with pytest.raises(ConfigError, match=r"rollout\.engine\.process: .* remove it"):
        supervised.trace()

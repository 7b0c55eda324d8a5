"""What is vLLM's own, beside the contract of every engine (tests/contract)."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import MARK, marked
from transformers import Qwen3ForCausalLM
from vllm_engines import ARGS, CPU, needs_vllm, open_engine, request, vllm_folder

from shardwise.config import (
    ConfigError,
    EngineLostError,
    ModelConfig,
    ModelError,
    SamplingConfig,
    TrainingError,
)
from shardwise.families import GridTower
from shardwise.processes import end_group
from shardwise.recipes.rank.rollout_engines import build_rollout
from shardwise.rollout import SupervisedEngine, VllmEngine
from shardwise.transfer import sync_local

__all__ = ["marked", "vllm_folder"]  # fixtures


@pytest.fixture(scope="module")
def folder(vllm_folder):
    return vllm_folder


@pytest.fixture(scope="module")
def engine(folder):
    return open_engine(folder)


def test_sleeping_is_refused_on_a_cpu(folder):
    with pytest.raises(ConfigError, match=r"sleep_level=2 needs a CUDA device.*set it to 0"):
        open_engine(folder, sleep_level=2)


@needs_vllm
def test_images_of_a_model_that_sees_none_are_refused(engine):
    seen = GridTower(merge_size=2, num_values=96).black()
    with pytest.raises(ModelError, match=r"^a has images: "):
        engine.generate([request(images=seen)])


@needs_vllm
def test_logprobs_that_vllm_cannot_give_are_refused(folder, engine):
    with pytest.raises(ConfigError, match=r"temperature 0\.5 to a vLLM engine whose logprobs are at 1"):
        engine.generate([request(temperature=0.5)])
    warm = open_engine(folder, temperature=0.5)
    assert warm.generate([request(temperature=0.5), request(temperature=0.0, top_k=3)])
    with pytest.raises(ConfigError, match="top_k, top_p, min_p or bad_token_ids"):
        warm.generate([request(temperature=0.5, top_k=3)])


@needs_vllm
def test_logprobs_of_sequences_are_those_of_transformers_at_temperature_one(folder, engine):
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sequences = [[5, 6, 7, 8], [9, 9], [11, *range(20, 44), 11]]
    for sequence, found in zip(sequences, engine.logprobs(sequences), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([sequence])).logits[0, :-1].double()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found).double(), expected, atol=1e-5, rtol=0)


@needs_vllm
def test_served_weights_tell_what_can_be_loaded_and_cannot_be_read(folder, engine):
    model = Qwen3ForCausalLM.from_pretrained(folder)
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    served = dict(engine.served_weights())
    assert {name: (t.shape, t.dtype) for name, t in served.items()} == {
        name: (t.shape, t.dtype) for name, t in expected.items()
    }
    assert all(tensor.is_meta for tensor in served.values())


@needs_vllm
def test_nothing_is_generated_between_the_first_tensor_and_the_commit(folder, engine):
    weights = dict(Qwen3ForCausalLM.from_pretrained(folder).state_dict())
    del weights["lm_head.weight"]

    def breaking_off():
        yield from list(weights.items())[:3]
        raise OSError("the line is dead")

    before = engine.generate([request()])
    with pytest.raises(OSError, match="the line is dead"):
        engine.load_weights(breaking_off())
    with pytest.raises(RuntimeError, match="rank 0 cannot generate: the last weight sync broke off"):
        engine.generate([request()])
    engine.load_weights(item for item in weights.items() if item[0] != "model.norm.weight")
    with pytest.raises(RuntimeError, match=r"version 2 cannot be committed .* did not bring model.norm.weight"):
        engine.commit_weights(2)
    engine.load_weights(weights.items())
    with pytest.raises(RuntimeError, match="weights have arrived that are not committed"):
        engine.generate([request()])
    with pytest.raises(RuntimeError, match="weights have arrived that are not committed"):
        engine.logprobs([[5, 6, 7]])
    engine.commit_weights(0)
    assert engine.generate([request()]) == before


@needs_vllm
def test_a_failure_of_vllm_names_the_engine(engine, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("EngineCore died")

    monkeypatch.setattr(engine._llm.llm_engine, "add_request", fail)
    with pytest.raises(TrainingError, match="vLLM engine of rank 0 failed while generating: RuntimeError: EngineCore"):
        engine.generate([request()])


@needs_vllm
def test_requests_before_one_that_vllm_refuses_answer_nobody(folder, monkeypatch):
    engine = open_engine(folder)
    wanted = [
        request(uid="a", prompt_ids=[5, 6], temperature=0.0),
        request(uid="b", prompt_ids=[9, 7], temperature=0.0),
    ]
    (expected,) = engine.generate(wanted[1:])
    add = engine._llm.llm_engine.add_request

    def add_first(number, *arguments, **options):
        if int(number) == 2:
            raise RuntimeError("too large")
        return add(number, *arguments, **options)

    monkeypatch.setattr(engine._llm.llm_engine, "add_request", add_first)
    with pytest.raises(TrainingError, match="too large"):
        engine.generate(wanted)
    assert engine.generate(wanted[1:]) == [expected]


@needs_vllm
def test_what_goes_on_is_drawn_from_another_seed_than_what_it_follows(folder, engine):
    """vLLM's generators begin with a request: with one seed the rest would be drawn as the beginning was. Behind one
    token and behind two that are the same the next has one distribution p, and a share of sum p^2 of independent draws
    is equal, within 5 standard deviations."""
    num_draws = 400
    whole = [request(uid=f"{i}", prompt_ids=[6], max_tokens=1) for i in range(num_draws)]
    rest = [replace(one, partial_token_ids=[6]) for one in whole]
    first, again, other = ([group[0].token_ids for group in engine.generate(wanted)] for wanted in (whole, whole, rest))
    assert first == again
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([[6, 6]])).logits[0, -1].softmax(-1).square().sum().item()
    share = sum(a == b for a, b in zip(first, other, strict=True)) / num_draws
    assert expected < 0.5
    assert abs(share - expected) < 5 * (expected * (1 - expected) / num_draws) ** 0.5


class Recorder:
    """Stands in for vllm.LLM on a machine without CUDA: notes what is called."""

    class model_config:
        max_model_len = 64
        multimodal_config = None

    resets = True

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.llm_engine = self

    def sleep(self, *, level) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags) -> None:
        self.calls.append(("wake_up", sorted(tags)))

    def collective_rpc(self, method, *, args) -> None:
        self.calls.append(method)
        list(args[0])

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return self.resets

    def reset_encoder_cache(self) -> None:
        self.calls.append("reset_encoder_cache")


def test_parts_wake_in_stages_and_dropped_weights_are_not_generated_with(folder):
    model = Qwen3ForCausalLM.from_pretrained(folder)
    llm = Recorder()
    engine = VllmEngine(llm, model, stop_token_ids=[3], sleep_level=2, has_raw_logprobs=True)
    for _ in range(2):
        engine.sleep()
    engine.wake("weights")
    with pytest.raises(TrainingError, match="sleep_level=2 dropped the weights, and no weight sync came since"):
        engine.generate([request()])
    engine.load_weights(list(engine.served_weights()))
    engine.commit_weights(1)
    engine.wake("weights", "kv_cache")
    engine.wake("weights", "kv_cache")
    assert llm.calls == [
        ("sleep", 2),
        ("wake_up", ["weights"]),
        "load_checkpoint_weights",
        "reset_prefix_cache",
        "reset_encoder_cache",
        ("wake_up", ["kv_cache"]),
    ]


def test_a_prefix_cache_that_outlives_its_weights_stops_the_run(folder):
    model = Qwen3ForCausalLM.from_pretrained(folder)
    llm = Recorder()
    llm.resets = False
    engine = VllmEngine(llm, model, stop_token_ids=[3], has_raw_logprobs=True)
    with pytest.raises(TrainingError, match="rank 0 kept what it has computed with earlier weights"):
        engine.load_weights(list(engine.served_weights()))


def test_an_engine_that_does_not_sleep_stays_awake(folder):
    llm = Recorder()
    engine = VllmEngine(llm, Qwen3ForCausalLM.from_pretrained(folder), stop_token_ids=[3], has_raw_logprobs=True)
    engine.sleep()
    engine.wake("weights", "kv_cache")
    assert llm.calls == []


def open_supervised(folder, *, max_restarts=2, **args) -> SupervisedEngine:
    engine = {"type": "vllm", "process": {"max_restarts": max_restarts}, "args": ARGS | args}
    config = SamplingConfig(engine=engine, max_concurrent_sequences=4)
    return build_rollout(ModelConfig(path=str(folder)), config, dtype=torch.float32, device=CPU)


class Sender:
    """The weights of the folder, one of them changed."""

    def __init__(self, folder) -> None:
        weights = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        weights["model.layers.0.mlp.up_proj.weight"] *= -2
        self.weights = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}

    def named_weights(self, dtype):
        yield from self.weights.items()


@needs_vllm
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["alone", "two workers"])
def test_f06_trap_25_vllm_that_is_killed_is_replaced_with_its_weights_and_leaves_nothing(
    folder, marked, monkeypatch, size
):
    """Two workers share a machine with one NUMA node only where they are told their cores."""
    monkeypatch.setenv(MARK, f"{folder}-{size}")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1" if size == 2 else "auto")
    wanted = [request(uid=f"row {i}", num_completions=3, max_tokens=12) for i in range(4)]
    supervised = open_supervised(folder, tensor_parallel_size=size)
    before = supervised.generate(wanted)
    receipt = sync_local(Sender(folder).named_weights(torch.float32), supervised, version=5)
    assert (receipt.num_tensors, receipt.num_proven) == (len(Sender(folder).weights), 0)
    after = supervised.generate(wanted)
    assert len(marked(f"{folder}-{size}")) >= size
    os.kill(supervised.pid, signal.SIGKILL)
    assert supervised.generate(wanted) == after != before
    assert {completion.policy_version for group in after for completion in group} == {5}
    assert supervised.take_restarts() == 1
    supervised.close()
    wait_until(lambda: not marked(f"{folder}-{size}"))


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def workers(engine: int) -> list[int]:
    """Of vLLM in this process."""
    children = map(int, Path(f"/proc/{engine}/task/{engine}/children").read_text().split())
    return [pid for pid in children if Path(f"/proc/{pid}/cmdline").read_text().startswith("VLLM::Worker")]


def shared(engine: int) -> list[Path]:
    """Memory that has a name and that this process shares with others: queues and semaphores."""
    lines = Path(f"/proc/{engine}/maps").read_text().splitlines()
    found = {Path(line.split(maxsplit=5)[5]) for line in lines if " /dev/shm/" in line}
    return [path for path in found if path.exists()]


@needs_vllm
@pytest.mark.slow
def test_f06_f08_trap_25_vllm_that_loses_a_worker_is_replaced_and_at_last_the_error_names_it(folder, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    wanted = [request(uid=f"row {i}", num_completions=3, max_tokens=12) for i in range(4)]
    supervised = open_supervised(folder, max_restarts=1, tensor_parallel_size=2)
    names = shared(supervised.pid)
    before = supervised.generate(wanted)
    os.kill(workers(supervised.pid)[1], signal.SIGKILL)
    assert supervised.generate(wanted) == before
    assert supervised.take_restarts() == 1
    names += shared(supervised.pid)
    assert len(names) >= 4
    os.kill(workers(supervised.pid)[0], signal.SIGKILL)
    with pytest.raises(EngineLostError, match="was lost 2 times") as caught:
        supervised.generate(wanted)
    supervised.close()
    _, first, second = str(caught.value).splitlines()
    assert "its worker VllmWorker-1 ended its process by SIGKILL" in first
    assert "its worker VllmWorker-0 ended its process by SIGKILL" in second
    assert "leaked" not in first + second
    assert not [name for name in names if name.exists()]


RANK = """
import os, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from test_vllm import open_supervised
if __name__ == "__main__":
    print(open_supervised(Path({folder!r}), tensor_parallel_size=2).pid, flush=True)
    sys.stdin.read()
    os._exit(1)
"""


@needs_vllm
@pytest.mark.slow
def test_vllm_and_a_worker_that_is_stopped_end_with_a_rank_that_leaves_at_once(folder, marked, monkeypatch, tmp_path):
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    paths = [str(path) for path in reversed(Path(__file__).parents[:3])]
    code = RANK.format(paths=paths, folder=str(folder))
    rank = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    engine = int(rank.stdout.readline())
    names = shared(engine)
    assert len(names) >= 2
    os.kill(workers(engine)[1], signal.SIGSTOP)
    rank.communicate("")
    assert rank.returncode == 1
    try:
        wait_until(lambda: not marked(str(tmp_path)))
        assert not [name for name in names if name.exists()]
    finally:
        end_group(engine)

"""What the process of an engine does with a call; with a process around it in test_supervised.py and tests/contract."""

import pytest
import torch

from shardwise.checksum import checksum
from shardwise.rollout.serving import _answer, _Served
from shardwise.rollout.shared_weights import SharedWeights
from shardwise.types import Completion, GenerateRequest

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}


class Engine:
    """Serves its weights; `b` cannot be read back."""

    def __init__(self) -> None:
        self.weights = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
        self.calls = []

    def served_weights(self):
        return [("a", self.weights["a"]), ("b", self.weights["b"].to("meta"))]

    def served_checksums(self):
        return [("a", checksum(self.weights["a"])), ("b", None)]

    def load_weights(self, weights):
        for name, tensor in weights:
            self.weights[name].copy_(tensor)

    def generate(self, requests, on_finished, is_interrupted):
        on_finished(0)
        reason = "interrupted" if is_interrupted() else "stop"
        return [[Completion(token_ids=[1], logprobs=[-1.0], finish_reason=reason, policy_version=3)] for _ in requests]

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, arguments))


@pytest.fixture
def served():
    """The engine, what serves it, the memory as the other side sees it, and what was told of finished requests."""
    engine, finished = Engine(), []
    ours = SharedWeights([])
    child = _Served(engine, ours.descriptor, finished.append, lambda: bool(engine.calls))
    return engine, child, SharedWeights(child.forms, ours.descriptor), finished


def test_weights_are_loaded_from_the_memory_and_checksums_are_of_what_is_served(served):
    engine, child, memory, _ = served
    for name, tensor in WEIGHTS.items():
        memory.tensor(name).copy_(tensor)
    child.do("load", [{name: checksum(tensor) for name, tensor in WEIGHTS.items()}])
    assert all(torch.equal(engine.weights[name], tensor) for name, tensor in WEIGHTS.items())
    assert child.do("checksums", []) == {"a": checksum(WEIGHTS["a"]), "b": None}
    engine.weights["a"][0, 0] = 9.0
    assert child.do("checksums", [])["a"] != checksum(WEIGHTS["a"])


def test_what_cannot_be_read_back_is_compared_as_it_arrives(served):
    engine, child, memory, _ = served
    memory.tensor("b").fill_(2.0)
    found = _answer(lambda: child.do("load", [{"b": checksum(WEIGHTS["b"])}]))
    assert found["error"] == "RuntimeError"
    assert found["message"] == "other values of b arrived in the process of the rollout engine than were sent"
    assert engine.weights["b"].sum() == 0


def test_an_engine_that_sleeps_keeps_no_memory_from_other_processes(served, monkeypatch):
    """At every level: the cache of a call is free then."""
    engine, child, _, _ = served
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: engine.calls.append("released"))
    for method, arguments in [("sleep", ()), ("wake", ("weights",))]:
        assert _answer(lambda method=method, arguments=arguments: child.do(method, arguments)) == {"result": None}
    assert engine.calls == [("sleep", ()), "released", ("wake", ("weights",))]


def test_calls_reach_the_engine_and_unknown_ones_are_errors(served):
    engine, child, _, finished = served
    request = GenerateRequest(uid="a", prompt_ids=[1], max_tokens=1, temperature=1.0)
    (completion,) = child.do("generate", [[request]])[0]
    assert (completion.policy_version, completion.finish_reason) == (3, "stop")
    assert finished == [0]
    for method, arguments in [("logprobs", ([[1, 2]],)), ("commit", (4,)), ("sleep", ()), ("wake", ("weights",))]:
        child.do(method, arguments)
    assert engine.calls == [
        ("logprobs", ([[1, 2]],)),
        ("commit_weights", (4,)),
        ("sleep", ()),
        ("wake", ("weights",)),
    ]
    assert child.do("generate", [[request]])[0][0].finish_reason == "interrupted"  # as the fixture says after a call
    found = _answer(lambda: child.do("unpickle", []))
    assert (found["error"], found["message"]) == ("ValueError", "there is no call 'unpickle'")
    assert "do(" in found["traceback"]

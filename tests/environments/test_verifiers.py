"""Episodes of the verifiers library over the endpoint, where it is installed; how to install it, where it is not."""

import json
import os
import shutil
import sys

import pytest

from shardwise.config import AgentEnvironment, ConfigError
from shardwise.data import train_tokenizer
from shardwise.recipes.sampling.agents import Agents
from shardwise.recipes.sampling.environment import load_agent
from shardwise.types import Completion, Example, GenerateRequest

TASKSET = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer == "none":
            raise ValueError("cannot be judged")
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)

class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        answers = ("5", "7", "none")
        return [SumTask(SumData(prompt=f"{n}+3=", answer=answer), self.config.task) for n, answer in enumerate(answers)]

__all__ = ["Sums"]
"""
UNSTEADY = """
import verifiers.v1 as vf

calls = []

class UnsteadyTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        calls.append(trace)
        if len(calls) == 1:
            raise ConnectionError("no judge for a moment")
        return 1.0

class Unsteady(vf.Taskset[UnsteadyTask, vf.TasksetConfig]):
    def load(self):
        return [UnsteadyTask(vf.TaskData(prompt="2+3="), self.config.task)]

__all__ = ["Unsteady"]
"""
PARAMETERS = {
    "taskset": {"id": "sums_v1"},
    "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
}
TOKENIZER = train_tokenizer(["2+3=5"], vocab_size=261)


def test_without_the_package_it_is_said_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.delitem(sys.modules, "shardwise.environments.verifiers", raising=False)
    config = AgentEnvironment(path="shardwise.environments.verifiers:play", parameters=PARAMETERS)
    with pytest.raises(ConfigError, match=r"verifiers cannot be imported.*pip install verifiers"):
        load_agent(config)


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    pytest.importorskip("verifiers")
    if shutil.which("uv") is None:
        pytest.skip("verifiers' harnesses need uv")
    (tmp_path / "sums_v1.py").write_text(TASKSET)
    (tmp_path / "unsteady_v1.py").write_text(UNSTEADY)
    monkeypatch.syspath_prepend(str(tmp_path))
    from shardwise.rollout import verifiers

    return verifiers


def says_five(requests):
    token_ids = [*TOKENIZER.encode("5", add_special_tokens=False), TOKENIZER.eos_token_id]
    turn = Completion(token_ids=token_ids, logprobs=[-0.5] * 2, finish_reason="stop", policy_version=1)
    return [[turn] for _ in requests]


def test_tasks_are_played_over_the_endpoint_and_rewarded_by_themselves(adapter):
    rows = list(adapter.task_rows(taskset=PARAMETERS["taskset"], num_tasks=3))
    assert [(row["prompt"], row["extra_info"]) for row in rows] == [(f"{n}+3=", {"task": n}) for n in range(3)]
    json.dumps(rows)
    examples = [
        Example(uid=str(n), prompt_ids=[1], prompt="", data_source="", ground_truth="", extra_info=row["extra_info"])
        for n, row in enumerate(rows)
    ]
    request = GenerateRequest(uid="a", prompt_ids=[1], max_tokens=60, temperature=1.0)
    config = AgentEnvironment(path="shardwise.environments.verifiers:play", parameters=PARAMETERS, timeout_seconds=120)
    before = dict(os.environ)
    with Agents(config, load_agent(config), TOKENIZER, says_five, max_prompt_tokens=40) as agents:
        (right,), (wrong,), (unjudged,) = agents.play(examples, [request] * 3)
    assert (right.outcome.score, right.outcome.parts) == (2.0, {"right": 1.0, "length": 1.0})
    assert (wrong.outcome.score, wrong.outcome.failure) == (0.0, None)
    assert TOKENIZER.decode(right.completion.prompt_ids) == "<|user|>0+3=<|end|><|assistant|>"
    assert "cannot be judged" in unjudged.outcome.failure
    assert dict(os.environ) == before


def test_an_episode_that_verifiers_tried_again_is_no_failure(adapter):
    agent = PARAMETERS["agent"] | {"retries": {"max_retries": 1}}
    parameters = {"taskset": {"id": "unsteady_v1"}, "agent": agent}
    example = Example(uid="a", prompt_ids=[1], prompt="", data_source="", ground_truth="", extra_info={"task": 0})
    request = GenerateRequest(uid="a", prompt_ids=[1], max_tokens=60, temperature=1.0)
    config = AgentEnvironment(path="shardwise.environments.verifiers:play", parameters=parameters, timeout_seconds=120)
    with Agents(config, load_agent(config), TOKENIZER, says_five, max_prompt_tokens=40) as agents:
        ((episode,),) = agents.play([example], [request])
    assert (episode.outcome.failure, episode.outcome.score) == (None, 1.0)

"""The calculator examples as their first lines say, with fewer steps: a policy that calls a tool, on two ranks. The
tool is in an environment, or in the hands of an agent that asks over HTTP."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from shardwise.environments.tool_calls import hermes_calls
from shardwise.rewards import load_function

SMALL = ["trainer.tensorboard=false", "trainer.learning_rate=2e-3"]
SHORT = ["trainer.tensorboard=false", "trainer.total_steps=2", "trainer.warmup_steps=0", "trainer.learning_rate=5e-4"]


@pytest.fixture(scope="module")
def folder(job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calculator")
    subprocess.run([sys.executable, "examples/calculator/prepare.py", str(folder)], check=True, capture_output=True)
    sft = job(
        *[1, "sft", "-c", "examples/calculator_sft.yaml", f"model.path={folder / 'model'}"],
        *[f"data.train_files={folder / 'sft_train.jsonl'}", "data.validation_files=[]", "trainer.batch_size=64"],
        *[f"trainer.output_dir={folder / 'sft'}", "trainer.total_steps=45", "data.max_train_rows=1024", *SMALL],
        timeout=240,
    )
    assert sft.code == 0, sft.err
    rl = job(
        *[2, "rl", "-c", "examples/calculator_agent.yaml", f"model.path={folder / 'sft'}"],
        *[f"data.train_files={folder / 'rl_train.jsonl'}", "data.validation_files=[]", "rollout.num_prompts=8"],
        *["rollout.group_size=4", f"trainer.output_dir={folder / 'rl'}", *SHORT],
        "data.max_train_rows=64",
        timeout=240,
    )
    assert rl.code == 0, rl.err
    return folder


def answer(call):
    """What the example's tool says, or how every error begins."""
    calculate = load_function("examples/calculator/tool.py:calculate")
    try:
        return calculate(**call.arguments)
    except Exception:
        return "error: "


@pytest.mark.slow
def test_the_tools_answer_stands_between_the_turns_and_is_not_trained(folder, metrics_of):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    samples = [json.loads(line) for line in (folder / "rl" / "samples.jsonl").read_text().splitlines()]
    called = [sample for sample in samples if sample["num_turns"] > 1]
    assert called
    num_answered = 0
    for sample in called:
        observed = [t for t, own in zip(sample["token_ids"], sample["is_sampled"], strict=True) if not own]
        if sample["num_turns"] == 2:
            (call,) = hermes_calls(sample["completion"])
            told = answer(call)
            assert tokenizer.decode(observed).startswith(f"<|tool|>{told}")
            num_answered += told != "error: "
        assert sample["reward_parts"]["environment/tool_calls"] >= sample["num_turns"] - 1
    assert num_answered > 0
    for row in metrics_of(folder / "rl"):
        assert row["rollout/logprob_abs_diff_max"] < 1e-4
        assert 1 < row["rollout/num_turns"] <= 3


def test_a_function_that_is_no_tool_is_named_before_a_rank_starts(folder, command, tmp_path):
    (tmp_path / "own.py").write_text("def f(x):\n    return x\n")
    done = command(
        *["rl", "-c", "examples/calculator_agent.yaml", f"model.path={folder / 'sft'}"],
        *[f"data.train_files={folder / 'rl_train.jsonl'}", "data.validation_files=[]"],
        f"rollout.environment={{type: tools, functions: ['{tmp_path / 'own.py'}:f']}}",
    )
    assert done.code == 2
    assert "rollout.environment.functions: f does not say how it is called" in done.err


BREVITY = {
    "function": "shardwise.rewards.length:target_length",
    "weight": 0.1,
    "parameters": {"target": 4, "tolerance": 30, "unit": "characters"},
}
"""Of the last turn; the policy is hardly ever right."""


def agent_options(folder, name, **extra):
    given = {"reward.functions": [{"type": "environment"}, BREVITY]}
    return [
        *["rl", "-c", "examples/calculator_endpoint.yaml", f"model.path={folder / 'sft'}", *SHORT],
        *[f"data.train_files={folder / 'rl_train.jsonl'}", "rollout.num_prompts=4", "rollout.group_size=4"],
        *["data.validation_files=[]", f"trainer.output_dir={folder / name}"],
        *(f"{key}={json.dumps(value)}" for key, value in {**given, **extra}.items()),
    ]


@pytest.fixture(scope="module")
def agents_of_two_ranks(folder, job):
    done = job(2, *agent_options(folder, "agents"), timeout=240)
    assert done.code == 0, done.err
    assert re.search(r"^rl: sampled ([\d,]+) tokens: \1 trained, 0 masked, 0 dropped$", done.out, re.MULTILINE)
    return folder / "agents"


def samples_of(run):
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def test_what_is_trained_is_what_was_sampled_and_answered(agents_of_two_ranks, metrics_of):
    tokenizer = AutoTokenizer.from_pretrained(agents_of_two_ranks.parent / "model")
    samples = samples_of(agents_of_two_ranks)
    assert any(sample["num_turns"] > 1 for sample in samples)
    for sample in samples:
        assert tokenizer.decode(sample["prompt_ids"]) == sample["prompt"]  # the agent begins with the row's messages
        ends = [place for place, own in enumerate(sample["is_sampled"]) if not own]
        observed = tokenizer.decode([sample["token_ids"][place] for place in ends])
        assert observed.count("<|tool|>") >= sample["num_turns"] - 1
        if sample["num_turns"] == 2:
            assert len(hermes_calls(sample["completion"])) == sample["reward_parts"]["environment/calls"] > 0
    for row in metrics_of(agents_of_two_ranks):
        assert row["rollout/logprob_abs_diff_max"] < 1e-4  # the trainer finds the engine's logprobs at every turn
        assert row["train/grad_norm"] > 0
        assert row["reward_part/environment/calls"] > 0
        assert 1 < row["rollout/num_turns"] <= 3
    for row in metrics_of(agents_of_two_ranks):
        own = [sample for sample in samples if sample["step"] == row["step"]]
        assert len(own) == 16
        assert row["train/num_tokens"] == sum(sum(sample["is_sampled"]) for sample in own)
        assert (row["tokens/sampled"], row["tokens/trained"]) == (row["train/num_tokens"], row["train/num_tokens"])
        assert (row["tokens/masked"], row["tokens/dropped"]) == (0, 0)


@pytest.mark.full
def test_agents_on_one_rank_and_at_another_pace_sample_the_same_tokens(agents_of_two_ranks, folder, command):
    extra = {"rollout.environment.max_wait_seconds": 0.001, "trainer.total_steps": 1}
    assert command(*agent_options(folder, "alone", **extra)).code == 0
    first = [sample["token_ids"] for sample in samples_of(agents_of_two_ranks) if sample["step"] == 1]
    assert [sample["token_ids"] for sample in samples_of(folder / "alone")] == first


BROKEN = """
from calculator_agent import solve

def fails_on_some(example, endpoint):
    reward = solve(example, endpoint)
    if reward["calls"] == 0:
        raise RuntimeError("the service is away")
    return reward

def fails_after_the_first_step(example, endpoint, calls=[]):
    calls.append(1)
    if len(calls) > 16:  # those of the first step have answers
        raise RuntimeError("the service is away")
    return solve(example, endpoint)

class Agent: ...

def takes_too_little(example): ...
"""


@pytest.fixture
def broken(tmp_path):
    for name, copied in (("agent", "calculator_agent"), ("tool", "tool")):
        shutil.copy(f"examples/calculator/{name}.py", tmp_path / f"{copied}.py")
    (tmp_path / "broken.py").write_text(BROKEN)
    return str(tmp_path / "broken.py")


def test_completions_of_agents_that_failed_are_left_out(folder, command, broken, metrics_of):
    extra = {"rollout.environment.path": f"{broken}:fails_on_some", "reward.on_failure": "mask"}
    done = command(*agent_options(folder, "masked", **extra), "reward.max_failure_rate=1")
    assert done.code == 0, done.err
    samples = samples_of(folder / "masked")
    failed = [sample for sample in samples if sample["reward_failure"]]
    assert 0 < len(failed) < len(samples)
    assert all(sample["num_turns"] == 1 for sample in failed)
    for row in metrics_of(folder / "masked"):
        trained = [s for s in samples if s["step"] == row["step"] and not s["reward_failure"]]
        assert row["train/num_tokens"] == sum(sum(sample["is_sampled"]) for sample in trained)
        assert row["tokens/sampled"] - row["tokens/masked"] == row["tokens/trained"] == row["train/num_tokens"]


def test_a_step_in_which_every_agent_fails_is_no_step_of_old_weights(folder, job, broken, tmp_path, metrics_of):
    """On ranks that sample apart from the trainers. Such completions have no token of any version."""
    extra = {"rollout.environment.path": f"{broken}:fails_after_the_first_step", "reward.on_failure": "mask"}
    options = [*agent_options(folder, "away", **extra), "reward.max_failure_rate=1", "trainer.total_steps=3"]
    run = tmp_path / "away"
    done = job(2, *options, "rollout.placement=split", f"trainer.output_dir={run}", timeout=240)
    assert done.code == 0, done.err
    rows = metrics_of(run)
    assert [row["reward/failed"] for row in rows] == [0, 1, 1]
    assert [row["staleness/max"] for row in rows if "staleness/max" in row] == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        ("fails_on_some", {}, "the agent failed: RuntimeError: the service is away (broken.py line 7)"),
        ("Agent", {}, "Agent is a class, expected a function(example, endpoint)"),
        ("takes_too_little", {}, "cannot be called with example, endpoint and the parameters given (none)"),
        ("fails_on_some", {"rollout.environment.parameters": {"x": 1}}, "got an unexpected keyword argument 'x'"),
        ("Agent", {"data.apply_chat_template": False}, "rollout.environment.type=agent needs the chat template"),
    ],
)  # fmt: skip
def test_an_agent_that_cannot_work_is_one_line(folder, command, broken, tmp_path, name, extra, message):
    done = command(*agent_options(folder, "broken", **{"rollout.environment.path": f"{broken}:{name}", **extra}))
    assert done.code == 2
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1


@pytest.mark.full  # minutes
def test_the_example_as_it_is_learns_to_call(shell, tmp_path, metrics_of):
    subprocess.run([sys.executable, "examples/calculator/prepare.py", str(tmp_path)], check=True, capture_output=True)
    data = {
        kind: [f"data.{split}_files={tmp_path}/{kind}_{split}.jsonl" for split in ("train", "validation")]
        for kind in ("sft", "rl")
    }
    taught = shell(
        *["shardwise", "sft", "-c", "examples/calculator_sft.yaml", "--nproc", "2", f"model.path={tmp_path / 'model'}"],
        *[*data["sft"], f"trainer.output_dir={tmp_path / 'sft'}"],
        timeout=1200,
    )
    assert taught.code == 0, taught.err
    learnt = shell(
        *["shardwise", "rl", "-c", "examples/calculator_agent.yaml", "--nproc", "2", f"model.path={tmp_path / 'sft'}"],
        *[*data["rl"], f"trainer.output_dir={tmp_path / 'rl'}"],
        timeout=2400,
    )
    assert learnt.code == 0, learnt.err
    steps = metrics_of(tmp_path / "rl")
    calls = [row["reward_part/environment/tool_calls"] for row in steps]
    assert calls[0] < 0.7
    assert min(calls[-3:]) > 0.9
    assert steps[-1]["val/accuracy"] > 0.9

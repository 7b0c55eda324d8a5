"""The calculator example as its first lines say, with fewer steps: a policy that calls a tool, on two ranks."""

import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from shardwise.rewards import load_function
from shardwise.rollout.tool_calls import hermes_calls

SMALL = ["trainer.tensorboard=false", "trainer.learning_rate=2e-3"]


@pytest.fixture(scope="module")
def folder(shell, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calculator")
    subprocess.run([sys.executable, "examples/calculator/prepare.py", str(folder)], check=True, capture_output=True)
    sft = shell(
        *["shardwise", "sft", "-c", "examples/calculator_sft.yaml", f"model.path={folder / 'model'}"],
        *[f"data.train_files={folder / 'sft_train.jsonl'}", "data.validation_files=[]", "trainer.batch_size=64"],
        *[f"trainer.output_dir={folder / 'sft'}", "trainer.total_steps=60", *SMALL],
        timeout=240,
    )
    assert sft.code == 0, sft.err
    rl = shell(
        *["shardwise", "rl", "-c", "examples/calculator_agent.yaml", "--nproc", "2", f"model.path={folder / 'sft'}"],
        *[f"data.train_files={folder / 'rl_train.jsonl'}", "data.validation_files=[]", "rollout.num_prompts=8"],
        *[f"trainer.output_dir={folder / 'rl'}", "trainer.total_steps=2", *SMALL],
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

"""The quickstart with fewer problems and steps than it has; tests/e2e has the whole one."""

import json

import pytest
from transformers import AutoModelForCausalLM

import shardwise.recipes.quickstart as recipe
from shardwise.config import ConfigError
from shardwise.recipes.stopping import Stopped


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def finished(group_of_one, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "NUM_HELD_OUT", 12)
    monkeypatch.setattr(recipe, "SFT_STEPS", 3)
    monkeypatch.setattr(recipe, "RL_STEPS", 1)
    recipe.quickstart(tmp_path / "run", group_of_one, seed=0)
    return tmp_path / "run"


@pytest.mark.full
def test_the_summary_holds_what_was_measured_and_the_final_policy_is_the_one_after_rl(finished, capsys):
    summary = json.loads((finished / "summary.json").read_text())
    assert list(summary["accuracy"]) == ["untrained", "sft", "rl"]
    # A random model does not add; three steps do not teach it.
    assert set(summary["accuracy"].values()) == {0.0}
    assert json.loads((finished / "eval" / "rl" / "results.json").read_text())["all"]["num_prompts"] == 12
    sft, rl = lines(finished / "sft" / "metrics.jsonl"), lines(finished / "metrics.jsonl")
    assert (len(sft), len(rl)) == (3, 1)
    assert sft[-1]["train/loss"] < sft[0]["train/loss"]
    # RL starts from the weights that SFT left, and serves them.
    assert rl[0]["rollout/logprob_abs_diff_max"] < 1e-4
    start, end = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (finished / "sft" / "checkpoints" / "step_3" / "hf", finished / "checkpoints" / "step_1" / "hf")
    )
    moved = max(float((end[name] - start[name]).abs().max()) for name in start)
    assert moved < 2e-3  # one Adam step moves a weight by at most about the learning rate


def test_who_stops_it_is_told_that_it_begins_anew(monkeypatch, tmp_path):
    def stops(*_):
        raise Stopped("stopped by SIGINT", "resumable: the same command with trainer.resume=auto continues", 130)

    monkeypatch.setattr(recipe, "NUM_HELD_OUT", 2)
    monkeypatch.setattr(recipe, "_accuracy", lambda *_: 0.0)
    monkeypatch.setattr(recipe, "train_sft", stops)
    with pytest.raises(Stopped, match=r"^stopped by SIGINT; the same command begins anew$") as stopped:
        recipe.quickstart(tmp_path, None, seed=0)
    assert stopped.value.code == 130


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    with pytest.raises(ConfigError, match=f"--output-dir={folder} cannot be written to: .*Not a directory"):
        recipe.quickstart(folder, None, seed=0)


def test_settings_leave_room_for_the_longest_problem(tmp_path):
    """99+99= and its worked answer, in byte tokens, fit prompt, response and sequence."""
    files = recipe.arithmetic_problems(tmp_path, seed=0, num_held_out=10, worked=True)
    rows = lines(files.sft_train)
    template = 4  # <|user|>, <|end|>, <|assistant|> and the closing <|end|>
    longest_prompt = max(len(row["prompt"]) for row in rows)
    longest_response = max(len(row["response"]) for row in rows)
    sft = recipe.sft_config(tmp_path, files, tmp_path, seed=0)
    rl = recipe.rl_config(tmp_path, files, tmp_path, seed=0)
    assert sft.data.max_sequence_tokens >= longest_prompt + longest_response + template
    assert rl.data.max_prompt_tokens >= longest_prompt + template - 1
    assert rl.rollout.max_response_tokens >= longest_response + 1

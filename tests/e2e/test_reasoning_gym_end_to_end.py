"""GRPO on problems that reasoning-gym makes up, where it is installed: rows, rewards and their names."""

import json
import sys

import pytest

from shardwise.data import build_model_folder, train_tokenizer

TASK = "{task: letter_counting, size: 40, seed: %d, arguments: {max_words: 3, min_words: 2}}"
OPTIONS = [
    *["data.max_prompt_tokens=300", "engine.max_tokens_per_micro_batch=512", "rollout.max_response_tokens=6"],
    *["rollout.num_prompts=4", "rollout.group_size=4", "trainer.total_steps=1", "trainer.tensorboard=false"],
    "reward.functions=[shardwise.rewards.reasoning_gym:reasoning_gym_score]",
]


@pytest.fixture
def long_model(tmp_path):
    """Takes a prompt of 300 tokens."""
    tokenizer = train_tokenizer(["How many times does the letter appear in the text?"], vocab_size=261)
    build_model_folder(tmp_path / "model", tokenizer=tokenizer, hidden_size=32, num_layers=2, intermediate_size=64)
    return tmp_path / "model"


@pytest.fixture
def files(tmp_path):
    for seed, name in enumerate(("train", "validation")):
        (tmp_path / f"{name}.yaml").write_text(TASK % seed)
    return [f"data.train_files={tmp_path / 'train.yaml'}", f"data.validation_files={tmp_path / 'validation.yaml'}"]


def test_problems_are_asked_and_scored_by_their_task(long_model, files, command, tmp_path):
    reasoning_gym = pytest.importorskip("reasoning_gym")
    done = command("rl", f"model.path={long_model}", *files, *OPTIONS, f"trainer.output_dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    task = reasoning_gym.create_dataset("letter_counting", size=40, seed=0, max_words=3, min_words=2)
    problems = {f"train.yaml problem {index}": problem for index, problem in enumerate(task)}
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 16
    for sample in samples:
        problem = problems[sample["uid"]]
        assert problem["question"] in sample["prompt"]
        assert sample["ground_truth"] == problem["answer"]
        assert sample["reward"] == task.score_answer(sample["completion"].strip(), entry=problem)


def test_without_the_package_a_run_ends_before_it_begins(assets, files, command, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    done = command("rl", f"model.path={assets.model}", *files, *OPTIONS, f"trainer.output_dir={tmp_path / 'run'}")
    assert done.code == 2
    assert "pip install reasoning-gym" in done.err
    assert len(done.err.strip().splitlines()) == 1

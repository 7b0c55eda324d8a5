"""Completions of several turns: the example environment on two ranks, as a user runs it."""

import json

import pytest
from transformers import AutoTokenizer

from shardwise.rewards import number_match

ENVIRONMENT = "examples/custom_environment/second_chance.py:SecondChance"
CHANCES = 3
BREVITY = {
    "function": "shardwise.rewards.length:target_length",
    "weight": 0.1,
    "parameters": {"target": 2, "tolerance": 4, "unit": "characters"},
}
"""Of the last turn; the policy is hardly ever right."""


@pytest.fixture(scope="module")
def policy(assets, shell, tmp_path_factory):
    """Has learnt to say a number and to end its turn."""
    folder = tmp_path_factory.mktemp("sft")
    done = shell(
        "shardwise",
        "sft",
        f"model.path={assets.model}",
        f"data.train_files={assets.sft}",
        "data.max_sequence_tokens=64",
        "trainer.total_steps=20",
        "trainer.learning_rate=1e-2",
        "trainer.batch_size=32",
        "trainer.tensorboard=false",
        f"trainer.output_dir={folder}",
    )
    assert done.code == 0, done.err
    return folder / "checkpoints" / "step_20" / "hf"


def options(assets, policy, output_dir, environment=ENVIRONMENT, **extra):
    given = {
        "rollout.environment": {"path": environment, "parameters": {"chances": CHANCES, "reply": "no, again:"}},
        "reward.functions": [{"type": "environment"}, BREVITY],
    }
    return [
        f"model.path={policy}",
        f"data.train_files={assets.rl}",
        "data.max_prompt_tokens=40",
        "engine.max_tokens_per_micro_batch=256",
        "rollout.num_prompts=4",
        "rollout.group_size=3",
        "rollout.max_response_tokens=48",
        "trainer.total_steps=2",
        "trainer.learning_rate=1e-3",
        "trainer.tensorboard=false",
        f"trainer.output_dir={output_dir}",
        *(f"{key}={json.dumps(value)}" for key, value in {**given, **extra}.items()),
    ]


@pytest.fixture(scope="module")
def two_ranks(assets, policy, job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl") / "run"
    done = job(2, "rl", *options(assets, policy, folder), timeout=180)
    assert done.code == 0, done.err
    return folder


@pytest.fixture(scope="module")
def samples(two_ranks):
    return [json.loads(line) for line in (two_ranks / "samples.jsonl").read_text().splitlines()]


def spans(sample):
    """The completion as (sampled, token ids) runs."""
    runs = []
    for token_id, sampled in zip(sample["token_ids"], sample["is_sampled"], strict=True):
        if not runs or runs[-1][0] != sampled:
            runs.append((sampled, []))
        runs[-1][1].append(token_id)
    return runs


def test_turns_and_answers_alternate_and_every_answer_is_the_environments(samples, policy):
    tokenizer = AutoTokenizer.from_pretrained(policy)
    reply = tokenizer.encode("<|user|>no, again:<|end|><|assistant|>")
    assert max(sample["num_turns"] for sample in samples) == CHANCES
    for sample in samples:
        runs = spans(sample)
        assert [sampled for sampled, _ in runs] == [True, False] * (sample["num_turns"] - 1) + [True]
        assert all(token_ids == reply for sampled, token_ids in runs if not sampled)
        ended = [token_ids[-1] == tokenizer.eos_token_id for sampled, token_ids in runs if sampled]
        assert ended[:-1] == [True] * (sample["num_turns"] - 1)
        assert ended[-1] == (sample["finish_reason"] == "stop")


def test_the_reward_falls_with_every_wrong_turn(samples, policy):
    tokenizer = AutoTokenizer.from_pretrained(policy)
    for sample in samples:
        turns = [tokenizer.decode(ids, skip_special_tokens=True) for sampled, ids in spans(sample) if sampled]
        right = [number_match("", turn, sample["ground_truth"]) > 0 for turn in turns]
        if sample["finish_reason"] == "stop":
            assert sample["reward_parts"]["environment"] == (0.5 ** right.index(True) if any(right) else 0.0)
            assert not any(right[:-1])
        brevity = max(0.0, 1 - abs(len(turns[-1]) - 2) / 4)
        assert sample["reward_parts"]["target_length"] == pytest.approx(brevity)
        assert sample["reward"] == pytest.approx(sample["reward_parts"]["environment"] + 0.1 * brevity)


def test_only_sampled_tokens_are_trained_with_the_logprobs_of_the_engine_that_sampled_them(
    two_ranks, samples, metrics_of
):
    for row in metrics_of(two_ranks):
        own = [sample for sample in samples if sample["step"] == row["step"]]
        assert len(own) == 12
        assert row["train/num_tokens"] == sum(sum(sample["is_sampled"]) for sample in own)
        assert row["rollout/num_turns"] == pytest.approx(sum(sample["num_turns"] for sample in own) / 12)
        assert row["rollout/logprob_abs_diff_max"] < 1e-4  # also of turns that follow an answer
        assert row["train/grad_norm"] > 0


def test_turns_are_compared_with_turns_that_answered_the_same(assets, policy, command, metrics_of, tmp_path):
    extra = {"algorithm.advantage": {"name": "gigpo", "gamma": 0.9}}
    assert command("rl", *options(assets, policy, tmp_path / "run", **extra)).code == 0
    for row in metrics_of(tmp_path / "run"):
        assert row["train/grad_norm"] > 0
        assert row["advantage/lone_turn_fraction"] < 0.5  # all wrong turns are told the same


def test_one_rank_plays_the_same_episodes(samples, assets, policy, command, tmp_path):
    assert command("rl", *options(assets, policy, tmp_path / "run")).code == 0
    first = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()][:12]
    assert [sample["token_ids"] for sample in first] == [sample["token_ids"] for sample in samples[:12]]


def test_an_environment_is_evaluated_by_its_reward(assets, policy, command, tmp_path):
    done = command(
        "eval",
        f"model.path={policy}",
        f"data.validation_files={assets.rl}",
        "data.max_validation_rows=12",
        "data.max_prompt_tokens=40",
        "rollout.max_response_tokens=48",
        f"rollout.environment={ENVIRONMENT}",
        "reward.functions={type: environment}",
        "reward.correct_at=0.5",
        f"eval.output_dir={tmp_path}",
    )
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert json.loads((tmp_path / "results.json").read_text())["all"]["greedy_accuracy"] == pytest.approx(
        sum(row["reward"] >= 0.5 for row in rows) / 12
    )


BROKEN = """
from examples.custom_environment.second_chance import SecondChance

class Broken(SecondChance):
    def step(self, response):
        raise RuntimeError("the tool is away")

class Half:
    def reset(self, example): ...
"""


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        ("Broken", {}, "the environment failed for row "),
        ("Half", {}, "has no method step; expected a class with reset(example), step(response), reward() and close()"),
        ("Borken", {}, "has no 'Borken'; did you mean Broken?"),
        ("Broken", {"rollout.environment": None}, "set rollout.environment=FILE.py:Class, or remove the entry"),
    ],
)
def test_an_environment_that_cannot_work_is_one_line(assets, policy, command, tmp_path, name, extra, message):
    (tmp_path / "broken.py").write_text(BROKEN)
    done = command("rl", *options(assets, policy, tmp_path / "run", f"{tmp_path / 'broken.py'}:{name}", **extra))
    assert done.code == 2
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1

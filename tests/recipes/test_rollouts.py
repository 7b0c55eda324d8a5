from pathlib import Path

import pytest

from shardwise.config import RewardConfig, RolloutConfig, TrainingError
from shardwise.recipes.rollouts import Rollouter, is_correct
from shardwise.rewards import RewardResult
from shardwise.types import Completion, Example


class Digits:
    """A tokenizer whose tokens are their own text; 0 is special."""

    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(str(token) for token in token_ids if token or not skip_special_tokens)


class Rewards:
    """Scores a text with its value, so that every completion has its own; odd values fail."""

    def __init__(self):
        self.jobs = []

    def score(self, jobs):
        self.jobs += jobs
        return [
            RewardResult(score=-1.0, failure="odd") if int(job.solution_str) % 2 else RewardResult(
                score=float(job.solution_str), parts={"half": int(job.solution_str) / 2}
            )
            for job in jobs
        ]  # fmt: skip


def answer(rank, requests):
    """The completions of prompt [p] are p0, p1, ... as digits, from whichever rank."""
    return [
        [
            Completion(
                token_ids=[*request.prompt_ids, index, 0], logprobs=[0.0] * 3, finish_reason="stop", policy_version=rank
            )
            for index in range(1, 1 + request.num_completions)
        ]
        for request in requests
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_example_gets_its_own_completions_texts_and_scores(fake_group, size):
    group, rewards = fake_group(size, generate=answer), Rewards()
    rollouter = Rollouter(group, Digits(), RolloutConfig(max_response_tokens=9), rewards)
    examples = [
        Example(uid=f"row {p}", prompt_ids=[p], prompt=str(p), data_source="s", ground_truth=p, extra_info={"p": p})
        for p in (4, 9, 2, 7, 5)
    ]
    groups = rollouter.collect(examples, num_completions=3, temperature=0.5, seed=8, stream="step 2")
    for place, (found, p) in enumerate(zip(groups, (4, 9, 2, 7, 5), strict=True)):
        assert found.example is examples[place]
        assert found.texts == [f"{p}1", f"{p}2", f"{p}3"]
        assert found.rewards == [-1.0, 10.0 * p + 2, -1.0]
        assert found.reward_parts == [{}, {"half": (10 * p + 2) / 2}, {}]
        assert found.failed == [True, False, True]
        assert [c.token_ids for c in found.completions] == [[p, i, 0] for i in (1, 2, 3)]
        assert {c.policy_version for c in found.completions} == {place % size}
    ((_, shards),) = group.calls
    assert sum(map(len, shards)) == 5
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    request = shards[0][0]
    assert (request.uid, request.seed, request.max_tokens, request.temperature) == ("step 2/0/row 4", 8, 9, 0.5)
    assert [(job.uid, job.ground_truth, job.extra_info) for job in rewards.jobs[3:6]] == [
        ("row 9", 9, {"p": 9, "num_response_tokens": 3})
    ] * 3


def test_the_same_row_twice_in_a_step_gets_draws_of_its_own(fake_group):
    group = fake_group(1, generate=answer)
    example = Example(uid="row", prompt_ids=[4], prompt="", data_source="s", ground_truth="")
    rollouter = Rollouter(group, Digits(), RolloutConfig(), Rewards())
    rollouter.collect([example, example], num_completions=1, temperature=1.0, seed=0, stream="step 1")
    ((_, (requests,)),) = group.calls
    assert len({request.uid for request in requests}) == 2


@pytest.mark.parametrize(
    ("reward", "parts", "correct_at", "expected"),
    [
        (1.0, {"b": 1.0}, 1.0, True),
        (0.99, {"b": 0.99}, 1.0, False),
        (0.5, {"b": 0.5}, 0.5, True),
        (0.0, {"b": 0.0, "acc": 1.0}, 1.0, True),
        (1.0, {"b": 1.0, "acc": 0.0}, 1.0, False),
        (1.0, {}, 1.0, False),  # a failed call, scored 1.0 by failure_value
    ],
)
def test_is_correct_by_hand(reward, parts, correct_at, expected):
    assert is_correct(reward, parts, RewardConfig(functions="a:b", correct_at=correct_at)) is expected


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"b": 1.0, "length": -5.0}, True),
        ({"b": 0.0, "length": 5.0}, False),
        ({"b": 0.0, "b/acc": 1.0, "length": 0.0}, True),
        ({"b": 0.0, "length": 0.0, "length/acc": 1.0}, False),
        ({"length": 5.0}, False),
    ],
)
def test_the_first_of_several_functions_says_what_is_correct(parts, expected):
    config = RewardConfig(functions=["a:b", {"function": "c:d", "name": "length", "weight": 3}])
    assert is_correct(99.0, parts, config) is expected


def test_results_of_a_manager_are_correct_by_acc_or_by_the_reward():
    config = RewardConfig(functions=[], manager="a:B", correct_at=0.5)
    assert is_correct(0.5, {}, config)
    assert not is_correct(0.4, {"b": 1.0}, config)
    assert is_correct(0.0, {"acc": 1.0}, config)


def test_without_rewards_an_environment_that_fails_stops_the_run(fake_group, tmp_path, monkeypatch):
    """There is no policy for failures that would say what else to do."""
    monkeypatch.chdir(tmp_path)
    (path := Path("broken.py")).write_text(
        "class Broken:\n    def reset(self, example):\n        raise ValueError('away')\n"
        "    def step(self, response): ...\n    def reward(self): ...\n    def close(self): ...\n"
    )
    config = RolloutConfig(environment=f"{path}:Broken")
    example = Example(uid="row", prompt_ids=[4], prompt="", data_source="s", ground_truth="")
    failure = r"^the environment failed for row row: reset\(\) failed: ValueError: away"
    with (
        Rollouter(fake_group(1, generate=answer), Digits(), config, None) as rollouter,
        pytest.raises(TrainingError, match=failure),
    ):
        rollouter.collect([example], num_completions=1, temperature=1.0, seed=0, stream="step 1")

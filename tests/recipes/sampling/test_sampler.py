"""Prompts drawn, completions sampled and judged, groups that teach nothing replaced."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest

from shardwise.config import RewardError, RLConfig
from shardwise.data import PromptStream
from shardwise.recipes.sampling.sampler import Sampler
from shardwise.recipes.sampling.samples import to_samples
from shardwise.rewards.composite import FailurePolicy
from shardwise.types import Example

EXAMPLES = [
    Example(uid=f"row {n}", prompt_ids=[n] * (n + 1), prompt=str(n), data_source="s", ground_truth=n) for n in range(6)
]
SAME, DIFFERENT = [1.0, 1.0], [1.0, 0.0]


def config(*, reward=None, data=None, advantage="grpo", **rollout) -> RLConfig:
    tree = {
        "model": {"path": "m"},
        "data": {"train_files": "t", "shuffle": False} | (data or {}),
        "reward": {"functions": "a:b"} | (reward or {}),
        "rollout": {"num_prompts": 2, "group_size": 2, "temperature": 0.7} | rollout,
        "algorithm": {"advantage": advantage},
        "trainer": {"seed": 5},
    }
    return RLConfig.parse(tree, origin="test")


class FakeRollouter:
    """Answers with the next rewards of each row; greedy with 10 x its number."""

    def __init__(self, make_group, rewards, failed=None):
        self._make_group, self._failed = make_group, failed or {}
        self._rewards = {row: list(groups) for row, groups in rewards.items()}
        self.calls = []
        self.counted = []
        self.experts_kept = []
        self.num_sampled_tokens = 0

    @contextmanager
    def counting_failures(self, min_completions):
        before = len(self.calls)
        yield
        self.counted.append((min_completions, len(self.calls) - before))

    def collect(self, examples, *, num_completions, temperature, seed, stream, with_experts=False):
        self.experts_kept.append(with_experts)
        rows = [int(example.prompt) for example in examples]
        self.calls.append((rows, num_completions, temperature, seed, stream))
        groups = []
        for example, row in zip(examples, rows, strict=True):
            rewards = [10.0 * row] if temperature == 0 else self._rewards[row].pop(0)
            group = self._make_group(rewards, failed=self._failed.get(row), prompt_ids=example.prompt_ids)
            object.__setattr__(group, "example", example)
            self.num_sampled_tokens += sum(len(completion.token_ids) for completion in group.completions)
            groups.append(group)
        return groups


def sampler_of(make_group, settings, rewards, failed=None):
    rollouter = FakeRollouter(make_group, rewards, failed)
    stream = PromptStream([example.data_source for example in EXAMPLES], settings.data, seed=settings.trainer.seed)
    return Sampler(rollouter, stream, EXAMPLES, settings), rollouter, stream


def rows_of(rollout):
    return [int(group.example.prompt) for group in rollout.groups]


def counts_of(rollout):
    prefix = "rollout/num_"
    return {name[len(prefix) :]: value.result() for name, value in rollout.metrics.items() if name.startswith(prefix)}


def test_a_step_samples_its_prompts_once_and_keeps_every_group(make_group):
    sampler, rollouter, _ = sampler_of(make_group, config(), {row: [SAME] for row in range(4)})
    first, second = sampler.collect(1), sampler.collect(2)
    assert (rows_of(first), rows_of(second)) == ([0, 1], [2, 3])
    assert rollouter.calls == [([0, 1], 2, 0.7, 5, "step 1"), ([2, 3], 2, 0.7, 5, "step 2")]
    assert {name: value.result() for name, value in first.metrics.items()} == {"tokens/sampled": 8, "tokens/dropped": 0}
    assert first.greedy_rewards is None
    # Prompts of 1 and 2 tokens, two completions of 2 tokens each: every completion counts with its prompt.
    assert first.num_tokens == 2 * (1 + 2) + 2 * (2 + 2)


def test_dynamic_sampling_replaces_what_teaches_nothing_until_the_batch_is_full(make_group):
    rewards = {0: [SAME], 1: [DIFFERENT], 2: [SAME], 3: [DIFFERENT]}
    sampler, rollouter, _ = sampler_of(make_group, config(dynamic_sampling={}), rewards)
    found = sampler.collect(1)
    assert rows_of(found) == [1, 3]
    assert [(rows, stream) for rows, _, _, _, stream in rollouter.calls] == [
        ([0, 1], "step 1"), ([2], "step 1 round 1"), ([3], "step 1 round 2")
    ]  # fmt: skip
    assert counts_of(found) == {"rounds": 3, "dropped_groups": 2, "missing_groups": 0}
    assert (found.metrics["tokens/sampled"].result(), found.metrics["tokens/dropped"].result()) == (16, 8)


@pytest.mark.parametrize(("on_failure", "mean"), [("mask", 4.5 / 6), ("value", 6.5 / 7)])
def test_rewards_and_accuracy_of_everything_that_was_sampled(make_group, on_failure, mean):
    """Kept are [1, 0] and [1, 0.5]; dropped are [1, 1], and a group of one whose call failed and gave 2."""
    rewards = {0: [SAME], 1: [DIFFERENT], 2: [[2.0]], 3: [[1.0, 0.5]]}
    settings = config(dynamic_sampling={}, reward={"on_failure": on_failure, "correct_at": 0.5})
    sampler, _, _ = sampler_of(make_group, settings, rewards, {2: [True]})
    found = sampler.collect(1)
    assert rows_of(found) == [1, 3]
    means = {name: value.result() for name, value in found.metrics.items() if name.startswith("rollout/sampled")}
    assert means == {
        "rollout/sampled_reward": pytest.approx(mean),
        "rollout/sampled_accuracy": pytest.approx(5 / 6),
    }


def test_dynamic_sampling_ends_after_its_rounds_and_says_what_is_missing(make_group):
    rewards = {0: [SAME], 1: [DIFFERENT], 2: [SAME], 3: [SAME]}
    sampler, rollouter, _ = sampler_of(make_group, config(dynamic_sampling={"max_rounds": 2}), rewards)
    found = sampler.collect(1)
    assert rows_of(found) == [1]
    assert [call[0] for call in rollouter.calls] == [[0, 1], [2]]
    assert counts_of(found) == {"rounds": 2, "dropped_groups": 2, "missing_groups": 1}


def test_where_nothing_teaches_the_last_rounds_groups_are_kept(make_group):
    """A step has samples, though its advantages are 0."""
    sampler, _, _ = sampler_of(
        make_group, config(dynamic_sampling={"max_rounds": 2}), {row: [SAME] for row in range(4)}
    )
    found = sampler.collect(1)
    assert rows_of(found) == [2, 3]
    assert counts_of(found) == {"rounds": 2, "dropped_groups": 2, "missing_groups": 2}


def test_a_full_first_round_is_the_only_one(make_group):
    sampler, rollouter, _ = sampler_of(make_group, config(dynamic_sampling={}), {row: [DIFFERENT] for row in range(2)})
    assert counts_of(sampler.collect(1)) == {"rounds": 1, "dropped_groups": 0, "missing_groups": 0}
    assert len(rollouter.calls) == 1


@pytest.mark.parametrize(("on_failure", "kept"), [("mask", [1]), ("value", [0, 1])])
def test_a_masked_failure_is_no_difference_in_a_group(make_group, on_failure, kept):
    failed = {0: [False, True], 1: [False, False]}
    rewards = {row: [DIFFERENT] for row in range(2)}
    settings = config(dynamic_sampling={"max_rounds": 1}, reward={"on_failure": on_failure})
    sampler, _, _ = sampler_of(make_group, settings, rewards, failed)
    assert rows_of(sampler.collect(1)) == kept


def test_greedy_rewards_are_in_the_order_of_the_groups_that_were_kept(make_group):
    rewards = {0: [SAME], 1: [DIFFERENT], 2: [DIFFERENT]}
    sampler, rollouter, _ = sampler_of(make_group, config(dynamic_sampling={}, advantage="remax"), rewards)
    found = sampler.collect(3)
    assert rows_of(found) == [1, 2]
    assert found.greedy_rewards == [10.0, 20.0]
    assert rollouter.calls[-1] == ([1, 2], 1, 0.0, 5, "step 3 greedy")
    # One round of two groups of two at least; two rounds and the greedy completions happened.
    assert rollouter.counted == [(2 * 2, 3)]


@pytest.mark.parametrize(
    ("rows", "judged"),
    [
        ([0, 1], ([0, 1],)),
        ([0, 2, 3], ([0, 1], [2, 3])),  # half of the first round is not too much
        ([2, 3], ([0, 1], [2, 3], [4, 5])),
    ],
)
def test_a_reward_that_fails_too_often_stops_the_step_in_the_round_that_shows_it(make_group, rows, judged):
    settings = config(dynamic_sampling={"max_rounds": 3}, reward={"on_failure": "value"})
    rewards = {row: [SAME] for row in range(6)}
    sampler, rollouter, _ = sampler_of(make_group, settings, rewards, {row: [True, True] for row in rows})
    policy = FailurePolicy(settings.reward)
    collect = rollouter.collect

    def held(examples, **others):
        groups = collect(examples, **others)
        policy.expect(2 * len(groups))
        for group in groups:
            for _ in filter(None, group.failed):
                policy.add(group.example.uid, "reward", "no")
        return groups

    rollouter.collect, rollouter.counting_failures = held, policy.counting
    with pytest.raises(RewardError, match="reward calls failed") if len(judged) < 3 else nullcontext():
        sampler.collect(1)
    assert tuple(call[0] for call in rollouter.calls) == judged


@pytest.mark.parametrize("router_replay", [False, True])
def test_experts_are_kept_of_what_is_trained_where_they_are_replayed(make_group, router_replay):
    """Not of greedy completions, which only give a baseline."""
    settings = config(advantage="remax")
    settings = settings.model_copy(
        update={"rollout": settings.rollout.model_copy(update={"router_replay": router_replay})}
    )
    sampler, rollouter, _ = sampler_of(make_group, settings, {row: [DIFFERENT] for row in range(2)})
    sampler.collect(1)
    assert rollouter.experts_kept == [router_replay, False]


@pytest.mark.parametrize(("on_failure", "compared"), [("mask", [True, False]), ("value", [True, True])])
def test_a_group_whose_greedy_completion_failed_has_no_baseline(make_group, on_failure, compared):
    """Its own rewards have not failed, and are told as they are."""
    rewards = {row: [DIFFERENT] for row in range(2)}
    settings = config(advantage="remax", reward={"on_failure": on_failure})
    sampler, rollouter, _ = sampler_of(make_group, settings, rewards)
    judged = rollouter.collect

    def collect(examples, *, temperature, **others):
        rollouter._failed = {1: [True]} if temperature == 0 else {}
        return judged(examples, temperature=temperature, **others)

    rollouter.collect = collect
    groups = sampler.collect(1).groups
    assert [group.has_baseline for group in groups] == compared
    assert [group.failed for group in groups] == [[False, False]] * 2
    assert [sample.loss_mask.any() for sample in to_samples(groups)] == [has for has in compared for _ in range(2)]


def test_pass_rates_of_all_rounds_are_recorded_and_used(make_group):
    """Row 0 is solved always, row 1 half the time: the first sits out the next epoch."""
    rewards = {0: [SAME, SAME], 1: [DIFFERENT] * 3, 2: [[0.0, 0.0]] * 2, 3: [DIFFERENT] * 2, 4: [SAME], 5: [SAME]}
    settings = config(dynamic_sampling={"max_rounds": 2}, data={"difficulty": {"max_pass_rate": 0.9}})
    sampler, _, stream = sampler_of(make_group, settings, rewards)
    sampler.collect(1)
    assert stream.pass_rates == {0: 1.0, 1: 0.5, 2: 0.0}
    assert rows_of(sampler.collect(2)) == [3]
    assert stream.pass_rates == {0: 1.0, 1: 0.5, 2: 0.0, 3: 0.5, 4: 1.0, 5: 1.0}
    assert stream.take(1, step=3) == [1]


def test_pass_rates_go_by_what_is_correct_and_not_by_the_reward(make_group):
    settings = config(reward={"functions": [{"function": "a:b", "weight": 5.0}], "correct_at": 0.5},
                      data={"difficulty": {"max_pass_rate": 0.9}})  # fmt: skip
    sampler, _, stream = sampler_of(make_group, settings, {0: [[0.4, 0.5]], 1: [[0.0, 9.0]]})
    sampler.collect(1)
    assert stream.pass_rates == {0: 0.5, 1: 0.5}


def kept_by(make_group, settings, *, rewards, parts=None, num_turns=(1, 1)):
    """Whether dynamic sampling keeps a group."""
    group = make_group(rewards, parts=parts)
    completions = [replace(c, turn_starts=list(range(n))) for c, n in zip(group.completions, num_turns, strict=True)]
    sampler, _, _ = sampler_of(make_group, settings, {})
    return sampler._teaches(replace(group, completions=completions))


@pytest.mark.parametrize(
    ("advantage", "rewards", "num_turns", "kept"),
    [
        ({"name": "gigpo"}, [1.0, 1.0], (1, 2), True),  # its turns are discounted differently
        ({"name": "gigpo"}, [1.0, 1.0], (2, 2), False),
        ({"name": "gigpo"}, [0.0, 0.0], (1, 2), False),
        ({"name": "gigpo", "gamma": 1.0}, [1.0, 1.0], (1, 2), False),
        ("grpo", [1.0, 1.0], (1, 2), False),
    ],
)
def test_under_gigpo_the_number_of_turns_teaches_too(make_group, advantage, rewards, num_turns, kept):
    settings = config(advantage=advantage, dynamic_sampling={}, environment="a.py:Game")
    assert kept_by(make_group, settings, rewards=rewards, num_turns=num_turns) is kept


@pytest.mark.parametrize(("weight", "kept"), [(0.5, True), (0.0, False)])
def test_under_gdpo_a_reward_without_weight_teaches_nothing(make_group, weight, kept):
    functions = ["a:b", {"function": "c:d", "weight": weight}]
    settings = config(advantage="gdpo", dynamic_sampling={}, reward={"functions": functions})
    parts = [{"b": 1.0, "d": 0.0}, {"b": 1.0, "d": 3.0}]
    assert kept_by(make_group, settings, rewards=[1.0, 1.0], parts=parts) is kept

import functools
import json
import operator

import numpy as np
import pytest
import torch

from shardwise.config import AlgorithmConfig, ModelConfig, RLConfig
from shardwise.recipes.rl import (
    build_engines,
    minibatches,
    rollout_metrics,
    sample_rows,
    score,
    to_samples,
    with_advantages,
)
from shardwise.types import Sample


def config(**algorithm) -> RLConfig:
    tree = {
        "model": {"path": "m"},
        "data": {"train_files": "t.jsonl", "max_prompt_tokens": 100},
        "reward": {"functions": "a:b"},
        "algorithm": algorithm,
        "engine": {"max_tokens_per_micro_batch": 512},
        "rollout": {"temperature": 0.6},
    }
    return RLConfig.parse(tree, origin="test")


def test_samples_are_prompt_then_completion_with_the_completion_trained(make_group):
    groups = [make_group([1.0, 0.0], prompt_ids=(7, 8), lengths=[2, 1]), make_group([0.5], prompt_ids=(9,), uid="b")]
    first, second, third = to_samples(groups)
    assert first.token_ids.tolist() == [7, 8, 100, 101]
    assert first.loss_mask.tolist() == [False, False, True, True]
    assert first.rollout_logprobs.tolist() == pytest.approx([0.0, 0.0, -0.1, -0.11])
    assert (first.reward, first.group, first.min_policy_version, first.max_policy_version) == (1.0, 0, 4, 4)
    assert second.token_ids.tolist() == [7, 8, 110]
    assert second.rollout_logprobs.tolist() == pytest.approx([0.0, 0.0, -0.2])
    assert (third.token_ids.tolist(), third.group, third.uid) == ([9, 100, 101], 1, "b")
    assert third.token_ids.dtype == torch.int64


def echo(offset):
    """Answers every micro-batch with its token ids plus `offset`: what comes back shows where it came from."""
    return lambda rank, batches: [batch.input_ids.float() + offset for batch in batches]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({}, []),
        ({"num_minibatches": 2}, ["policy_logprobs"]),
        ({"num_epochs": 2}, ["policy_logprobs"]),
        ({"kl_coef": 0.1}, ["reference_logprobs"]),
        ({"kl_coef": 0.1, "kl_in": "reward"}, ["reference_logprobs"]),
        ({"kl_coef": 0.1, "num_minibatches": 2, "num_epochs": 2}, ["policy_logprobs", "reference_logprobs"]),
    ],
)
def test_only_the_logprobs_that_the_algorithm_needs_are_computed(fake_group, make_group, algorithm, expected):
    group = fake_group(2, policy_logprobs=echo(0.5), reference_logprobs=echo(0.25))
    samples = to_samples([make_group([1.0, 0.0, 1.0], lengths=[3, 1, 2])])
    scored = score(samples, config(**algorithm), group)
    assert group.methods == expected
    for before, after in zip(samples, scored, strict=True):
        for name, method, offset in (
            ("old_logprobs", "policy_logprobs", 0.5),
            ("ref_logprobs", "reference_logprobs", 0.25),
        ):
            values = getattr(after, name)
            if method in expected:
                assert values.tolist() == (before.token_ids + offset).tolist()
            else:
                assert values is None


@pytest.mark.parametrize("advantage", ["grpo", "grpo without std", "rloo"])
def test_advantages_with_the_kl_term_in_the_reward_equal_a_numpy_loop(make_group, advantage):
    """R = reward - 0.3 * sum of k1 over the completion, then the group's baseline."""
    coef, rewards = 0.3, [[1.0, 0.0, 0.5], [0.0, 1.0, 1.0]]
    groups = [make_group(r, lengths=[3, 1, 2], prompt_ids=(7,) * (2 + i)) for i, r in enumerate(rewards)]
    rng = np.random.default_rng(1)
    samples, references = [], []
    for sample in to_samples(groups):
        reference = np.where(sample.loss_mask, -rng.uniform(0.1, 2.0, len(sample.token_ids)), 0.0)
        references.append(reference)
        fields = {name: getattr(sample, name) for name in ("uid", "token_ids", "loss_mask", "rollout_logprobs")}
        samples.append(
            Sample(**fields, reward=sample.reward, group=sample.group, ref_logprobs=torch.tensor(reference).float())
        )
    algorithm = AlgorithmConfig(
        advantage="rloo" if advantage == "rloo" else "grpo",
        advantage_scale="none" if advantage == "grpo without std" else None,
        kl_coef=coef,
        kl_in="reward",
        kl_estimator="k1",
    )
    scored, metrics = with_advantages(samples, algorithm)

    outcomes = np.array(
        [s.reward - coef * (s.rollout_logprobs.numpy() - r).sum() for s, r in zip(samples, references, strict=True)]
    )
    for start in (0, 3):
        members = outcomes[start : start + 3]
        for i in range(3):
            match advantage:
                case "grpo":
                    expected = (members[i] - members.mean()) / (members.std(ddof=1) + 1e-6)
                case "grpo without std":
                    expected = members[i] - members.mean()
                case _:
                    expected = members[i] - np.delete(members, i).mean()
            found = scored[start + i]
            assert found.advantages.shape == found.token_ids.shape
            np.testing.assert_allclose(found.advantages[found.loss_mask], expected, rtol=1e-5, atol=1e-6)
            assert not found.advantages[~found.loss_mask].any()
    assert metrics["advantage/num_zero_variance_groups"].result() == 0


def test_a_kl_term_in_the_loss_leaves_rewards_alone(make_group):
    samples = to_samples([make_group([1.0, 0.0, 1.0])])
    plain, _ = with_advantages(samples, AlgorithmConfig(advantage_scale="none"))
    in_loss, _ = with_advantages(samples, AlgorithmConfig(advantage_scale="none", kl_coef=5.0, kl_in="loss"))
    for a, b in zip(plain, in_loss, strict=True):
        assert a.advantages.tolist() == b.advantages.tolist()
    assert plain[0].advantages.tolist() == pytest.approx([0, 0, 1 / 3, 1 / 3])
    assert plain[1].advantages.tolist() == pytest.approx([0, 0, -2 / 3, -2 / 3])


def test_groups_that_teach_nothing_are_counted(make_group):
    samples = to_samples([make_group([1.0, 1.0]), make_group([0.0, 0.0]), make_group([1.0, 0.0])])
    _, metrics = with_advantages(samples, AlgorithmConfig())
    assert metrics["advantage/num_zero_variance_groups"].result() == 2


@pytest.mark.parametrize(
    ("num_samples", "num_minibatches", "num_epochs"), [(12, 3, 2), (13, 4, 1), (5, 5, 3), (8, 1, 2)]
)
def test_minibatches_partition_the_samples_in_every_epoch(make_group, num_samples, num_minibatches, num_epochs):
    samples = to_samples([make_group([0.0] * num_samples)])
    algorithm = AlgorithmConfig(num_minibatches=num_minibatches, num_epochs=num_epochs)
    parts = list(minibatches(samples, algorithm, seed=3, step=7))
    assert len(parts) == num_minibatches * num_epochs
    epochs = [
        functools.reduce(operator.iadd, parts[i : i + num_minibatches], [])
        for i in range(0, len(parts), num_minibatches)
    ]
    for epoch in epochs:
        assert sorted(map(id, epoch)) == sorted(map(id, samples))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    orders = [[id(sample) for sample in epoch] for epoch in epochs]
    assert len({tuple(order) for order in orders}) == num_epochs
    again = list(minibatches(samples, algorithm, seed=3, step=7))
    assert [[id(s) for s in part] for part in again] == [[id(s) for s in part] for part in parts]
    for other in ({"seed": 4, "step": 7}, {"seed": 3, "step": 8}):
        moved = [id(s) for part in minibatches(samples, algorithm, **other) for s in part]
        assert moved != functools.reduce(operator.iadd, orders, [])


def test_one_minibatch_in_one_epoch_is_the_samples_as_they_are(make_group):
    samples = to_samples([make_group([0.0] * 5)])
    assert list(minibatches(samples, AlgorithmConfig(), seed=0, step=1)) == [samples]


def test_rollout_metrics_by_hand(make_group):
    groups = [
        make_group(
            [1.0, 0.0, 0.25],
            lengths=[2, 5, 3],
            reasons=["stop", "length", "stop"],
            parts=[{"acc": 1.0, "mean": 9.0}, {}, {"acc": 0.5}],
            failed=[False, True, False],
        ),
        make_group([0.75], lengths=[10], reasons=["length"], parts=[{}], failed=[False]),
    ]
    found = {name: value.result() for name, value in rollout_metrics(groups).items()}
    assert found == {
        "reward/mean": 0.5,
        "reward/max": 1.0,
        "rollout/response_tokens": 5.0,
        "rollout/response_tokens_max": 10.0,
        "rollout/truncated": 0.5,
        "reward/failed": 0.25,
        "reward_part/acc": 0.75,  # over the two that have it
        "reward_part/mean": 9.0,  # a name of the user's cannot hide one of ours
    }


def test_f41_masked_failures_are_neither_trained_nor_counted(make_group):
    """A group of three in which one call failed is a group of two, in samples, statistics and metrics."""
    group = make_group([1.0, 0.0, 5.0], failed=[False, False, True])
    masked, unmasked = to_samples([group], mask_failed=True), to_samples([group])
    assert [int(sample.loss_mask.sum()) for sample in masked] == [2, 2, 0]
    assert [int(sample.loss_mask.sum()) for sample in unmasked] == [2, 2, 2]
    scored, metrics = with_advantages(masked, AlgorithmConfig(advantage_scale="none"))
    assert [sample.advantages[-1].item() for sample in scored] == [0.5, -0.5, 0.0]
    assert metrics["advantage/num_groups_without_baseline"].result() == 0
    found = {name: value.result() for name, value in rollout_metrics([group], mask_failed=True).items()}
    assert (found["reward/mean"], found["reward/max"], found["reward/failed"]) == (0.5, 1.0, pytest.approx(1 / 3))
    nothing = rollout_metrics([make_group([1.0], failed=[True])], mask_failed=True)
    assert (nothing["reward/mean"].result(), nothing["reward/failed"].result()) == (0.0, 1.0)


def test_sample_rows_keep_the_first_sixteen_completions(make_group):
    groups = [make_group([float(i) for i in range(10)]), make_group([10.0 + i for i in range(10)], uid="b")]
    rows = sample_rows(groups, 3)
    assert [row["reward"] for row in rows] == [float(i) for i in range(16)]
    assert rows[12]["uid"] == "b"
    assert rows[1] == {
        "step": 3,
        "uid": "r",
        "data_source": "sums",
        "prompt": "?",
        "completion": "text 1",
        "ground_truth": "5",
        "reward": 1.0,
        "reward_parts": {"b": 1.0},
        "reward_failed": False,
        "finish_reason": "stop",
        "policy_version": 4,
        "token_ids": [110, 111],
        "logprobs": [-0.2, -0.21000000000000002],
    }


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_reference_is_built_only_for_a_kl_term_and_the_schedule_counts_optimizer_steps(fake_group, kl_coef):
    group = fake_group(2, build_policy=lambda rank, *_: (7_000_000, 500_000, 100 + rank))
    policy = build_engines(config(kl_coef=kl_coef, num_minibatches=2, num_epochs=3), ModelConfig(path="m"), group, 10)
    assert ("build_reference" in group.methods) == (kl_coef > 0)
    assert group.calls[0][0] == "build_policy"
    assert policy.size == "7.0M parameters (0.50M trained)"
    assert policy.metrics["load/bytes_read"].result() == 101
    assert group.calls[0][-2:] == (60, 0)
    assert group.calls[1][0] == "use_policy_loss"
    assert group.calls[1][-1] == 0.6
    method, _model, rollout, param_dtype = group.calls[-2]
    assert (method, json.loads(rollout)["temperature"], param_dtype) == ("build_rollout", 0.6, "float32")
    assert group.calls[-1] == ("sync_weights", 0)

"""What a rollout becomes."""

import json
from dataclasses import replace

import pytest
import torch

from shardwise.recipes.sampling.sampler import Rollout
from shardwise.recipes.sampling.samples import (
    reward_metrics,
    rollout_metrics,
    sample_rows,
    staleness_metrics,
    to_samples,
)


def test_samples_are_prompt_then_completion_with_the_completion_trained(make_group):
    groups = [make_group([1.0, 0.0], prompt_ids=(7, 8), lengths=[2, 1]), make_group([0.5], prompt_ids=(9,), uid="b")]
    first, second, third = to_samples(groups)
    assert first.token_ids.tolist() == [7, 8, 100, 101]
    assert first.loss_mask.tolist() == [False, False, True, True]
    assert first.rollout_logprobs.tolist() == pytest.approx([0.0, 0.0, -0.1, -0.11])
    assert (first.reward, first.group) == (1.0, 0)
    assert second.token_ids.tolist() == [7, 8, 110]
    assert second.rollout_logprobs.tolist() == pytest.approx([0.0, 0.0, -0.2])
    assert (third.token_ids.tolist(), third.group, third.uid) == ([9, 100, 101], 1, "b")
    assert third.token_ids.dtype == torch.int64


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
    found = {name: value.result() for name, value in (rollout_metrics(groups) | reward_metrics(groups)).items()}
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


def test_rewards_of_several_sources_are_means_of_their_own(make_group):
    groups = [
        make_group([1.0, 0.0], source="a"),
        make_group([0.5], source="b"),
        make_group([0.0, 9.0], source="a", failed=[False, True]),
    ]
    found = {name: value.result() for name, value in reward_metrics(groups, mask_failed=True).items()}
    assert found["reward/mean"] == pytest.approx(1.5 / 4)
    assert found["reward/mean/a"] == pytest.approx(1.0 / 3)
    assert found["reward/mean/b"] == 0.5
    assert found["reward/failed"] == 0.2
    alone = reward_metrics(groups[:1])
    assert "reward/mean/a" not in alone


def test_f41_masked_failures_are_neither_trained_nor_in_the_metrics(make_group):
    """A group of three in which one call failed is a group of two, in samples and metrics."""
    group = make_group([1.0, 0.0, 5.0], failed=[False, False, True])
    masked, unmasked = to_samples([group], mask_failed=True), to_samples([group])
    assert [int(sample.loss_mask.sum()) for sample in masked] == [2, 2, 0]
    assert [int(sample.loss_mask.sum()) for sample in unmasked] == [2, 2, 2]
    found = {name: value.result() for name, value in reward_metrics([group], mask_failed=True).items()}
    assert (found["reward/mean"], found["reward/max"], found["reward/failed"]) == (0.5, 1.0, pytest.approx(1 / 3))
    nothing = reward_metrics([make_group([1.0], failed=[True])], mask_failed=True)
    assert (nothing["reward/mean"].result(), nothing["reward/failed"].result()) == (0.0, 1.0)


def row_s_prompt(example, _completion):
    return example.prompt


def test_sample_rows_keep_the_first_sixteen_completions(make_group):
    groups = [make_group([float(i) for i in range(10)]), make_group([10.0 + i for i in range(10)], uid="b")]
    rows = sample_rows(groups, 3, row_s_prompt)
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
        "reward_failure": None,
        "finish_reason": "stop",
        "policy_version": 4,
        "token_versions": None,
        "num_turns": 1,
        "prompt_ids": [7, 8],
        "token_ids": [110, 111],
        "is_sampled": None,
        "logprobs": [-0.2, -0.21000000000000002],
    }
    unjudged = sample_rows(groups, 3, row_s_prompt, judged=False)[1]
    assert rows[1].keys() - unjudged.keys() == {"reward", "reward_parts", "reward_failure"}
    assert unjudged.items() <= rows[1].items()


def test_what_an_environment_said_is_neither_trained_nor_counted_as_written(make_group):
    (group,) = [make_group([1.0], prompt_ids=(7, 8), lengths=[5])]
    completion = replace(
        group.completions[0],
        is_sampled=[True, False, False, True, True],
        logprobs=[-0.5, 0.0, 0.0, -0.25, -1.0],
        turn_starts=[0, 3],
    )
    group = replace(group, completions=[completion])
    (sample,) = to_samples([group])
    assert sample.loss_mask.tolist() == [False, False, True, False, False, True, True]
    assert sample.turn_starts == [2, 5]
    by_two = replace(group, completions=[replace(completion, token_versions=[3, 3, 3, 5, 5])])
    assert staleness_metrics([by_two], version=5)["staleness/token_mean"].result() == 2 / 3  # of those it sampled
    assert sample.rollout_logprobs.tolist() == [0.0, 0.0, -0.5, 0.0, 0.0, -0.25, -1.0]
    found = {name: value.result() for name, value in rollout_metrics([group]).items()}
    assert (found["rollout/num_turns"], found["rollout/observed_tokens"], found["rollout/response_tokens"]) == (2, 2, 3)
    assert "rollout/num_turns" not in rollout_metrics([make_group([1.0])])


def test_a_completion_of_an_agents_own_prompt_is_trained_behind_it(make_group):
    """And one of an agent that failed before its first turn trains nothing."""
    group = make_group([1.0, 0.0], lengths=[2, 1], failed=[False, True])
    own = replace(group.completions[0], prompt_ids=[1, 2, 3], is_sampled=[False, True])
    empty = replace(group.completions[1], token_ids=[], logprobs=[], is_sampled=[], turn_starts=[])
    group = replace(group, completions=[own, empty])
    first, second = to_samples([group], mask_failed=True)
    assert first.token_ids.tolist() == [1, 2, 3, 100, 101]
    assert first.loss_mask.tolist() == [False, False, False, False, True]
    assert first.rollout_logprobs.tolist() == pytest.approx([0, 0, 0, -0.1, -0.11])
    assert (second.token_ids.tolist(), second.loss_mask.tolist()) == ([7, 8], [False, False])
    assert staleness_metrics([group], version=6)["staleness/max"].result() == 2
    rollout = Rollout(groups=[group], greedy_rewards=None, metrics={})
    assert (rollout.num_tokens, rollout.oldest_version) == (5 + 2, 4)
    with_old = replace(group, completions=[own, replace(empty, policy_version=1)])
    assert Rollout(groups=[with_old], greedy_rewards=None, metrics={}).oldest_version == 4
    assert staleness_metrics([with_old], version=6)["staleness/max"].result() == 2
    without = replace(group, completions=[empty, empty])
    assert Rollout(groups=[without], greedy_rewards=None, metrics={}).oldest_version is None
    assert staleness_metrics([without], version=6)["staleness/max"].result() == 0
    rows = sample_rows([group], 1, lambda _, completion: str(completion.prompt_ids))
    assert [(row["prompt"], row["prompt_ids"]) for row in rows] == [("[1, 2, 3]", [1, 2, 3]), ("None", [7, 8])]
    back = Rollout.from_json(json.loads(json.dumps(rollout.to_json())), [group.example])
    assert back.groups[0].completions == [own, empty]

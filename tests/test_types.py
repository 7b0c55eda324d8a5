import math
from dataclasses import replace

import pytest
import torch

from shardwise.types import Completion, GenerateRequest, MetricValue, Sample, TokenBatch, merge_metrics


def test_merging_parts_gives_the_metric_of_the_whole():
    """Sums add, means weight every value equally, the largest value wins, whatever the split."""
    values = [3.0, -1.0, 4.0, 1.5, 0.25]
    for cut in range(1, 5):
        parts = [
            {"s": MetricValue.sum(sum(v)), "m": MetricValue.mean(sum(v), len(v)), "x": MetricValue.max(max(v))}
            for v in (values[:cut], values[cut:])
        ]
        merged = {name: value.result() for name, value in merge_metrics(parts).items()}
        assert merged == pytest.approx({"s": 7.75, "m": 1.55, "x": 4.0})


def test_the_largest_float_is_not_rounded():
    """A learning rate of two ranks must print as the one of one rank does."""
    assert MetricValue.max(0.1).merge(MetricValue.max(0.003)).result() == 0.1
    for one, other in ((0.5, math.nan), (math.nan, 0.5)):
        assert math.isnan(MetricValue.max(one).merge(MetricValue.max(other)).result())
    on_device = MetricValue.max(torch.tensor(0.25)).merge(MetricValue.max(torch.tensor(0.5)))
    assert isinstance(on_device.total, torch.Tensor)
    assert on_device.result() == 0.5


def test_a_metric_that_only_some_parts_have_is_kept():
    merged = merge_metrics(
        [{"a": MetricValue.mean(2.0, 1)}, {}, {"a": MetricValue.mean(4.0, 3), "b": MetricValue.sum(1.0)}]
    )
    assert {name: value.result() for name, value in merged.items()} == {"a": 1.5, "b": 1.0}


def test_a_metric_that_does_not_say_how_it_merges_is_refused():
    with pytest.raises(TypeError, match=r"^MetricValue is made by MetricValue\.mean\(total, count\), "):
        MetricValue(3.0, 4.0)


def test_a_mean_over_nothing_is_zero():
    assert MetricValue.mean(0.0, 0).result() == 0.0


def test_tensors_become_floats_on_the_host():
    value = MetricValue.mean(torch.tensor(3.0), torch.tensor(2)).merge(MetricValue.mean(1.0, 2)).host()
    assert (type(value.total), value.total, type(value.count), value.count) == (float, 4.0, float, 4.0)


def test_kinds_do_not_mix():
    with pytest.raises(AssertionError, match=r"sum.*max"):
        MetricValue.sum(1.0).merge(MetricValue.max(1.0))


@pytest.mark.parametrize("mask", [[True, False], [True, True]])
def test_a_sample_that_trains_its_first_token_is_refused(mask):
    with pytest.raises(AssertionError, match="row 3: position 0 has no prediction"):
        Sample(uid="row 3", token_ids=torch.tensor([4, 5]), loss_mask=torch.tensor(mask))


def test_a_sample_whose_mask_has_another_length_is_refused():
    with pytest.raises(AssertionError, match=r"\[2\].*\[3\]"):
        Sample(uid="a", token_ids=torch.tensor([4, 5]), loss_mask=torch.tensor([False, True, True]))


def test_a_batch_moves_every_tensor_and_nothing_else(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # which takes an accelerator
    batch = TokenBatch(
        input_ids=torch.tensor([1]),
        position_ids=torch.tensor([0]),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        loss_mask=torch.tensor([False]),
        sample_index=[0],
        advantages=torch.ones(1),
    )
    moved = batch.to(torch.device("meta"))
    tensors = (moved.input_ids, moved.position_ids, moved.cu_seqlens, moved.loss_mask, moved.advantages)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.sample_index == [0]
    assert moved.old_logprobs is None
    assert batch.input_ids.device.type == "cpu"


def test_choices_of_experts_stay_those_of_the_pass_that_sampled_whatever_is_interrupted():
    """Three versions; the second was interrupted before its first token. Each pass computes all tokens before it."""

    def part(tokens, version, choices):
        experts = None if choices is None else torch.tensor(choices).view(-1, 1, 1)
        return Completion(
            token_ids=tokens,
            logprobs=[-1.0] * len(tokens),
            finish_reason="interrupted",
            policy_version=version,
            experts=experts,
        )

    whole = part([5, 6], 1, [10, 11, 12]).then(part([], 2, None)).then(part([7], 3, [20, 21, 22, 23]))
    assert whole.experts.flatten().tolist() == [10, 11, 12, 23]
    assert whole.versions == [1, 1, 3]


def test_completions_that_are_asked_for_one_by_one_have_names_of_their_own():
    request = GenerateRequest(uid="row", prompt_ids=[1], num_completions=2, max_tokens=5, temperature=0.5, top_k=3)
    assert request.one_by_one() == [replace(request, uid=f"row/{index}", num_completions=1) for index in (0, 1)]

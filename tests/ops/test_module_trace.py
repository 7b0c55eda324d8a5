import pytest
import torch
from torch import nn

from shardwise.ops import Place, traced


class Half(nn.Module):
    """Takes what it computes with as a keyword, and returns more than that."""

    def forward(self, label, *, states):
        return {"label": label, "states": states / 2}, states


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.halve, self.last = nn.Embedding(7, 4), Half(), nn.Linear(4, 3)

    def forward(self, ids):
        return self.last(self.halve("a", states=self.embed(ids))[0]["states"])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def test_places_are_in_the_order_of_execution_and_hold_what_was_there(model):
    ids = torch.tensor([[3, 1, 6]])
    with traced(model.named_modules()) as trace:
        result = model(ids)
    found = trace.of_passes([3])
    embedded = model.embed(ids)[0]
    expected = {
        ("embed", "output"): embedded,  # what goes in are no numbers of a model
        ("halve", "input"): embedded,
        ("halve", "output"): embedded / 2,
        ("last", "input"): embedded / 2,
        ("last", "output"): result[0],
    }
    assert list(found) == list(expected)
    assert all(torch.equal(found[place], value) for place, value in expected.items())
    assert str(Place("halve", "input")) == "the input of halve"


def test_passes_over_parts_of_a_sequence_are_one_after_the_other(model):
    with traced(model.named_modules()) as trace:
        whole = torch.cat([model(torch.tensor([[3, 1]])), model(torch.tensor([[6]]))], dim=1)
    assert torch.equal(trace.of_passes([2, 1])[Place("last", "output")], whole[0])
    assert trace.of_passes([3]) == {}


def test_what_is_not_of_every_position_is_left_out(model):
    with traced(model.named_modules()) as trace:
        model(torch.tensor([[3, 1, 6]]))
    assert trace.of_passes([5]) == {}
    assert trace.of_passes([2, 1]) == {}


def test_heads_may_come_before_positions(model):
    """[1, heads, positions, 2] in passes of 2 and 1 tokens."""
    model.halve.forward = lambda label, *, states: ({"states": states}, None)
    model.embed.register_forward_hook(lambda _, __, output: output.view(1, -1, 2, 2).transpose(1, 2))
    model.last = nn.Linear(2, 3)
    with traced(model.named_modules()) as trace:
        parts = [model(torch.tensor([[3, 1]])), model(torch.tensor([[6]]))]
    expected = torch.cat([part[0].transpose(0, 1).flatten(1) for part in parts])
    assert torch.equal(trace.of_passes([2, 1])[Place("last", "output")], expected)


def test_later_changes_and_later_passes_are_not_seen(model):
    ids = torch.tensor([[3, 1, 6]])
    with traced(model.named_modules()) as trace:
        result = model(ids)
    expected = result[0].clone()
    with torch.no_grad():
        result.zero_()
    model(ids)
    assert torch.equal(trace.of_passes([3])[Place("last", "output")], expected)


def test_what_fused_experts_hold_is_left_out_for_they_sort_tokens(model):
    model.embed.weights, model.embed.inner = nn.Parameter(torch.zeros(2, 3, 4)), nn.Identity()
    model.embed.register_forward_hook(lambda module, _, output: module.inner(output))
    with traced(model.named_modules()) as trace:
        model(torch.tensor([[3, 1, 6]]))
    assert {place.module for place in trace.of_passes([3])} == {"embed", "halve", "last"}


def test_readers_decide_what_stands_for_a_module(model):
    linear = lambda module, value: value if isinstance(module, nn.Linear) else None  # noqa: E731
    second = lambda module, value: value[1] if isinstance(module, Half) else value  # noqa: E731
    with traced(model.named_modules(), read_input=linear, read_output=second) as trace:
        model(torch.tensor([[3, 1, 6]]))
    found = trace.of_passes([3])
    assert list(found) == [("embed", "output"), ("halve", "output"), ("last", "input"), ("last", "output")]
    assert torch.equal(found[Place("halve", "output")], found[Place("embed", "output")])

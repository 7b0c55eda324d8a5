import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.region import Region

SHAPE = (7, 5, 3)
WHOLE = Region.whole(SHAPE)


@st.composite
def regions(draw):
    spans = []
    for size in SHAPE:
        ends = sorted(draw(st.sets(st.integers(0, size), max_size=4)))
        spans.append(tuple(zip(ends[::2], ends[1::2], strict=False)))
    return Region(tuple(spans))


def mask(region):
    """Which elements of a tensor of SHAPE the region holds."""
    inside = torch.ones(SHAPE, dtype=torch.bool)
    for dim, spans in enumerate(region.spans):
        indices = torch.tensor([index for start, stop in spans for index in range(start, stop)], dtype=torch.long)
        of_dim = torch.zeros(SHAPE[dim], dtype=torch.bool).index_fill(0, indices, True)
        inside &= of_dim.view([-1 if other == dim else 1 for other in range(3)])
    return inside


NUMBERS = torch.arange(float(mask(WHOLE).sum())).view(SHAPE)


@given(regions())
def test_of_gives_the_elements_of_the_region_in_their_order(region):
    found = region.of(NUMBERS)
    assert found.shape == region.shape
    assert torch.equal(found.flatten(), NUMBERS[mask(region)])


@given(regions(), regions())
def test_two_regions_together_hold_both_and_each_lies_inside(one, other):
    both = one | other
    assert torch.equal(mask(both) & mask(one), mask(one))
    assert torch.equal(mask(both) & mask(other), mask(other))
    assert both == other | one
    assert torch.equal(one.inside(both).of(both.of(NUMBERS)), one.of(NUMBERS))
    if both != one:
        with pytest.raises(ValueError, match="is not in"):
            both.inside(one)


@given(regions(), st.tuples(st.integers(0, 7), st.integers(0, 7)))
def test_rows_of_a_region_are_a_region_of_the_rows(region, ends):
    start, stop = sorted(ends)
    rows = NUMBERS[start:stop]
    among = torch.zeros(SHAPE, dtype=torch.bool)
    among[start:stop] = mask(region)[start:stop]
    assert torch.equal(region.among_rows(start, stop).of(rows).flatten(), NUMBERS[among])


def test_spans_that_touch_or_overlap_are_one_and_empty_ones_none():
    assert Region.box([(0, 4)]) | Region.box([(4, 6)]) == Region.box([(0, 6)])
    assert Region.box([(3, 5)]) | Region.box([(0, 4)]) == Region.box([(0, 5)])
    assert Region.box([(0, 4)]) | Region.box([(8, 12)]) == Region((((0, 4), (8, 12)),))
    assert Region.box([(2, 2)]) == Region(((),))
    assert Region.whole(()).of(torch.tensor(3.0)) == 3


@given(regions())
def test_json_brings_it_back(region):
    assert Region.of_lists(json.loads(json.dumps(region.spans))) == region

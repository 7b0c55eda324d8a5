import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.algorithms.overlong import overlong_penalty


def test_penalty_by_hand():
    """DAPO's setting: none up to 16384, then down to -1 at 20480."""
    lengths = torch.tensor([0, 16384, 16385, 18432, 20480, 30000])
    penalty = overlong_penalty(lengths, max_tokens=20480, buffer_tokens=4096, factor=1.0)
    assert penalty.tolist() == [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0]


@given(length=st.integers(0, 100), max_tokens=st.integers(1, 100), buffer=st.integers(1, 100), factor=st.floats(0.1, 5))
def test_penalty_is_the_formula_up_to_max_tokens(length, max_tokens, buffer, factor):
    length, buffer = min(length, max_tokens), min(buffer, max_tokens)
    expected = min(-(length - (max_tokens - buffer)) / buffer * factor, 0)
    penalty = overlong_penalty(torch.tensor([length]), max_tokens=max_tokens, buffer_tokens=buffer, factor=factor)
    assert penalty.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("buffer", [0, 11])
def test_a_buffer_that_does_not_fit_is_refused(buffer):
    with pytest.raises(ValueError, match=f"buffer_tokens={buffer} with max_tokens=10: use 1 to 10"):
        overlong_penalty(torch.tensor([1]), max_tokens=10, buffer_tokens=buffer, factor=1.0)

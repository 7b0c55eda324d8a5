import pytest
import torch

from shardwise.ops import is_finite, nonfinite_names

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_element_anywhere_is_found(dtype, value):
    for place in (0, 17, 34):
        tensor = torch.randn(5, 7).to(dtype)
        assert is_finite(tensor)
        tensor.view(-1)[place] = value
        assert not is_finite(tensor)
        assert not is_finite(tensor.T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_are_finite(dtype):
    """Their sum would not be."""
    assert is_finite(torch.full((4,), torch.finfo(dtype).max, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_may_be_infinite_is_looked_through_for_nan_alone(dtype):
    bounds = torch.tensor([float("-inf"), 1.0, float("inf")], dtype=dtype)
    assert is_finite(bounds, may_be_infinite=True)
    assert not is_finite(torch.cat([bounds, bounds.new_full((1,), float("nan"))]), may_be_infinite=True)
    assert nonfinite_names([("a", bounds), ("b", bounds)], may_be_infinite={"b"}) == ["a"]


def test_names_come_in_order_and_integers_and_nothing_are_finite():
    bad = torch.tensor([1.0, float("nan")])
    tensors = {"b": bad, "count": torch.arange(3), "none": torch.empty(0, 4), "a": bad, "scalar": torch.tensor(2.0)}
    assert nonfinite_names(tensors.items()) == ["b", "a"]

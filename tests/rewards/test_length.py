import pytest

from shardwise.rewards.length import length_of, overlong_penalty, target_length


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (80, 0.0), (81, -0.1), (90, -1.0), (100, -2.0), (110, -3.0)]
)
def test_overlong_penalty_falls_in_a_straight_line_over_the_buffer(length, expected):
    """Factor 2 over a buffer of 20 before 100: 0.1 for each unit above 80."""
    parameters = {"max_length": 100, "buffer": 20, "factor": 2.0}
    found = overlong_penalty("", "", "", {"num_response_tokens": length}, **parameters)
    assert found == pytest.approx(expected)
    assert overlong_penalty("", "x" * length, "", **parameters, unit="characters") == pytest.approx(expected)
    assert overlong_penalty("", "xy " * length, "", **parameters, unit="words") == pytest.approx(expected)


@pytest.mark.parametrize(("length", "expected"), [(10, 1.0), (8, 0.5), (13, 0.25), (14, 0.0), (0, 0.0), (99, 0.0)])
def test_target_length_is_a_tent(length, expected):
    assert target_length("", "x" * length, "", target=10, tolerance=4, unit="characters") == pytest.approx(expected)


def test_what_cannot_be_measured_is_an_error():
    with pytest.raises(ValueError, match="needs num_response_tokens"):
        length_of("x", {}, "tokens")
    with pytest.raises(ValueError, match="use tokens, words or characters"):
        length_of("x", {}, "lines")
    with pytest.raises(ValueError, match="buffer=0 must be from 1 to max_length=5"):
        overlong_penalty("", "x", "", max_length=5, buffer=0, unit="words")
    with pytest.raises(ValueError, match="tolerance=0"):
        target_length("", "x", "", target=5, tolerance=0, unit="words")

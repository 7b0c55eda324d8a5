import pytest

from shardwise.rewards.repetition import ngram_repetition


@pytest.mark.parametrize(
    ("text", "n", "penalty", "expected"),
    [
        ("a b c d", 2, 1.0, 0.0),
        ("a b a b", 2, 1.0, -1 / 3),  # ab ba ab
        ("A a a a a", 1, 2.0, -2 * 4 / 5),
        ("a b", 4, 1.0, 0.0),
        ("", 1, 1.0, 0.0),
    ],
)
def test_share_of_repeated_ngrams_by_hand(text, n, penalty, expected):
    assert ngram_repetition("", text, "", n=n, penalty=penalty) == pytest.approx(expected)


def test_a_loop_comes_close_to_the_whole_penalty():
    assert -1.0 < ngram_repetition("", "wait, let me think again " * 100, "") < -0.98


def test_n_below_one_is_an_error():
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        ngram_repetition("", "a", "", n=0)

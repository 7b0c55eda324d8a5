import pytest

from shardwise.rewards.format import pattern_match


def call(text, **parameters):
    return pattern_match("", text, "", {}, **parameters)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a\nb</think>\n<answer>5</answer>", 1.0),
        ("  <think></think><answer></answer>\n", 1.0),
        ("so: <think>a</think><answer>5</answer>", 0.0),
        ("<think>a</think>", 0.0),
    ],
)
def test_the_whole_text_must_match(text, score):
    assert call(text, pattern=r"<think>.*</think>\s*<answer>.*</answer>") == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think><answer>5</answer>", 1.0),
        ("<think>a</think><answer>5", 0.5),
        ("<think>a</think><think>b</think>", 0.0),
        ("</think>a<think>", 0.0),
        ("", 0.0),
    ],
)
def test_tags_that_stand_once_and_in_order_count(text, score):
    assert call(text, tags=["think", "answer"]) == score


def test_tags_that_are_a_text_are_an_error():
    with pytest.raises(ValueError, match="tags='think' is a text, whose letters would be the tags; give a list"):
        call("<think></think>", tags="think")


def test_both_or_none_and_a_broken_pattern_are_errors():
    with pytest.raises(ValueError, match="give one of the two"):
        call("")
    with pytest.raises(ValueError, match="give one of the two"):
        call("", pattern="a", tags=["b"])
    with pytest.raises(ValueError, match="is no regular expression"):
        call("", pattern="(")

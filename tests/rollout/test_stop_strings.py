import pytest

from shardwise.rollout.stop_strings import before_stop, brings_stop, first_stop

SPECIAL = 256


def decode(token_ids):
    """Tokens are bytes; special ones are skipped."""
    return bytes(token for token in token_ids if token != SPECIAL).decode(errors="replace")


@pytest.mark.parametrize(
    ("said", "stop", "expected"),
    [
        ("two = 2", ["= 2"], True),
        ("two = 2", ["3", "2"], True),
        ("two = 2", ["= 3"], False),
        ("= 2 and far more than four bytes a character", ["= 2"], False),  # it ended there
        ("zwölf", ["ölf"], True),
    ],
)
def test_a_stop_string_is_looked_for_in_the_last_tokens(said, stop, expected):
    assert brings_stop(list(said.encode()), stop, decode) is expected


@pytest.mark.parametrize(
    ("begun", "sampled", "stop", "expected"),
    [
        ("so <", "end> and more", ["<end>"], 4),
        ("so <en", "d> and more", ["never", "<end>"], 2),
        ("so ", "<end>", ["<end>"], 5),
        ("so ", "far far far far far away <end> and <end>", ["<end>"], 30),
        ("<end> is far far far far away from here", "on", ["<end>"], None),
        ("so <", "ends", ["<end>"], None),
        ("so", "", ["so!"], None),
    ],
)
def test_the_first_token_after_which_a_stop_string_is_there_that_began_before(begun, sampled, stop, expected):
    assert first_stop(list(sampled.encode()), stop, decode, begun=list(begun.encode())) == expected


def test_half_a_character_is_on_each_side():
    text = "ä!".encode()
    assert first_stop(list(text[1:]), ["ä!"], decode, begun=[65, text[0]]) == 2


@pytest.mark.parametrize(
    ("begun", "sampled", "expected"),
    [("so <en", "d>", True), ("so <en", "d", False), ("", "<end>", True)],
)
def test_a_stop_string_may_have_begun_before(begun, sampled, expected):
    assert brings_stop(list(sampled.encode()), ["<end>"], decode, begun=list(begun.encode())) is expected


def test_looking_for_a_stop_string_reads_only_the_last_tokens():
    class Long(list):
        def __iter__(self):
            raise AssertionError("all of it is read")

    begun, sampled = Long(b"a" * 10_000 + b"so <en"), Long(b"d>")
    assert brings_stop(sampled, ["<end>"], decode, begun=begun)
    assert not brings_stop(sampled, ["<and>"], decode, begun=begun)


@pytest.mark.parametrize("num_special", [1, 8, 100])
def test_special_tokens_inside_a_stop_string_do_not_hide_it(num_special):
    between = [SPECIAL] * num_special
    assert brings_stop([65, *between, 66], ["AB"], decode)
    assert not brings_stop([65, *between, 67], ["AB"], decode)
    assert first_stop([*between, 66, 67], ["AB"], decode, begun=[65]) == num_special + 1
    assert first_stop([66, 67], ["AB"], decode, begun=[65, *between]) == 1


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("two = 2. ", ["."], "two = 2"),
        ("two = 2", ["2", "="], "two "),
        ("two = 2", ["3"], "two = 2"),
        ("two", [], "two"),
        ("two", ["two"], ""),
    ],
)
def test_what_was_said_ends_before_the_first_stop_string(text, stop, expected):
    assert before_stop(text, stop) == expected

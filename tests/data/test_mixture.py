"""Which prompts come next."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config import ConfigError, DataError, PromptDataConfig
from shardwise.data.loader import BatchLoader
from shardwise.data.mixture import PromptStream


def stream(sources, *, seed=0, **data) -> PromptStream:
    return PromptStream(sources, PromptDataConfig.parse(data, origin="test"), seed=seed)


@pytest.mark.parametrize("shuffle", [True, False])
def test_without_a_mixture_rows_come_as_the_batch_loader_gives_them(shuffle):
    found = stream(["a", "b", "a", "c", "b"], seed=3, shuffle=shuffle)
    loader = BatchLoader(5, 2, seed=3, shuffle=shuffle)
    assert [found.take(2, step=step) for step in range(1, 8)] == [loader.indices(2 * step) for step in range(7)]


@given(st.dictionaries(st.sampled_from("abc"), st.integers(1, 5), min_size=1), st.integers(1, 60), st.integers(0, 5))
def test_sources_come_in_the_proportion_of_their_weights(weights, num_rows, seed):
    """At every moment no source is a whole row off its share."""
    sources = ["a"] * 3 + ["b"] * 7 + ["c"]
    taken = stream(sources, seed=seed, mixture=[{"weights": weights}]).take(num_rows, step=1)
    counts = Counter(sources[row] for row in taken)
    for name in "abc":
        assert abs(counts[name] - num_rows * weights.get(name, 0) / sum(weights.values())) < len(weights)


def test_each_source_goes_through_all_its_rows_before_one_comes_again():
    sources = ["a", "b", "a", "b", "a", "b"]
    taken = stream(sources, mixture=[{"weights": {"a": 1, "b": 1}}]).take(12, step=1)
    assert all(taken.count(row) == 2 for row in range(6))
    assert sorted(taken[:6]) == list(range(6))


def test_a_curriculum_changes_the_mixture_at_its_steps():
    sources = ["easy"] * 4 + ["hard"] * 4
    stages = [{"weights": {"easy": 1}}, {"from_step": 3, "weights": {"easy": 1, "hard": 3}}]
    found = stream(sources, mixture=stages)
    by_step = [[sources[row] for row in found.take(4, step=step)] for step in range(1, 5)]
    assert by_step[:2] == [["easy"] * 4] * 2
    assert [Counter(names)["hard"] for names in by_step[2:]] == [3, 3]


def test_prompts_of_the_wrong_difficulty_sit_out_one_epoch():
    found = stream(["a"] * 4, shuffle=False, difficulty={"min_pass_rate": 0.2, "max_pass_rate": 0.8})
    assert found.take(4, step=1) == [0, 1, 2, 3]
    for row, pass_rate in enumerate([0.0, 0.2, 0.8, 1.0]):
        found.record(row, pass_rate)
    assert found.take(2, step=2) == [1, 2]
    assert found.take(4, step=3) == [0, 1, 2, 3]


def test_prompts_that_are_all_of_the_wrong_difficulty_come_back():
    found = stream(["a"] * 3, shuffle=False, difficulty={"min_pass_rate": 0.5})
    found.take(3, step=1)
    for row in range(3):
        found.record(row, 0.0)
    assert found.take(3, step=2) == [0, 1, 2]


def test_a_source_without_rows_is_an_error_that_names_those_there_are():
    with pytest.raises(ConfigError, match=r"data\.mixture\.0\.weights names math, but the sources .* are code, gsm8k"):
        stream(["gsm8k", "code"], mixture=[{"weights": {"gsm8k": 1, "math": 1}}])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"mixture": [{"from_step": 2, "weights": {"a": 1}}]}, "begin with 1 and go up"),
        ({"mixture": [{"weights": {"a": 0}}]}, "leave every source out"),
        ({"difficulty": {}}, "leave no prompt out"),
        ({"difficulty": {"min_pass_rate": 0.9, "max_pass_rate": 0.1}}, "swap them"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        stream(["a"], **data)


@given(st.integers(0, 12), st.integers(0, 3))
def test_a_stream_goes_on_where_another_one_was(num_steps, seed):
    """In the middle of epochs and of a stage, with rows that sit out; the state goes through JSON."""
    sources = ["a"] * 5 + ["b"] * 7
    settings = {
        "mixture": [{"weights": {"a": 2, "b": 1}}, {"from_step": 6, "weights": {"a": 1, "b": 4}}],
        "difficulty": {"min_pass_rate": 0.25, "max_pass_rate": 0.75},
    }

    def run(stream, steps):
        taken = []
        for step in steps:
            rows = stream.take(3, step=step)
            for row in rows:
                stream.record(row, (7 * row + step) % 5 / 4)
            taken.append(rows)
        return taken

    whole, first, second = (stream(sources, seed=seed, **settings) for _ in range(3))
    expected = run(whole, range(1, 21))
    assert run(first, range(1, num_steps + 1)) == expected[:num_steps]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert run(second, range(num_steps + 1, 21)) == expected[num_steps:]


def test_a_state_of_other_rows_is_refused():
    with pytest.raises(DataError, match="had 3 training rows, now there are 2, which"):
        stream(["a", "b"]).load_state_dict(stream(["a", "b", "b"]).state_dict())


def test_a_stream_goes_on_in_other_rows_behind_as_many_of_each_source(capsys):
    """As one that had them from its start. A source that comes begins; one that goes is forgotten, as are pass rates,
    which are of other rows, and shares of a mixture of other sources."""
    before, now = ["a"] * 3 + ["b"] * 4 + ["d"], ["b"] * 6 + ["a"] * 3 + ["c"] * 2
    settings = {"difficulty": {"min_pass_rate": 0.5}}
    first = stream(before, mixture=[{"weights": {"a": 1, "b": 1}}], **settings)
    for row in first.take(10, step=1):
        first.record(row, 0.0)
    assert first.position == {"a": 5, "b": 5, "d": 0}

    def other():
        config = PromptDataConfig.parse({"mixture": [{"weights": {"b": 1, "c": 1}}], **settings}, origin="test")
        return PromptStream(now, config, seed=0, rows_may_differ=True)

    second, whole = other(), other()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.position == {"a": 5, "b": 5, "c": 0}
    assert (
        "had {'a': 3, 'b': 4, 'd': 1} training rows, now there are {'a': 3, 'b': 6, 'c': 2}" in capsys.readouterr().err
    )
    whole.take(10, step=1)  # five of each
    found, expected = second.take(12, step=2), whole.take(12, step=2)
    assert [row for row in found if now[row] == "b"] == [row for row in expected if now[row] == "b"]
    assert [row for row in found if now[row] == "c"][:2] == other().take(4, step=1)[1::2], "from its beginning"
    assert Counter(now[row] for row in found) == {"b": 6, "c": 6}
    third = other()
    third.load_state_dict(json.loads(json.dumps(second.state_dict())))
    assert third.take(20, step=3) == second.take(20, step=3)
    assert capsys.readouterr().err == ""


def test_a_stream_of_rows_with_other_tokens_goes_on_with_a_warning(capsys):
    first, same, other = (PromptStream(["a"] * 5, PromptDataConfig(), seed=0, digest=digest) for digest in "115")
    first.take(3, step=1)
    saved = json.loads(json.dumps(first.state_dict()))
    same.load_state_dict(saved)
    assert capsys.readouterr().err == ""
    other.load_state_dict(saved)
    assert capsys.readouterr().err.startswith("warning: the training rows have other tokens than in the run that is")
    assert other.take(9, step=2) == same.take(9, step=2)


def test_a_stream_whose_rows_may_differ_and_do_not_goes_on_as_ever(capsys):
    sources = ["a"] * 5
    settings = PromptDataConfig.parse({"difficulty": {"min_pass_rate": 0.5}}, origin="test")
    first, second = (PromptStream(sources, settings, seed=0, rows_may_differ=True) for _ in range(2))
    for row in first.take(3, step=1):
        first.record(row, row / 4)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.take(30, step=2) == first.take(30, step=2)
    assert capsys.readouterr().err == ""

"""Scores of reasoning-gym's tasks, where it is installed; a row of another kind is refused everywhere."""

import time

import pytest

from shardwise.rewards.reasoning_gym import last_in_tag, reasoning_gym_score

SUMS = {"task": "chain_sum", "size": 3, "seed": 5, "arguments": {"min_terms": 2, "max_terms": 2}}


def score(text, truth, task=SUMS, index=1, **parameters):
    extra_info = {"reasoning_gym": {**task, "index": index}, "num_response_tokens": 3}
    return reasoning_gym_score("reasoning_gym/x", text, truth, extra_info, **parameters)


def answer_of(task, index):
    reasoning_gym = pytest.importorskip("reasoning_gym")
    made = reasoning_gym.create_dataset(task["task"], size=task["size"], seed=task["seed"], **task["arguments"])
    return made[index]["answer"]


def test_a_row_of_another_kind_is_refused():
    with pytest.raises(ValueError, match=r"a row from gsm8k has no extra_info\.reasoning_gym"):
        reasoning_gym_score("gsm8k", "5", "5", {})


def test_the_right_answer_scores_one():
    answer = answer_of(SUMS, 1)
    assert score(f" {answer}\n", answer) == 1
    assert score("no idea", answer) < 0.1
    assert score("", answer) == 0


def test_an_answer_in_a_tag_is_the_last_one():
    answer = answer_of(SUMS, 1)
    assert score(f"<answer>7x</answer> or <answer>\n{answer} </answer>.", answer, tag="answer") == 1
    assert score(answer, answer, tag="answer") == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<a>7x</a> or <a>\n5 </a>.", "5"),
        ("<a><a>5</a> <a>", "5"),
        ("<a>5</a> as I said</a>", "5"),
        ("<a></a>", ""),
        ("5</a>", None),
        ("<a>5", None),
        ("</a>5<a>", None),
        ("5", None),
    ],
)
def test_the_last_tag_that_is_closed_holds_the_answer(text, expected):
    assert last_in_tag(text, "a") == expected


def test_tags_that_are_never_closed_take_no_time():
    started = time.process_time()
    assert last_in_tag("<a>" * 1_000_000, "a") is None
    assert last_in_tag("<a>" * 1_000_000 + "5</a>", "a") == "5"
    assert time.process_time() - started < 1


@pytest.mark.parametrize("name", ["countdown", "sudoku", "knights_knaves", "spell_backward", "letter_counting"])
def test_every_kind_of_problem_is_made_again_from_its_row(name):
    task = {"task": name, "size": 4, "seed": 1, "arguments": {}}
    answer = answer_of(task, 3)
    assert score(answer, answer, task, index=3) == 1


def test_problems_without_an_answer_to_show_are_scored_too():
    task = {"task": "graph_color", "size": 2, "seed": 1, "arguments": {}}
    assert answer_of(task, 0) is None
    assert score("{}", "", task, index=0) < 1


def test_another_problem_than_the_one_that_was_asked_is_refused():
    answer_of(SUMS, 1)
    with pytest.raises(ValueError, match="makes another problem of the row"):
        score("5", "no such answer")

"""Rows of reasoning-gym: with the package where it is installed, and what is said where it is not."""

import json
import sys

import pytest

from shardwise.config import DataError
from shardwise.data import check_files, read_rows


@pytest.fixture
def task(tmp_path):
    def write(text):
        (path := tmp_path / "sums.yaml").write_text(text)
        return str(path)

    return write


SUMS = "{task: chain_sum, size: 3, seed: 5, arguments: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}"


def test_without_the_package_it_is_said_how_to_install_it(task, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"names a task of reasoning-gym.*pip install reasoning-gym"):
        check_files([task(SUMS)])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{tusk: chain_sum}", "tusk"),
        ("{task: chain_sum, size: 0}", "size"),
        ("{}", "task"),
        ("[1]", "sums.yaml"),
        ("{", "sums.yaml"),
    ],
)
def test_a_file_that_names_no_task_is_refused(task, text, told):
    with pytest.raises(DataError, match=told):
        check_files([task(text)])


def test_problems_are_rows_and_the_same_ones_every_time(task):
    reasoning_gym = pytest.importorskip("reasoning_gym")
    rows = read_rows([task(SUMS)], max_rows=None)
    arguments = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    problems = list(reasoning_gym.create_dataset("chain_sum", size=3, seed=5, **arguments))
    assert [row.values["prompt"] for row in rows] == [problem["question"] for problem in problems]
    assert [row.values["reward_model"]["ground_truth"] for row in rows] == [problem["answer"] for problem in problems]
    assert [row.values["response"] for row in rows] == [problem["answer"] for problem in problems]
    assert rows[2].values["data_source"] == "reasoning_gym/chain_sum"
    assert rows[2].values["extra_info"]["reasoning_gym"] == {
        "task": "chain_sum",
        "size": 3,
        "seed": 5,
        "arguments": arguments,
        "index": 2,
    }
    assert rows[2].origin.endswith("sums.yaml problem 2")
    assert len(read_rows([task(SUMS)], max_rows=2)) == 2
    json.dumps([row.values for row in rows])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{task: chain_sums}", r"makes no task=chain_sums.*not registered.*reasoning_gym\.factory\.DATASETS"),
        ("{task: chain_sum, arguments: {terms: 2}}", "unexpected keyword argument 'terms'"),
        ("{task: chain_sum, arguments: {min_terms: 9}}", "AssertionError"),
    ],
)
def test_what_the_package_does_not_make_is_refused_in_its_words(task, text, told):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match=told):
        check_files([task(text)])

from fractions import Fraction

import numpy as np
import pytest
import torch

from shardwise.rewards.scores import read_score


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (0.5, 0.5),
        (3, 3.0),
        (True, 1.0),
        (np.float32(0.25), 0.25),
        (np.int64(-2), -2.0),
        (np.bool_(True), 1.0),
        (np.array(0.75), 0.75),
        (torch.tensor(0.125), 0.125),
        (Fraction(1, 4), 0.25),
    ],
)
def test_read_score_takes_every_kind_of_number(returned, score):
    assert read_score(returned) == {"score": score, "parts": {}}
    assert read_score({"score": returned})["score"] == score


def test_read_score_of_a_dict_keeps_the_finite_numbers_as_parts():
    returned = {"score": 1, "acc": True, "format": np.float64(0.5), "pred": "12", "loss": float("nan"), "none": None}
    assert read_score(returned) == {"score": 1.0, "parts": {"acc": 1.0, "format": 0.5}}


def test_half_a_surrogate_pair_in_what_is_returned_reaches_no_file():
    assert read_score({"score": 1, "is\ud800": 2}) == {"score": 1.0, "parts": {"is?": 2.0}}
    assert read_score("\udfff")["failure"].startswith("returned the str ")
    assert read_score({"\ud800": 1})["failure"] == 'returned a dict without "score" (its keys: ?)'


@pytest.mark.parametrize(
    ("returned", "failure"),
    [
        (None, 'returned None, expected a finite number or a dict with a finite "score"'),
        (float("nan"), "returned nan, "),
        (float("-inf"), "returned -inf, "),
        ("1.0", "returned the str '1.0', "),
        ([1.0, 2.0], "returned the list [1.0, 2.0], "),
        ((1.0,), "returned the tuple (1.0,), "),
        (np.zeros((2, 3)), "returned a ndarray of shape (2, 3), "),
        (torch.zeros(1), "returned a Tensor of shape (1,), "),
        (1j, "returned the complex 1j, "),
        (10**400, "returned 1000"),
        ("x" * 10_000_000, "returned the str 'xxx"),
        ({"score": None}, 'returned None as "score", '),
        ({"score": {"score": 1}}, "returned the dict {'score': 1} as \"score\", "),
        ({"reward": 1.0}, 'returned a dict without "score" (its keys: reward)'),
        ({}, 'returned a dict without "score" (its keys: none)'),
    ],
)
def test_f43_read_score_of_anything_else_is_a_failure_that_says_what_came(returned, failure):
    result = read_score(returned)
    assert result.keys() == {"failure"}
    assert result["failure"].startswith(failure)
    assert len(result["failure"]) < 800

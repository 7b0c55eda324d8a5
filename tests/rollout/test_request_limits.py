import math
from dataclasses import replace

import pytest
from transformers import BloomConfig, GPT2Config, Qwen3Config

from shardwise.config import DataError
from shardwise.rollout.request_limits import RequestLimits
from shardwise.types import GenerateRequest

LIMITS = RequestLimits(vocab_size=10, context_tokens=8)
FITS = GenerateRequest(uid="step 1/0/a.jsonl:7", prompt_ids=[0, 9, 4], max_tokens=5, temperature=1.0)


def test_what_fits_to_the_last_token_is_let_through():
    LIMITS.require([FITS, replace(FITS, partial_token_ids=[9, 9], max_tokens=3)])
    replace(LIMITS, context_tokens=None).require([replace(FITS, max_tokens=10**9)])
    edges = {"top_k": 2**31 - 1, "top_p": 1e-9, "min_p": 0.999}
    LIMITS.require([replace(FITS, temperature=temperature, **edges) for temperature in (0, 1e-6, 1, 1e6)])
    LIMITS.require([replace(FITS, num_completions=0)])


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"prompt_ids": []}, "its prompt has no token; give it at least one"),
        ({"prompt_ids": [], "partial_token_ids": [4]}, "its prompt has no token"),
        ({"max_tokens": 0}, "max_tokens=0; a completion has at least 1"),
        ({"prompt_ids": [1, 10]}, "token 1 of its prompt is 10, but .* begins at 0 and ends at 9; use the model's own"),
        ({"prompt_ids": [1, -1, 10]}, "token 1 of its prompt is -1, but"),
        ({"partial_token_ids": [10], "max_tokens": 1}, "token 3 of its prompt is 10, but"),
        ({"max_tokens": 6}, "a prompt of 3 tokens and its max_tokens=6 are 9, more than the 8 of max_position_embeddi"),
        ({"num_completions": -1}, "num_completions=-1; give 0 or more"),
        ({"temperature": -1.0}, r"temperature=-1\.0; give 1e-06 to 1e\+06, or 0 for the likeliest token"),
        ({"temperature": 1e-46}, "temperature=1e-46; give 1e-06 to"),
        ({"temperature": math.inf}, "temperature=inf; give 1e-06 to"),
        ({"temperature": math.nan}, "temperature=nan; give 1e-06 to"),
        ({"top_k": -1}, "top_k=-1; give 1 to 2147483647, or 0 for no limit"),
        ({"top_k": 10**20}, "top_k=100000000000000000000; give 1 to"),
        ({"top_p": 0.0}, r"top_p=0\.0; give more than 0 and at most 1, which is all"),
        ({"top_p": 1.5}, r"top_p=1\.5; give"),
        ({"top_p": math.nan}, "top_p=nan; give"),
        ({"min_p": 1.0}, r"min_p=1\.0; give at least 0, which is all, and less than 1"),
        ({"min_p": -0.1}, r"min_p=-0\.1; give"),
        ({"min_p": math.nan}, "min_p=nan; give"),
        ({"stop": ["a", ""]}, r"stop=\['a', ''\]; every text holds an empty string; leave it out"),
        (
            {"partial_token_ids": [1]},
            "a prompt of 4 tokens and its max_tokens=5 are 9, more than the 8 of max_position_embeddings",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_the_name_of_its_request(fault, reason):
    with pytest.raises(DataError, match=f"^request step 1/0/a.jsonl:7: {reason}"):
        LIMITS.require([FITS, replace(FITS, **fault)])


def test_what_cannot_be_scored_is_refused_by_its_place():
    LIMITS.require_scorable([[0], [9] * 8])
    for fault, reason in (
        ([], "it has no token; give it at least one"),
        ([5, 10], "token 1 of it is 10, but the model's vocabulary begins at 0 and ends at 9"),
        ([-1], "token 0 of it is -1, but"),
        ([1] * 9, "its tokens are 9, more than the 8 of max_position_embeddings in config.json; shorten them"),
    ):
        with pytest.raises(DataError, match=f"^sequence 1 to score: {reason}"):
            LIMITS.require_scorable([[0], fault])


def test_limits_are_those_of_the_config_whatever_a_family_calls_them():
    assert RequestLimits.of(Qwen3Config(vocab_size=7, max_position_embeddings=5)) == RequestLimits(
        vocab_size=7, context_tokens=5
    )
    assert RequestLimits.of(GPT2Config(vocab_size=7, n_positions=5)).context_tokens == 5
    assert RequestLimits.of(BloomConfig(vocab_size=7)).context_tokens is None  # positions are distances

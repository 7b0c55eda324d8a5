from types import SimpleNamespace

import pytest

from shardwise.families import rotary_limit


def longrope(num_tokens):
    return {"rope_type": "longrope", "original_max_position_embeddings": num_tokens}


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (None, None),
        ({"rope_type": "default", "rope_theta": 1e4}, None),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, None),
        (longrope(32), (32, "original_max_position_embeddings")),
        ({"rope_type": "dynamic", "factor": 2.0}, (64, "max_position_embeddings")),
        (
            {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": longrope(16)},
            (16, "original_max_position_embeddings"),
        ),
        ({"full_attention": longrope(32), "sliding_attention": None}, (32, "original_max_position_embeddings")),
    ],
)
def test_the_limit_is_the_lowest_of_all_kinds_of_layers(parameters, expected):
    limit = rotary_limit(SimpleNamespace(rope_parameters=parameters, max_position_embeddings=64))
    assert (limit and (limit.num_tokens, limit.key)) == expected


def test_only_longer_sequences_are_refused():
    limit = rotary_limit(SimpleNamespace(rope_parameters=longrope(32)))
    assert limit.refusal(32) is None
    assert limit.refusal(33) == (
        "a sequence of 33 tokens is longer than the 32 of original_max_position_embeddings in config.json, and with "
        "rope_type longrope the rotary frequencies of longer sequences depend on the longest one of a batch; use "
        "shorter ones"
    )

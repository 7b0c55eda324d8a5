from types import SimpleNamespace

import pytest

from shardwise.families import context_of, rotary_limit


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


@pytest.mark.parametrize(
    ("given", "parameters", "expected"),
    [
        (64, None, (64, "max_position_embeddings")),
        (None, None, (None, "max_position_embeddings")),
        (64, {"rope_type": "linear", "factor": 2.0}, (64, "max_position_embeddings")),
        (32, 4.0, (128, "original_max_position_embeddings x factor")),  # as Qwen's model cards say to add it
        (160, 4.0, (160, "max_position_embeddings")),
        (128, 4.0, (128, "max_position_embeddings")),
        (None, 4.0, (None, "max_position_embeddings")),
        (32, {"rope_type": "yarn", "factor": 4.0}, (32, "max_position_embeddings")),
    ],
)
def test_the_context_is_what_the_config_or_its_yarn_was_made_for(given, parameters, expected):
    if isinstance(parameters, float):
        parameters = {"rope_type": "yarn", "factor": parameters, "original_max_position_embeddings": 32}
    assert context_of(SimpleNamespace(max_position_embeddings=given, rope_parameters=parameters)) == expected


def test_only_longer_sequences_are_refused():
    limit = rotary_limit(SimpleNamespace(rope_parameters=longrope(32)))
    assert limit.refusal(32) is None
    assert limit.refusal(33) == (
        "a sequence of 33 tokens is longer than the 32 of original_max_position_embeddings in config.json, and with "
        "rope_type longrope the rotary frequencies of longer sequences depend on the longest one of a batch; use "
        "shorter ones"
    )

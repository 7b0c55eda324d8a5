"""Which rows are at work: a place that becomes free is taken at once, whatever the size of the groups."""

import math

import pytest
import torch

from shardwise.config import ConfigError
from shardwise.rollout import EmbeddedEngine, decoding
from shardwise.rollout.kv_cache import CacheSize
from shardwise.types import GenerateRequest

STOPS = list(range(3, 13))
"""About one token in thirteen ends a completion, so lengths are ragged."""


def counted(engine):
    """[B, L] of every forward pass."""
    shapes, forward = [], engine._cached.hidden_states

    def note(input_ids, *arguments):
        shapes.append(tuple(input_ids.shape))
        return forward(input_ids, *arguments)

    engine._cached.hidden_states = note
    return shapes


@pytest.mark.parametrize(
    ("group_size", "num_groups", "max_rows"),
    [(1, 40, 8), (8, 6, 12), (8, 6, 16), (16, 4, 16), (16, 3, 24), (24, 2, 8)],
    ids=[
        "single",
        "rows of half a group",
        "two groups",
        "as many as a group",
        "one and a half",
        "larger than all rows",
    ],
)
def test_a_finished_rows_place_is_taken_at_once_and_a_prompt_read_once(model_folders, group_size, num_groups, max_rows):
    """As many steps as the tokens need, and at most one completion longer: while anything waits no row is idle."""
    engine = EmbeddedEngine.from_folder(
        model_folders["qwen3"],
        dtype=torch.float32,
        max_rows=max_rows,
        device=torch.device("cpu"),
        stop_token_ids=STOPS,
    )
    wanted = [
        GenerateRequest(
            uid=f"{n}",
            prompt_ids=list(range(20, 24 + n % 3)),
            num_completions=group_size,
            max_tokens=30,
            temperature=1.0,
        )
        for n in range(num_groups)
    ]
    shapes = counted(engine)
    lengths = [len(completion.token_ids) for group in engine.generate(wanted) for completion in group]
    assert len(set(lengths)) > 5
    decoded = [rows for rows, width in shapes if width == 1]
    sampled_by_steps = sum(lengths) - len(lengths)  # the first token comes with the prompt
    assert sum(decoded) == sampled_by_steps
    assert len(decoded) <= math.ceil(sampled_by_steps / max_rows) + max(lengths)
    idle = next((step for step, rows in enumerate(decoded) if rows < max_rows), len(decoded))
    assert len(decoded) - idle <= max(lengths), "rows were idle while completions waited"
    assert sum(rows for rows, width in shapes if width > 1) == num_groups


TOKEN_BYTES = 2 * 2 * 2 * 8 * 4
"""Keys and values, in 2 layers, of 2 heads, of dim 8, in float32."""


@pytest.mark.parametrize("spare_bytes", [-1, 0])
def test_a_cache_that_does_not_fit_is_refused_with_both_numbers_and_one_that_just_fits_is_not(
    model_folders, monkeypatch, spare_bytes
):
    """16 completions of 2 prompts in 16 rows, and 2 more for prompts, of 4 + 30 tokens."""
    engine = EmbeddedEngine.from_folder(
        model_folders["qwen3"], dtype=torch.float32, max_rows=16, device=torch.device("cpu")
    )
    wanted = [
        GenerateRequest(uid=f"{n}", prompt_ids=[4, 5, 6, 7], num_completions=8, max_tokens=30, temperature=1.0)
        for n in range(2)
    ]
    expected = engine.generate(wanted)
    scale = 2**20  # as if the model were so much larger: numbers that show
    monkeypatch.setattr(engine._cached, "cache_size", CacheSize(token_bytes=TOKEN_BYTES * scale, carried_bytes=0))
    needed = 18 * 34 * TOKEN_BYTES * scale
    monkeypatch.setattr(decoding, "free_bytes", lambda device: needed + spare_bytes)
    if spare_bytes == 0:
        assert engine.generate(wanted) == expected
        return
    with pytest.raises(ConfigError) as error:
        engine.generate(wanted)
    assert str(error.value) == (
        "rollout.max_concurrent_sequences: keys and values of 16 sequences at a time and 2 prompts that wait, 34 "
        f"tokens each, take {needed / 2**30:.2f} GiB, and cpu has {needed / 2**30:.2f} GiB free; set "
        "rollout.max_concurrent_sequences to 15 or less, or lower data.max_prompt_tokens or "
        "rollout.max_response_tokens"
    )


def test_the_size_of_a_cache_is_that_of_the_formula(model_folders, monkeypatch):
    """Of what a call really allocates, per token of a row."""
    engine = EmbeddedEngine.from_folder(
        model_folders["qwen3"], dtype=torch.float32, max_rows=16, device=torch.device("cpu")
    )
    assert engine._cached.cache_size == CacheSize(token_bytes=TOKEN_BYTES, carried_bytes=0)
    caches, cache = [], decoding.KVCache
    monkeypatch.setattr(decoding, "KVCache", lambda **options: caches.append(cache(**options)) or caches[-1])
    engine.generate([GenerateRequest(uid="a", prompt_ids=[4] * 7, num_completions=9, max_tokens=5, temperature=1.0)])
    stored = [tensor for pair in caches[0]._layers.values() for tensor in pair]
    assert sum(tensor.nbytes for tensor in stored) == (9 + 1) * engine._cached.cache_size.row_bytes(12)

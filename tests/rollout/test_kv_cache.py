"""The cache alone, against attention over the whole sequence written out with loops."""

import math

import pytest
import torch
from stand_in_kernels import varlen_over_caches, varlen_over_packs
from torch import nn

from shardwise.config import ModelError
from shardwise.ops import VARLEN_READS_CACHES, attend, attention, varlen
from shardwise.rollout import kv_cache
from shardwise.rollout.decode_kernels import DecodeKernels
from shardwise.rollout.kv_cache import CacheSize, KVCache, _cached_attention

HEADS, KV_HEADS, DIM = 4, 2, 3
OPTIONS = {"scaling": 0.7, "softcap": None, "window": None, "chunk": None}
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def attention_by_hand(query, keys, values, *, window, softcap, chunk=None, sinks=None):
    """query [H, d] of the last position, keys and values [L, K, d] -> [H, d], in Python loops."""
    length = len(keys)
    first = 0 if window is None else max(0, length - window)
    if chunk is not None:
        first = max(first, (length - 1) // chunk * chunk)
    out = torch.zeros(HEADS, DIM)
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        scores = [float(query[head] @ keys[place, kv]) * 0.7 for place in range(first, length)]
        if softcap is not None:
            scores = [softcap * math.tanh(score / softcap) for score in scores]
        total = sum(math.exp(score) for score in scores) + (0 if sinks is None else math.exp(sinks[head]))
        for place, score in zip(range(first, length), scores, strict=True):
            out[head] += math.exp(score) / total * values[place, kv]
    return out


class Sequence:
    """What one sequence has fed so far, kept outside the cache."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.query = torch.randn(20, HEADS, DIM, generator=generator)
        self.key = torch.randn(20, KV_HEADS, DIM, generator=generator)
        self.value = torch.randn(20, KV_HEADS, DIM, generator=generator)
        self.length = length

    def expected(self, position: int, **options):
        seen = slice(0, position + 1)
        return attention_by_hand(self.query[position], self.key[seen], self.value[seen], **options)


NUM_ROWS = 4


@pytest.fixture
def memory_begins_as_nan(monkeypatch):
    """As memory may that others have used."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **b: empty(*a, **b).fill_(torch.nan))


def prefill(cache, sequences, rows_of, first_row, options, blocks=None):
    """Right-padded with numbers that would show if anything looked at them. Into the rows behind the active ones; from
    there each goes to its rows, `first_row` and those after it."""
    width = max(s.length for s in sequences)
    padded = [
        torch.stack(
            [
                torch.cat([getattr(s, name)[: s.length], torch.full((width - s.length, n, DIM), 1e3)]).transpose(0, 1)
                for s in sequences
            ]
        )
        for name, n in (("query", HEADS), ("key", KV_HEADS), ("value", KV_HEADS))
    ]
    lengths = [sequence.length for sequence in sequences]
    cache.begin_prefill(torch.arange(NUM_ROWS, NUM_ROWS + len(sequences)), lengths, blocks)
    out = cache.attend(0, *padded, **options)
    for row, prompt in enumerate(rows_of, start=first_row):
        cache.copy_prompt(NUM_ROWS + prompt, slice(row, row + 1), sequences[prompt].length)
    return out


def decode(cache, rows, options):
    """Feeds the next token of each (sequence, own length) row; returns [B, H, d]."""
    positions = torch.tensor([length for _, length in rows])
    parts = [torch.stack([getattr(s, n)[at] for s, at in rows])[:, :, None] for n in ("query", "key", "value")]
    cache.begin_decode(positions, span=int(positions.max()) + 1)
    return cache.attend(0, *parts, **options)[:, :, 0]


def stand_in_kernels(monkeypatch):
    """In place of torch's. Returns what they were called with, by what they read."""
    calls = {"packs": [], "caches": []}

    def kernel(*tensors, **options):
        reads, stand_in = ("caches", varlen_over_caches) if "seqused_k" in options else ("packs", varlen_over_packs)
        calls[reads].append(tensors)
        return stand_in(*tensors, **options)

    monkeypatch.setattr(kv_cache, "varlen_problem", lambda *_arguments: None)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    return calls


@pytest.mark.parametrize("is_varlen", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_tokens_of_a_block_see_each_other_while_a_prompt_is_read_and_never_after(
    monkeypatch, window, softcap, is_varlen
):
    """Of padded prompts with blocks and without; also where a kernel would compute a window. A token that is decoded
    sees what is before it, later prompts may have no blocks, and in some layers none see each other."""
    if is_varlen:
        stand_in_kernels(monkeypatch)
    options = {"scaling": 0.7, "chunk": None, "window": window, "softcap": softcap}
    causal = options | {"in_blocks": False}
    sequences = [Sequence(length, seed) for seed, length in enumerate((9, 5, 7))]
    blocks = torch.full((3, 9), -1)
    blocks[0, 1:3], blocks[0, 3:7], blocks[2, 6] = 0, 1, 0
    ends = [[0, 2, 2, 6, 6, 6, 6, 7, 8], [*range(5)], [*range(7)]]
    cache = KVCache(num_rows=NUM_ROWS + 3, capacity_tokens=20, device=torch.device("cpu"))
    seen = {"window": window, "softcap": softcap}
    before = [[*range(length)] for length in (9, 5, 7)]
    for own_blocks, own_ends, own in ((blocks, ends, options), (None, before, options), (blocks, before, causal)):
        out = prefill(cache, sequences, [0, 1, 2], 0, own, own_blocks)
        for row, sequence in enumerate(sequences):
            for place, end in enumerate(own_ends[row]):
                first = 0 if window is None else max(0, place + 1 - window)
                keys, values = sequence.key[first : end + 1], sequence.value[first : end + 1]
                expected = attention_by_hand(sequence.query[place], keys, values, window=None, softcap=softcap)
                torch.testing.assert_close(out[row, :, place], expected, rtol=0, atol=1e-5)
        found = decode(cache, [(sequence, sequence.length) for sequence in sequences], options)
        expected = torch.stack([sequence.expected(sequence.length, **seen) for sequence in sequences])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("memory_begins_as_nan")
@pytest.mark.parametrize("kernels", ["torch", "own", "varlen"])
@pytest.mark.parametrize(
    ("softcap", "sinks"), [(None, None), (1.5, None), (None, SINKS)], ids=["-", "softcap", "sinks"]
)
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (3, None), (None, 4)])
def test_decoding_from_the_cache_equals_attention_over_everything_seen(
    monkeypatch, window, chunk, softcap, sinks, kernels
):
    """Unequal prompts, one of them in two rows, later admissions and a removed row."""
    calls = stand_in_kernels(monkeypatch) if kernels == "varlen" else {"caches": []}
    seen = {"softcap": softcap, "window": window, "chunk": chunk, "sinks": sinks}
    options = {"scaling": 0.7, **seen}
    own = DecodeKernels() if kernels == "own" else None
    cache = KVCache(num_rows=NUM_ROWS + 2, capacity_tokens=16, device=torch.device("cpu"), kernels=own)
    a, b, late = Sequence(5, 0), Sequence(2, 1), Sequence(4, 2)

    out = prefill(cache, [a, b], [0, 0, 1], 0, options)
    for prompt, sequence in enumerate((a, b)):
        for position in range(sequence.length):
            torch.testing.assert_close(out[prompt, :, position], sequence.expected(position, **seen))

    rows = [(a, 5), (a, 5), (b, 2)]
    for _ in range(3):
        found = decode(cache, rows, options)
        for row, (sequence, position) in enumerate(rows):
            torch.testing.assert_close(found[row], sequence.expected(position, **seen))
        rows = [(sequence, position + 1) for sequence, position in rows]

    # Row 0 ends; the last row takes its place, and a new prompt the free one.
    cache.move_rows(torch.tensor([2]), torch.tensor([0]))
    rows = [rows[2], rows[1]]
    prefill(cache, [late], [0], 2, options)
    rows.append((late, 4))
    for _ in range(3):
        found = decode(cache, rows, options)
        for row, (sequence, position) in enumerate(rows):
            torch.testing.assert_close(found[row], sequence.expected(position, **seen))
        rows = [(sequence, position + 1) for sequence, position in rows]
    assert bool(calls["caches"]) == (VARLEN_READS_CACHES and kernels == "varlen" and softcap is None and chunk is None)


@pytest.mark.parametrize("length", [1, 4, 5, 12])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["-", "sinks"])
def test_prompts_longer_than_the_window_or_with_sinks_are_read_as_a_pack_and_without_a_mask(
    monkeypatch, sinks, window, length
):
    """A mask leaves torch the kernel that holds every score at once, and sinks leave none."""
    calls = stand_in_kernels(monkeypatch)
    masks = []
    dense = attention.F.scaled_dot_product_attention
    monkeypatch.setattr(
        attention.F,
        "scaled_dot_product_attention",
        lambda *tensors, attn_mask, **options: (
            masks.append(attn_mask) or dense(*tensors, attn_mask=attn_mask, **options)
        ),
    )
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randn(3, length, heads, DIM, generator=generator).transpose(1, 2) for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    cache = KVCache(num_rows=3, capacity_tokens=16, device=torch.device("cpu"))
    cache.begin_prefill(torch.arange(3), [length] * 3)
    found = cache.attend(0, *prompts, **OPTIONS | {"window": window, "sinks": sinks})
    assert all(mask is None for mask in masks)
    assert len(calls["packs"]) == (sinks is not None or (window is not None and length > window))
    expected = attend(*prompts, scaling=0.7, causal=True, window=window, sinks=sinks)
    torch.testing.assert_close(found, expected)
    assert found.transpose(1, 2).shape == (3, length, HEADS, DIM)


def test_a_cache_takes_the_bytes_of_its_layers():
    """Two layers with values of another head dim, in float32."""
    cache = KVCache(num_rows=3, capacity_tokens=8, device=torch.device("cpu"))
    assert cache.size == CacheSize(token_bytes=0, carried_bytes=0)
    cache.begin_prefill(torch.tensor([0]), [2])
    for layer, value_dim in enumerate((3, 5)):
        query, key = torch.ones(1, HEADS, 2, DIM), torch.ones(1, KV_HEADS, 2, DIM)
        cache.attend(layer, query, key, torch.ones(1, KV_HEADS, 2, value_dim), **OPTIONS)
    assert cache.size == CacheSize(token_bytes=4 * KV_HEADS * ((DIM + 3) + (DIM + 5)), carried_bytes=0)
    assert CacheSize(token_bytes=112, carried_bytes=10).row_bytes(8) == 8 * 112 + 10


def test_layers_do_not_share_keys():
    cache = KVCache(num_rows=1, capacity_tokens=8, device=torch.device("cpu"))
    first, second = Sequence(3, 0), Sequence(3, 1)
    cache.begin_prefill(torch.tensor([0]), [3])
    for layer, sequence in enumerate((first, second)):
        cache.attend(
            layer, *(x[None, :3].transpose(1, 2) for x in (sequence.query, sequence.key, sequence.value)), **OPTIONS
        )
    cache.begin_decode(torch.tensor([3]), span=4)
    for layer, sequence in enumerate((first, second)):
        parts = (x[None, 3][:, :, None] for x in (sequence.query, sequence.key, sequence.value))
        torch.testing.assert_close(
            cache.attend(layer, *parts, **OPTIONS)[0, :, 0], sequence.expected(3, window=None, softcap=None)
        )


def test_cache_tells_the_layers_of_the_forward_pass_that_began_last():
    cache = KVCache(num_rows=1, capacity_tokens=8, device=torch.device("cpu"))
    sequence = Sequence(3, 0)
    assert cache.layers_seen == []
    cache.begin_prefill(torch.tensor([0]), [3])
    prompt = [x[None, :3].transpose(1, 2) for x in (sequence.query, sequence.key, sequence.value)]
    for layer in (0, 1, 1):
        cache.attend(layer, *prompt, **OPTIONS)
    assert cache.layers_seen == [0, 1, 1]
    cache.begin_decode(torch.tensor([3]), span=4)
    assert cache.layers_seen == []
    cache.attend(1, *(x[None, 3][:, :, None] for x in (sequence.query, sequence.key, sequence.value)), **OPTIONS)
    assert cache.layers_seen == [1]


@pytest.mark.parametrize(
    ("has_cache", "mask", "message"),
    [
        (True, torch.zeros(1, 1), "Linear is not supported: it brings an attention mask of its own"),
        (False, None, "Linear is not supported: it does not pass keyword arguments on to its attention"),
    ],
    ids=["mask", "no-cache"],
)
def test_what_the_cache_would_ignore_is_refused(has_cache, mask, message):
    cache = KVCache(num_rows=1, capacity_tokens=8, device=torch.device("cpu")) if has_cache else None
    with pytest.raises(ModelError, match=message):
        _cached_attention(nn.Linear(1, 1), *(torch.zeros(1, 1, 1, 1),) * 3, mask, kv_cache=cache)

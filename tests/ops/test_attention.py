import math

import pytest
import torch
from stand_in_kernels import varlen_over_caches, varlen_over_packs

from shardwise.ops import PackedLayout, attend, attention, packed_attention

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 6, 5
LENGTHS = [3, 3, 3, 1, 8, 5, 5]
SETTINGS = {
    "plain": {},
    "scaled": {"scaling": 0.2},
    "window-1": {"window": 1},
    "window-3": {"window": 3},
    "window-beyond-every-sequence": {"window": 8},
    "softcap": {"softcap": 0.8},
    "softcap-window": {"softcap": 0.8, "window": 3, "scaling": 0.7},
}


def qkv(num_tokens, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, num_tokens, DIM), (KV_HEADS, num_tokens, DIM), (KV_HEADS, num_tokens, VALUE_DIM)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def loop(query, key, value, lengths, *, scaling=None, window=None, softcap=None, blocks=()):
    """Token by token and head by head: a query sees its own sequence up to itself, or to the end of its block, from the
    last `window` keys on. `blocks` are ranges of the pack."""
    out = []
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        rows = []
        for start, length in zip(starts, lengths, strict=True):
            for position in range(length):
                first = 0 if window is None else max(0, position - window + 1)
                last = next((block.stop for block in blocks if start + position in block), start + position + 1)
                seen = slice(start + first, last)
                scores = key[kv_head, seen] @ query[head, start + position]
                scores = scores * (1 / math.sqrt(DIM) if scaling is None else scaling)
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp() / scores.exp().sum()
                rows.append(weights @ value[kv_head, seen])
        out.append(torch.stack(rows))
    return torch.stack(out)


def layout_of(lengths, blocks=()):
    block_of = torch.full((sum(lengths),), -1)
    for number, block in enumerate(blocks):
        block_of[block.start : block.stop] = number
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedLayout.from_cu_seqlens(cu_seqlens, device=CPU, blocks=block_of if blocks else None)


def test_layout_groups_neighbours_of_equal_length():
    layout = layout_of([3, 3, 2, 3])
    assert layout.runs == ((2, 3), (1, 2), (1, 3))
    assert layout.max_length == 3
    assert layout.cu_seqlens.tolist() == [0, 3, 6, 8, 11]
    assert layout.cu_seqlens.dtype == torch.int32


def test_chunks_of_a_layout_end_where_their_sequence_ends():
    layout = layout_of([5, 2, 4])
    chunked = layout.chunked(2)
    assert chunked.cu_seqlens.tolist() == [0, 2, 4, 5, 7, 9, 11]
    assert (chunked.runs, chunked.max_length, chunked.num_tokens) == (((2, 2), (1, 1), (3, 2)), 2, 11)
    assert layout.chunked(5) is layout


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("lengths", [LENGTHS, [6], [1]], ids=["mixed", "one-sequence", "one-token"])
def test_packed_attention_and_its_gradients_equal_a_loop_over_tokens(lengths, settings):
    num_tokens = sum(lengths)
    ours, theirs = qkv(num_tokens), qkv(num_tokens)
    # Softcapped scores pass through float32, as in transformers.
    bound = 2e-6 if "softcap" in settings else 1e-12
    out = packed_attention(*ours, layout_of(lengths), **{"scaling": None} | settings)
    expected = loop(*theirs, lengths, **settings)
    assert out.shape == (HEADS, num_tokens, VALUE_DIM)
    torch.testing.assert_close(out, expected, rtol=0, atol=bound)
    weights = torch.randn(out.shape, dtype=torch.float64)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=10 * bound)


BLOCKS = [range(4, 6), range(6, 8), range(10, 11), range(12, 17), range(18, 20)]
"""Of the pack of LENGTHS: two beside each other in two sequences, one of one token, one longer than a window, and one
that begins its sequence. Of those of 3 tokens the first has none, of those of 5 the last."""


def test_sequences_with_and_without_blocks_are_in_different_runs():
    layout = layout_of(LENGTHS, BLOCKS)
    assert layout.runs == ((1, 3), (2, 3), (1, 1), (1, 8), (1, 5), (1, 5))
    assert [None if own is None else own.tolist() for own in layout.blocks] == [
        None,
        [[-1, 0, 0], [1, 1, -1]],
        None,
        [[2, -1, 3, 3, 3, 3, 3, -1]],
        [[4, 4, -1, -1, -1]],
        None,
    ]
    assert layout_of(LENGTHS).blocks is None


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_tokens_of_a_block_see_each_other_both_ways(settings):
    """And so do its gradients."""
    ours, theirs = qkv(sum(LENGTHS)), qkv(sum(LENGTHS))
    bound = 2e-6 if "softcap" in settings else 1e-12
    out = packed_attention(*ours, layout_of(LENGTHS, BLOCKS), **{"scaling": None} | settings)
    expected = loop(*theirs, LENGTHS, **settings, blocks=BLOCKS)
    torch.testing.assert_close(out, expected, rtol=0, atol=bound)
    assert (expected - loop(*theirs, LENGTHS, **settings)).abs().max() > 1e-2
    weights = torch.randn(out.shape, dtype=torch.float64)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=10 * bound)


@pytest.mark.parametrize("softcap", [None, 0.8])
def test_mask_says_who_is_seen(softcap):
    """One query against a cache with holes, as decoding calls it: attention over the seen keys alone."""
    query, key, value = qkv(6)
    batch = [query[None, :, -1:], key[None], value[None]]
    seen = torch.tensor([True, False, True, True, False, True])
    out = attend(*batch, scaling=None, softcap=softcap, mask=seen[None, None, None])
    expected = attend(batch[0], batch[1][:, :, seen], batch[2][:, :, seen], scaling=None, softcap=softcap)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6 if softcap else 1e-12)
    everything = attend(*batch, scaling=None, softcap=softcap)
    assert (out - everything).abs().max() > 1e-2


def test_rows_of_a_batch_are_independent():
    query, key, value = (x.detach().unflatten(1, (2, 4)).transpose(0, 1) for x in qkv(8))
    out = attend(query, key, value, scaling=None, causal=True)
    for row in range(2):
        alone = attend(query[[row]], key[[row]], value[[row]], scaling=None, causal=True)
        torch.testing.assert_close(out[[row]], alone, rtol=0, atol=1e-12)


def test_bfloat16_stays_near_float64():
    exact = loop(*[x.bfloat16().double() for x in qkv(sum(LENGTHS))], LENGTHS)
    for settings in ({}, {"softcap": 50.0}):
        out = packed_attention(*qkv(sum(LENGTHS), torch.bfloat16), layout_of(LENGTHS), scaling=None, **settings)
        assert out.dtype == torch.bfloat16
        assert (out.double() - exact).abs().max() < 0.03


def test_a_layout_of_one_length_is_that_of_its_sequences():
    found, expected = PackedLayout.of_one_length(3, 5, device=CPU), layout_of([5, 5, 5])
    assert (found.runs, found.max_length, found.num_tokens) == (expected.runs, expected.max_length, 15)
    assert torch.equal(found.cu_seqlens, expected.cu_seqlens)
    assert found.cu_seqlens.dtype == expected.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_flash_call_of_a_decode_step_reads_the_tokens_of_each_row(monkeypatch, window, kv_heads):
    torch.manual_seed(0)
    query = torch.randn(3, 4, 1, 6, dtype=torch.float64)
    keys, values = (torch.randn(3, 9, kv_heads, 6, dtype=torch.float64).transpose(1, 2) for _ in range(2))
    lengths = torch.tensor([1, 9, 4], dtype=torch.int32)
    monkeypatch.setattr(attention, "varlen_attn", varlen_over_caches)
    found = attention.varlen_decode_attention(query, keys, values, lengths, longest=9, scaling=0.3, window=window)
    places = torch.arange(9)
    mask = (places < lengths[:, None]) & (places >= lengths[:, None] - (window or 9))
    expected = attend(query, keys, values, scaling=0.3, mask=mask[:, None, None])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("groups_queries", [True, False], ids=["torch 2.12 and newer", "torch 2.11"])
@pytest.mark.parametrize("window", [None, 3])
def test_flash_call_is_the_loop_over_sequences(monkeypatch, groups_queries, window):
    torch.manual_seed(0)
    query, key, value = (torch.randn(heads, 11, 4, dtype=torch.float64) for heads in (4, 2, 2))
    cu_seqlens = torch.tensor([0, 6, 10, 11], dtype=torch.int32)
    layout = PackedLayout.from_cu_seqlens(cu_seqlens, device=torch.device("cpu"))
    expected = packed_attention(query, key, value, layout, scaling=0.3, window=window)
    monkeypatch.setattr(attention, "varlen_attn", varlen_over_packs)
    monkeypatch.setattr(attention, "VARLEN_GROUPS_QUERIES", groups_queries)
    found = attention.varlen_attention(query, key, value, layout, scaling=0.3, window=window, softcap=None)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)

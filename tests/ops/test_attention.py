from types import SimpleNamespace

import pytest
import torch
from packs_by_hand import CPU, HEADS, IN_FLOAT32, LENGTHS, SETTINGS, SINKS, VALUE_DIM, layout_of, loop, qkv

from shardwise.ops import PackedLayout, attend, attention, packed_attention


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
    bound = 2e-6 if settings.keys() & IN_FLOAT32 else 1e-12
    out = packed_attention(*ours, layout_of(lengths), **{"scaling": None} | settings)
    expected = loop(*theirs, lengths, **settings)
    assert out.shape == (HEADS, num_tokens, VALUE_DIM)
    torch.testing.assert_close(out, expected, rtol=0, atol=bound)
    weights = torch.randn(out.shape, dtype=torch.float64)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=10 * bound)


@pytest.mark.parametrize("settings", [{}, {"softcap": 0.8}, {"sinks": SINKS}], ids=str)
@pytest.mark.parametrize("window", [1, 32, 33, 130])
def test_sequences_longer_than_their_window_see_what_a_mask_shows_them(window, settings):
    """Two rows of one length, which ends inside a block of queries and is longer than two windows."""
    length = 2 * max(window, 32) + 37
    assert length % attention._window_block(window)
    ours, masked = (
        [x.detach().unflatten(1, (2, length)).transpose(0, 1).requires_grad_() for x in qkv(2 * length)]
        for _ in range(2)
    )
    out = attend(*ours, scaling=0.7, causal=True, window=window, **settings)
    place = torch.arange(length)
    seen = (place <= place[:, None]) & (place > place[:, None] - window)
    expected = attend(*masked, scaling=0.7, mask=seen, **settings)
    bound = 2e-6 if settings else 1e-12
    torch.testing.assert_close(out, expected, rtol=0, atol=bound)
    weights = torch.randn(out.shape, dtype=torch.float64)
    for result in (out, expected):
        (result * weights).sum().backward()
    for x, y in zip(ours, masked, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=100 * bound)


@pytest.mark.parametrize("settings", [{"softcap": 0.8}, {"sinks": SINKS}, {"softcap": 0.8, "sinks": SINKS}], ids=str)
def test_long_sequences_with_scores_of_their_own_see_what_a_mask_shows_them(settings):
    """Two rows of one length, which ends inside a block of queries."""
    length = 700
    ours, masked = (
        [x.detach().unflatten(1, (2, length)).transpose(0, 1).requires_grad_() for x in qkv(2 * length)]
        for _ in range(2)
    )
    out = attend(*ours, scaling=0.7, causal=True, **settings)
    expected = attend(*masked, scaling=0.7, mask=torch.ones(length, length, dtype=torch.bool).tril(), **settings)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
    weights = torch.randn(out.shape, dtype=torch.float64)
    for result in (out, expected):
        (result * weights).sum().backward()
    for x, y in zip(ours, masked, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=2e-4)


@pytest.mark.parametrize("settings", [{"softcap": 50.0}, {"sinks": SINKS}], ids=str)
def test_autograd_keeps_no_scores_of_long_sequences(settings):
    """What it keeps are the inputs, a view of them for each block, and sinks."""
    query, key, value = (x.detach()[None].requires_grad_() for x in qkv(2048, torch.float32))
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        attend(query, key, value, scaling=None, causal=True, **settings)
    assert max(sizes, default=0) <= query.numel()


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "dims", "mask", "is_grouping"),
    [
        (False, torch.float32, (512, 300), torch.ones(1), True),
        (True, torch.bfloat16, (64, 64), None, True),
        (True, torch.float32, (64, 64), None, False),
        (True, torch.bfloat16, (512, 512), None, False),
        (True, torch.bfloat16, (192, 128), None, False),
        (True, torch.bfloat16, (64, 64), torch.ones(1), False),
    ],
)
def test_queries_stay_grouped_where_a_kernel_of_torch_groups_them(is_cuda, dtype, dims, mask, is_grouping):
    query, value = (SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(1, 4, 8, dim)) for dim in dims)
    assert attention._is_kernel_grouping(query, value, mask) == is_grouping


def test_scores_of_a_long_sequence_in_a_window_are_not_all_in_memory(monkeypatch):
    sizes = []
    dense = attention.F.scaled_dot_product_attention

    def counting(query, key, value, *, attn_mask, **options):
        sizes.append((query.shape[-2] * key.shape[-2] * len(query), attn_mask.numel()))
        return dense(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", counting)
    query, key, value = qkv(4096, torch.float32)
    attend(query[None], key[None], value[None], scaling=None, causal=True, window=128)
    assert sizes == [(4096 * 160, 4096 * 160)]


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
    bound = 2e-6 if settings.keys() & IN_FLOAT32 else 1e-12
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

import pytest
import torch
from packs_by_hand import SINKS, layout_of, loop, qkv
from stand_in_kernels import flash_backward_over_packs, varlen_over_caches, varlen_over_packs

from shardwise.ops import attend, packed_attention, varlen


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_flash_call_of_a_decode_step_reads_the_tokens_of_each_row(monkeypatch, window, kv_heads, sinks):
    torch.manual_seed(0)
    query = torch.randn(3, 4, 1, 6, dtype=torch.float64)
    keys, values = (torch.randn(3, 9, kv_heads, 6, dtype=torch.float64).transpose(1, 2) for _ in range(2))
    lengths = torch.tensor([1, 9, 4], dtype=torch.int32)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_over_caches)
    settings = {"scaling": 0.3, "sinks": sinks}
    found = varlen.varlen_decode_attention(query, keys, values, lengths, longest=9, window=window, **settings)
    places = torch.arange(9)
    mask = (places < lengths[:, None]) & (places >= lengths[:, None] - (window or 9))
    expected = attend(query, keys, values, mask=mask[:, None, None], **settings)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 if sinks is None else 2e-6)


@pytest.mark.parametrize("groups_queries", [True, False], ids=["torch 2.12 and newer", "torch 2.11"])
@pytest.mark.parametrize("window", [None, 3])
def test_flash_call_is_the_loop_over_sequences(monkeypatch, groups_queries, window):
    ours = [x.detach().requires_grad_() for x in qkv(11)[:2]]
    ours.append(torch.randn_like(ours[1]).requires_grad_())
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    lengths = [6, 4, 1]
    expected = loop(*theirs, lengths, scaling=0.3, window=window)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_over_packs)
    monkeypatch.setattr(varlen, "VARLEN_GROUPS_QUERIES", groups_queries)
    settings = {"scaling": 0.3, "window": window, "softcap": None}
    found = varlen.varlen_attention(*ours, layout_of(lengths), **settings, sinks=None)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_values_of_a_smaller_head_dim_are_padded_for_the_kernel(monkeypatch):
    ours, theirs = qkv(11), qkv(11)
    assert ours[2].shape[-1] < ours[0].shape[-1]
    monkeypatch.setattr(varlen, "varlen_attn", varlen_over_packs)
    found = packed_attention(*ours, layout_of([6, 4, 1]), scaling=0.3, kernel=varlen.varlen_attention)
    expected = loop(*theirs, [6, 4, 1], scaling=0.3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn(found.shape, dtype=torch.float64)
    for result in (found, expected):
        (result * weights).sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("groups_queries", [True, False], ids=["torch 2.12 and newer", "torch 2.11"])
@pytest.mark.parametrize("window", [None, 3])
def test_flash_call_with_sinks_has_the_gradients_of_the_softmax_that_holds_them(monkeypatch, groups_queries, window):
    """From FlashAttention's backward pass, which knows of no sinks."""
    ours = [x.detach().requires_grad_() for x in qkv(11)[:2]]
    ours += [torch.randn_like(ours[1]).requires_grad_(), SINKS.double().requires_grad_()]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    lengths = [6, 4, 1]
    expected = loop(*theirs[:3], lengths, scaling=0.3, window=window, sinks=theirs[3])
    monkeypatch.setattr(varlen, "varlen_attn", varlen_over_packs)
    monkeypatch.setattr(varlen, "flash_attention_backward", flash_backward_over_packs)
    monkeypatch.setattr(varlen, "VARLEN_GROUPS_QUERIES", groups_queries)
    settings = {"scaling": 0.3, "window": window, "softcap": None}
    found = varlen.varlen_attention(*ours[:3], layout_of(lengths), **settings, sinks=ours[3])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn(found.shape, dtype=torch.float64)
    for result in (found, expected):
        (result * weights).sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=2e-6)  # the sinks' in float32
        assert y.grad.abs().max() > 1e-3

"""torch's variable-length FlashAttention over packs and caches: half precision on CUDA.

Shapes: B rows, H query heads, K key/value heads (K divides H), T packed tokens, C tokens of a cache's row, d head dim.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from shardwise.ops.attention import PackedLayout

VARLEN_GROUPS_QUERIES = "enable_gqa" in signature(varlen_attn).parameters
"""Whether torch's kernel groups queries (from torch 2.12 on); if not, keys and values are repeated for it."""
VARLEN_READS_CACHES = "seqused_k" in signature(varlen_attn).parameters
"""Whether torch's kernel takes how many keys of each row are in use, as reading a cache needs."""

flash_attention_backward = torch.ops.aten._flash_attention_backward


def varlen_problem(query: Tensor, value_dim: int) -> str | None:
    """Names what keeps the variable-length FlashAttention from computing such tensors; None: nothing does.

    Args:
        query: its device, dtype and head dim are looked at.
        value_dim: the head dim of the values that the kernel is given.
    """
    problems = {
        "tensors on the CPU": not query.is_cuda,
        "tensors on a GPU older than Ampere": query.is_cuda and torch.cuda.get_device_capability() < (8, 0),
        "float32 (set engine.param_dtype=bfloat16)": query.dtype == torch.float32,
        "a head dim over 256 or not a multiple of 8": query.shape[-1] > 256 or query.shape[-1] % 8 != 0,
        "a value head dim other than the query's": query.shape[-1] != value_dim,
    }
    return next((problem for problem, is_present in problems.items() if is_present), None)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """A PackedKernel: torch's own variable-length FlashAttention; half precision on CUDA, without softcap."""
    assert softcap is None
    if not VARLEN_GROUPS_QUERIES and (num_groups := query.shape[0] // key.shape[0]) > 1:
        key, value = (x.repeat_interleave(num_groups, dim=0) for x in (key, value))
    query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    span = _window_size(window)
    if sinks is None:
        out: Tensor = _varlen(query, key, value, layout, scale=scaling, window_size=span)
    else:
        out = _VarlenWithSinks.apply(query, key, value, sinks, layout, scaling, span)
    return out.transpose(0, 1)


class _VarlenWithSinks(torch.autograd.Function):
    """Variable-length FlashAttention with one more score for each head, whose value is zero.

    With l the logarithm of the sum of a query's exponentiated scores, as the kernel returns it, and l' the same with
    the sink among them, the output is that of the kernel times exp(l - l'). The kernel's backward pass takes output and
    l from its caller (FlashAttention-2, algorithm 2): from this output and l' it computes p = exp(s - l') and
    ds = p * (dp - rowsum(do * o)), the gradients of the softmax with the sink.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        layout: PackedLayout,
        scaling: float | None,
        span: tuple[int, int],
    ) -> Tensor:
        """query [T, H, d], key and value [T, K, d], sinks [H] -> [T, H, d]."""
        with_lse = {"scale": scaling, "window_size": span, "return_aux": AuxRequest(lse=True)}
        out, lse = _varlen(query, key, value, layout, **with_lse)
        out, lse = _beside_sinks(out, lse, sinks)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.layout, ctx.scaling, ctx.span = layout, scaling, span
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        of_inputs = flash_attention_backward(
            gradient,
            query,
            key,
            value,
            out,
            lse,
            *_packed(ctx.layout),
            0.0,
            ctx.span == (-1, 0),
            *no_dropout,
            scale=ctx.scaling,
            window_size_left=ctx.span[0],
            window_size_right=ctx.span[1],
        )
        of_outputs = (gradient.float() * out.float()).sum(-1)
        of_sinks = -((sinks.float() - lse.T).exp() * of_outputs).sum(0)
        return *of_inputs, of_sinks.to(sinks.dtype), None, None, None


def _beside_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention [T, H, d] and the logarithms of its sums of exponentiated scores [H, T] -> the same with sinks [H]
    among the scores."""
    with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return (out * (lse - with_sinks).exp().T[:, :, None]).to(out.dtype), with_sinks


def _varlen(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, **options: Any) -> Any:
    """torch's kernel for query [T, H, d], key and value [T, K, d]."""
    kernel: Callable[..., Any] = varlen_attn
    if query.shape[1] != key.shape[1]:
        kernel = partial(varlen_attn, enable_gqa=True)
    return kernel(query, key, value, *_packed(layout), **options)


def _packed(layout: PackedLayout) -> tuple[Tensor, Tensor, int, int]:
    """Where queries and keys lie, as torch's kernel takes it."""
    return layout.cu_seqlens, layout.cu_seqlens, layout.max_length, layout.max_length


def _window_size(window: int | None) -> tuple[int, int]:
    """Causal attention, as torch's kernel takes it, which does not count the token itself."""
    return (-1, 0) if window is None else (window - 1, 0)


def varlen_decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    longest: int,
    scaling: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attends from one new token of every row to the keys that the cache holds for that row, and to nothing else. Uses
    torch's own variable-length FlashAttention, which needs VARLEN_READS_CACHES.

    Args:
        query: [B, H, 1, d].
        keys, values: [B, K, C, d], with the heads of a token beside each other in memory ([B, C, K, d] contiguous).
        lengths: [B] int32, number of tokens in each row, the new one last; each at most `longest`.
        scaling, window, sinks: as in `attend`; sinks [H].
    Returns:
        [B, H, 1, d].
    """
    num_rows, num_kv_heads, capacity, _ = keys.shape
    rows = torch.arange(num_rows + 1, dtype=torch.int32, device=query.device)
    kernel: Callable[..., Any] = varlen_attn
    out, lse = kernel(
        query[:, :, 0],
        keys.transpose(1, 2).flatten(0, 1),
        values.transpose(1, 2).flatten(0, 1),
        rows,
        rows * capacity,
        1,
        longest,
        return_aux=AuxRequest(lse=True),
        scale=scaling,
        window_size=(-1, -1) if window is None else _window_size(window),
        enable_gqa=query.shape[1] != num_kv_heads,
        seqused_k=lengths,
    )
    if sinks is not None:
        out, _ = _beside_sinks(out, lse, sinks)
    result: Tensor = out[:, :, None]
    return result

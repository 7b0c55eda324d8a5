"""Attention over dense batches and over packed sequences.

Shapes: B rows, H query heads, K key/value heads (K divides H), Q query tokens, L key tokens, T packed tokens,
d head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.uploads import to_device

_QUERY_BLOCK = 256
"""Queries whose scores exist at a time; twice as many take as long."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the sequences of a pack lie, known on the host so that no kernel launch waits for the device.

    Example: lengths 3, 3, 2: `cu_seqlens=[0, 3, 6, 8]`, `runs=((2, 3), (1, 2))`.
    """

    cu_seqlens: Tensor
    """[S + 1] int32, on the device of the tokens."""
    runs: tuple[tuple[int, int], ...]
    """(count, length) of each run of neighboring sequences of one length; a run is one dense batch."""
    max_length: int
    blocks: tuple[Tensor | None, ...] | None = None
    """For each run [count, length] int64, on the device: the block of every token, -1 for none; tokens of one block see
    each other both ways. None for a run without a block, and in place of all of them for a pack without."""

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, *, device: torch.device, blocks: Tensor | None = None) -> Self:
        """Builds the layout from `cu_seqlens` on the host.

        Args:
            blocks: [T] int64 on the host, the block of every token, -1 for none; some token is in one. Sequences with
                and without blocks are in different runs.
        """
        lengths = cu_seqlens.diff().tolist()
        is_in_blocks = [False] * len(lengths)
        if blocks is not None:
            is_in_blocks = [bool((own >= 0).any()) for own in blocks.split(lengths)]
        kinds = [(len(list(same)), *kind) for kind, same in groupby(zip(lengths, is_in_blocks, strict=True))]
        runs = tuple((count, length) for count, length, _ in kinds)
        of_runs: tuple[Tensor | None, ...] | None = None
        if blocks is not None:
            parts = to_device(blocks, device).split([count * length for count, length in runs])
            of_runs = tuple(
                part.view(count, length) if has_blocks else None
                for part, (count, length, has_blocks) in zip(parts, kinds, strict=True)
            )
        return cls(to_device(cu_seqlens, device), runs, max(lengths), of_runs)

    @classmethod
    def of_one_length(cls, count: int, length: int, *, device: torch.device) -> Self:
        """Builds the layout of `count` sequences of one length, on the device, so that nothing is copied there."""
        return cls(torch.arange(count + 1, dtype=torch.int32, device=device) * length, ((count, length),), length)

    @property
    def num_tokens(self) -> int:
        return sum(count * length for count, length in self.runs)

    def without_blocks(self) -> "PackedLayout":
        """Returns the layout of the same runs, in which no tokens see each other both ways."""
        return replace(self, blocks=None)

    def chunked(self, size: int) -> "PackedLayout":
        """Returns the layout with every sequence cut into chunks of `size` tokens and a rest.

        Example: lengths 5, 2 with size 2: `cu_seqlens=[0, 2, 4, 5, 7]`.
        """
        if self.max_length <= size:
            return self
        assert self.blocks is None, "no family has both"
        lengths = [length for count, length in self.runs for _ in range(count)]
        ends = [0, *accumulate(min(size, left) for length in lengths for left in range(length, 0, -size))]
        return PackedLayout.from_cu_seqlens(torch.tensor(ends, dtype=torch.int32), device=self.cu_seqlens.device)


class PackedKernel(Protocol):
    """Computes packed attention in one call; takes the tensors of `packed_attention`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: PackedLayout,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor: ...


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    causal: bool = False,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Dense attention with grouped queries.

    Args:
        query: [B, H, Q, d]. key, value: [B, K, L, d]; the value's head dim may differ.
        scaling: multiplies the scores; None is d ** -0.5.
        causal: query i sees keys 0..i; needs Q == L.
        window: with causal, query i sees only its last `window` keys, itself included.
        chunk: with causal, query i sees only keys from the last multiple of `chunk` on.
        softcap: scores become softcap * tanh(scores / softcap) before the softmax (Gemma 2).
        sinks: [H] or [H, Q], one more score for each head (and query) that takes part in the softmax and has no value
            (gpt-oss).
        mask: bool, broadcastable to [B, H, Q, L], True = seen; instead of causal.
    Returns:
        [B, H, Q, dv].
    """
    num_tokens = query.shape[2]
    if causal and window is not None and chunk is None and num_tokens > 2 * max(window, _window_block(window)):
        return _attend_in_window(query, key, value, scaling=scaling, window=window, softcap=softcap, sinks=sinks)
    is_plain = softcap is None and sinks is None
    if causal and window is chunk is None and not is_plain and num_tokens > 2 * _QUERY_BLOCK:
        out: Tensor = _BlockByBlock.apply(query, key, value, sinks, scaling, softcap)
        return out
    if causal and any(size is not None and num_tokens > size for size in (window, chunk)):
        position = torch.arange(num_tokens, device=query.device)
        mask, causal = seen_keys(position[:, None], position[None, :], window=window, chunk=chunk), False
    num_heads, num_groups = query.shape[1], query.shape[1] // key.shape[1]
    is_grouped = is_plain and num_groups > 1 and _is_kernel_grouping(query, value, mask)
    if num_groups > 1 and not is_grouped:
        key, value = (x.repeat_interleave(num_groups, dim=1) for x in (key, value))
    if is_plain:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=is_grouped
        )
    scores = (query @ key.transpose(2, 3)).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return scores.softmax(dim=-1).to(value.dtype) @ value
    scores = torch.cat([scores, sinks.float().view(num_heads, -1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    return scores.softmax(dim=-1)[..., :-1].to(value.dtype) @ value


def _is_kernel_grouping(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether torch has a kernel that groups queries as they are; asked to where it has none, it would hold all scores.
    On CUDA only FlashAttention does."""
    is_flash = mask is None and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1] <= 256
    return is_flash or not query.is_cuda


class _BlockByBlock(torch.autograd.Function):
    """Causal attention, as `attend`, for a block of queries at a time, whose scores backward computes again: no kernel
    of torch's has soft caps or sinks, so scores are tensors, in float32, of which autograd would keep several."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        scaling: float | None,
        softcap: float | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, *(() if sinks is None else (sinks,)))
        ctx.options = {"scaling": scaling, "softcap": softcap}
        outputs = []
        for at, block in enumerate(query.split(_QUERY_BLOCK, dim=2)):
            outputs.append(_attend_last(block, *_up_to(at, key, value), sinks=sinks, **ctx.options))
        return torch.cat(outputs, dim=2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs: tuple[Tensor, ...] = ctx.saved_tensors
        query, key, value, *sinks = inputs
        sums = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in inputs]
        blocks = [tensor.split(_QUERY_BLOCK, dim=2) for tensor in (query, sums[0], gradients[0])]
        for at, (block, of_block, gradient) in enumerate(zip(*blocks, strict=True)):
            leaves = [x.detach().requires_grad_() for x in (block, *_up_to(at, key, value), *sinks)]
            with torch.enable_grad():
                out = _attend_last(*leaves[:3], sinks=leaves[3] if sinks else None, **ctx.options)
            parts = torch.autograd.grad(out, leaves, gradient)
            for total, part in zip((of_block, *_up_to(at, sums[1], sums[2]), *sums[3:]), parts, strict=True):
                total += part
        of_inputs = [total.to(x.dtype) for total, x in zip(sums, inputs, strict=True)]
        return *of_inputs, *([] if sinks else [None]), None, None


def _up_to(block: int, *tensors: Tensor) -> list[Tensor]:
    """Keys or values [B, K, L, d] that the queries of a block see."""
    return [tensor[:, :, : (block + 1) * _QUERY_BLOCK] for tensor in tensors]


def _attend_last(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Causal attention of the last queries of a sequence."""
    place = torch.arange(key.shape[2], device=key.device)
    seen = seen_keys(place[-query.shape[2] :, None], place, window=None, chunk=None)
    return attend(query, key, value, mask=seen, **options)


def _window_block(window: int) -> int:
    """Tokens of a block of queries that are looked up together: a quarter of the window, in whole steps of 32."""
    return -(-window // 128) * 32


def _attend_in_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    window: int,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention in a window, as `attend`. Every block of queries is given the keys that one of them sees, so
    time and memory grow with L * window instead of L * L: with a mask of all keys, torch computes every score."""
    rows, num_tokens, block = query.shape[0], query.shape[2], _window_block(window)
    count, num_before = -(-num_tokens // block), -(-(window - 1) // block)
    rest = count * block - num_tokens

    def blocks_of(tensor: Tensor, num_before: int) -> Tensor:
        """[B, H, Q, d] -> [count, B * H, (num_before + 1) * block, d]"""
        padded = F.pad(tensor, (0, 0, num_before * block, rest)).unflatten(2, (-1, block))
        spans = [padded[:, :, first : first + count] for first in range(num_before + 1)]
        return torch.cat(spans, dim=3).permute(2, 0, 1, 3, 4).flatten(1, 2)

    starts = torch.arange(0, count * block, block, device=query.device)[:, None]
    places = starts + torch.arange(-num_before * block, block, device=query.device)
    own = places[:, num_before * block :]
    seen = seen_keys(own[:, :, None], places[:, None], window=window, chunk=None) & (places >= 0)[:, None]
    out = attend(
        blocks_of(query, 0),
        blocks_of(key, num_before),
        blocks_of(value, num_before),
        scaling=scaling,
        softcap=softcap,
        sinks=None if sinks is None else sinks.repeat(rows),
        mask=seen[:, None],
    )
    return out.unflatten(1, (rows, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_tokens]


def seen_keys(
    query: Tensor, key: Tensor, *, window: int | None, chunk: int | None, is_one_block: Tensor | None = None
) -> Tensor:
    """Integer positions of queries and keys, broadcastable -> bool: whether causal attention sees the key.

    Args:
        is_one_block: bool, whether query and key are in one block, so that the query also sees a key behind it.
    """
    seen = key <= query
    if is_one_block is not None:
        seen = seen | is_one_block
    if window is not None:
        seen &= query - key < window
    if chunk is not None:
        seen &= key >= query - query % chunk
    return seen


def seen_among_blocks(blocks: Tensor, *, window: int | None) -> Tensor:
    """The blocks [B, L] of tokens, -1 for none -> bool [B, 1, L, L]: which keys a query sees of those that causal
    attention shows it, in its last `window` tokens, and those behind it that are in one block with it."""
    position = torch.arange(blocks.shape[1], device=blocks.device)
    is_one_block = (blocks[:, :, None] == blocks[:, None]) & (blocks[:, :, None] >= 0)
    seen = seen_keys(position[:, None], position, window=window, chunk=None, is_one_block=is_one_block)
    return seen[:, None]


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    *,
    scaling: float | None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chosen: Sequence[Tensor | None] | None = None,
    kernel: PackedKernel | None = None,
) -> Tensor:
    """Causal attention inside every sequence of a pack, in which tokens of one block of the layout see each other both
    ways; sequences never see each other.

    With a kernel this is one variable-length call. Without one it is a loop over runs of equal length, which beats a
    dense block-diagonal mask (no score outside a sequence is ever computed).

    Args:
        query: [H, T, d]. key, value: [K, T, d]; the value's head dim may differ.
        window, softcap, sinks: as in `attend`.
        chosen: for every run of the layout, bool [n, L, L], the keys that each query sees; None: all keys up to the
            query.
        kernel: computes what `attend` would, but without blocks and `chosen`; it is given values of the query's head
            dim, with zeros behind theirs.
    Returns:
        [H, T, dv].
    """
    if kernel is not None:
        value_dim = value.shape[-1]
        if value_dim < query.shape[-1]:
            value = F.pad(value, (0, query.shape[-1] - value_dim))
        out = kernel(query, key, value, layout, scaling=scaling, window=window, softcap=softcap, sinks=sinks)
        return out[..., :value_dim]
    sizes = [count * length for count, length in layout.runs]
    assert chosen is None or window is layout.blocks is None, "no family has both"
    outputs = []
    for run, ((count, length), q, k, v) in enumerate(
        zip(layout.runs, query.split(sizes, 1), key.split(sizes, 1), value.split(sizes, 1), strict=True)
    ):
        dense = [x.unflatten(1, (count, length)).transpose(0, 1) for x in (q, k, v)]
        options: dict[str, Any] = {"causal": True, "window": window}
        if chosen is not None and (seen := chosen[run]) is not None:
            options = {"mask": seen[:, None]}
        if layout.blocks is not None and (blocks := layout.blocks[run]) is not None:
            options = {"mask": seen_among_blocks(blocks, window=window)}
        out = attend(*dense, scaling=scaling, softcap=softcap, sinks=sinks, **options)
        outputs.append(out.transpose(0, 1).flatten(1, 2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

"""Attention over packs written out token by token and head by head, and what it is compared on."""

import math

import torch

from shardwise.ops import PackedLayout

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 6, 5
LENGTHS = [3, 3, 3, 1, 8, 5, 5]
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
SETTINGS = {
    "plain": {},
    "scaled": {"scaling": 0.2},
    "window-1": {"window": 1},
    "window-3": {"window": 3},
    "window-beyond-every-sequence": {"window": 8},
    "softcap": {"softcap": 0.8},
    "softcap-window": {"softcap": 0.8, "window": 3, "scaling": 0.7},
    "sinks": {"sinks": SINKS},
    "sinks-window": {"sinks": SINKS, "window": 3},
}
IN_FLOAT32 = {"softcap", "sinks"}
"""What makes scores pass through float32, as in transformers."""


def qkv(num_tokens, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, num_tokens, DIM), (KV_HEADS, num_tokens, DIM), (KV_HEADS, num_tokens, VALUE_DIM)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def loop(query, key, value, lengths, *, scaling=None, window=None, softcap=None, sinks=None, blocks=()):
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
                weights = scores.exp() / (scores.exp().sum() + (0 if sinks is None else sinks[head].exp()))
                rows.append(weights @ value[kv_head, seen])
        out.append(torch.stack(rows))
    return torch.stack(out)


def layout_of(lengths, blocks=()):
    block_of = torch.full((sum(lengths),), -1)
    for number, block in enumerate(blocks):
        block_of[block.start : block.stop] = number
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedLayout.from_cu_seqlens(cu_seqlens, device=CPU, blocks=block_of if blocks else None)

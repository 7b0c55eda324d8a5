"""Packed attention, registered with transformers under a name of its own. No model code is changed."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from shardwise.config import ModelError
from shardwise.ops import DROPS_KEYWORDS, PackedLayout, packed_attention

PACKED_ATTENTION = "shardwise_packed"


class PackedCall:
    """What one forward pass hands to the attention of every layer, and how many layers have used it."""

    def __init__(self, layout: PackedLayout) -> None:
        self.layout = layout
        self.num_attention_calls = 0


def register_packed_attention() -> None:
    """Makes `attn_implementation=PACKED_ATTENTION` known; models then take `packed=PackedCall(...)` in forward."""
    AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedCall | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, d], key and value [1, K, T, d] -> [1, T, H, dv]."""
    assert dropout == 0.0  # build_on_meta refuses models with dropout
    if packed is None:
        raise ModelError(f"The family of {type(module).__name__} is not supported: it {DROPS_KEYWORDS}")
    if attention_mask is not None:  # ours is always None: this one says more than who sees whom
        raise ModelError(f"{type(module).__name__} is not supported: it brings an attention mask of its own")
    if _kwargs.get("s_aux") is not None:
        raise ModelError(f"{type(module).__name__} uses attention sinks, which this version does not support")
    packed.num_attention_calls += 1
    out = packed_attention(
        query[0], key[0], value[0], packed.layout, scaling=scaling, window=sliding_window, softcap=softcap
    )
    return out.transpose(0, 1).contiguous().unsqueeze(0), None  # some families call view on it


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """The layout says who sees whom; transformers' own masks would mix the sequences of a pack."""

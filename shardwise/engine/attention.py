"""Packed attention, registered with transformers under a name of its own. No model code is changed."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from shardwise.config import ModelError
from shardwise.ops import PackedLayout, packed_attention

PACKED_ATTENTION = "shardwise_packed"


def register_packed_attention() -> None:
    """Makes `attn_implementation=PACKED_ATTENTION` known; models then take `packed=PackedLayout(...)` in forward."""
    AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedLayout,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, d], key and value [1, K, T, d] -> [1, T, H, dv]."""
    assert dropout == 0.0  # build_on_meta refuses models with dropout
    if _kwargs.get("s_aux") is not None:
        raise ModelError(f"{type(module).__name__} uses attention sinks, which this version does not support")
    out = packed_attention(query[0], key[0], value[0], packed, scaling=scaling, window=sliding_window, softcap=softcap)
    return out.transpose(0, 1).unsqueeze(0), None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """The layout says who sees whom; transformers' own masks would mix the sequences of a pack."""

"""Packed attention, registered with transformers under a name of its own. No model code is changed."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from shardwise.config import ConfigError, ModelError
from shardwise.engine.ulysses import Ulysses
from shardwise.families import (
    DROPS_KEYWORDS,
    HAS_OWN_MASK,
    HIDES_CHOICE,
    KeyChoice,
    Mask,
    attention_span,
    is_own_mask,
    lacks_choice,
    mask_as_span,
    shows_blocks,
)
from shardwise.ops import PackedKernel, PackedLayout, packed_attention, varlen_attention, varlen_problem

PACKED_ATTENTION = "shardwise_packed"
FLASH_PACKAGES = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
}
"""Implementation -> the module that holds its kernel, and the package to install."""


class AttentionBackend:
    """How packed attention is computed, the same for every layer and batch of an engine."""

    def __init__(self, implementation: str, ulysses: Ulysses | None) -> None:
        """
        Raises:
            ConfigError: the implementation needs a package that is not installed.
        """
        self.ulysses = ulysses
        self._implementation = implementation
        self._kernel: PackedKernel = varlen_attention
        if implementation in FLASH_PACKAGES:
            self._kernel = _flash_kernel(implementation)

    def kernel(
        self,
        query: Tensor,
        value: Tensor,
        *,
        softcap: float | None,
        sinks: Tensor | None,
        has_blocks: bool = False,
    ) -> PackedKernel | None:
        """Returns the kernel that computes these tensors, None for the loop.

        Raises:
            ModelError: the implementation that was asked for cannot compute them.
        """
        if self._implementation == "loop":
            return None
        problem = varlen_problem(query, max(query.shape[-1], value.shape[-1]))  # shorter ones are padded
        if problem is None and sinks is not None and self._implementation in FLASH_PACKAGES:
            problem = "attention sinks"
        if problem is None and softcap is not None and self._implementation in ("auto", "varlen"):
            problem = "soft-capped scores"
        if problem is None and has_blocks:
            problem = "images whose tokens see each other both ways"
        if problem is None:
            return self._kernel
        if self._implementation == "auto":
            return None
        raise ModelError(
            f"engine.attention_implementation={self._implementation} cannot compute {problem}; set it to auto or loop"
        )


def _flash_kernel(implementation: str) -> PackedKernel:
    module, package = FLASH_PACKAGES[implementation]
    try:
        function = import_module(module).flash_attn_varlen_func
    except ImportError:
        raise ConfigError(
            f"engine.attention_implementation={implementation} needs the package {package}, which is not installed; "
            "install it, or use auto, which takes what is there and fits the device"
        ) from None
    return partial(_flash_attention, function)


def _flash_attention(
    function: Callable[..., Any],
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
    """A PackedKernel: the variable-length function of flash-attn 2 or 3, without sinks."""
    assert sinks is None
    out = function(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        cu_seqlens_q=layout.cu_seqlens,
        cu_seqlens_k=layout.cu_seqlens,
        max_seqlen_q=layout.max_length,
        max_seqlen_k=layout.max_length,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),  # the token itself is not counted
        softcap=0.0 if softcap is None else softcap,
    )
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first.transpose(0, 1)


class PackedCall:
    """What one forward pass hands to every layer, and how many attentions and sequence mixers have used it."""

    def __init__(self, layout: PackedLayout, backend: AttentionBackend) -> None:
        self.layout = layout
        self.backend = backend
        self.num_attention_calls = 0
        self.num_mixer_calls = 0


def register_packed_attention() -> None:
    """Makes `attn_implementation=PACKED_ATTENTION` known; models then take `packed=PackedCall(...)` in forward."""
    AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, mask_as_span)


@torch.compiler.disable
def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    *,
    packed: PackedCall | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: KeyChoice | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: query [1, H, t, d], key and value [1, K, t, d], s_aux [H] -> [1, t, H, dv]; t
    tokens of this rank. `indices` is given in layers with an indexer.

    A compiled layer calls it as it is: the layout changes with every batch, and each would be compiled anew.
    """
    assert dropout == 0.0  # build_on_meta refuses models with dropout
    if packed is None:
        raise ModelError(f"The family of {type(module).__name__} is not supported: it {DROPS_KEYWORDS}")
    if is_own_mask(attention_mask):
        raise ModelError(f"{type(module).__name__} is not supported: it {HAS_OWN_MASK}")
    if lacks_choice(module, indices):
        raise ModelError(f"The family of {type(module).__name__} is not supported: it {HIDES_CHOICE}")
    window, chunk = attention_span(module, attention_mask, sliding_window)
    layout = packed.layout if shows_blocks(module) else packed.layout.without_blocks()
    if chunk is not None:
        layout = layout.chunked(chunk)
    chosen = None if indices is None else indices.once(partial(_chosen_keys, layout=packed.layout))
    packed.num_attention_calls += 1
    query, key, value, sinks = query[0], key[0], value[0], s_aux
    ulysses = packed.backend.ulysses
    if ulysses is not None:
        query, key, value = ulysses.heads_of_all_tokens(query, key, value)
        sinks = None if sinks is None else ulysses.own_heads(sinks)
    kernel = None
    if chosen is None:
        has_blocks = layout.blocks is not None
        kernel = packed.backend.kernel(query, value, softcap=softcap, sinks=sinks, has_blocks=has_blocks)
    out = packed_attention(
        query,
        key,
        value,
        layout,
        scaling=scaling,
        window=window,
        softcap=softcap,
        sinks=sinks,
        chosen=chosen,
        kernel=kernel,
    )
    if ulysses is not None:
        out = ulysses.tokens_of_all_heads(out)
    return out.transpose(0, 1).contiguous().unsqueeze(0), None  # some families call view on it


def _chosen_keys(choice: KeyChoice, *, layout: PackedLayout) -> list[Tensor | None] | None:
    """Returns, for every run of `layout`, the keys that its queries see, bool [n, L, L]; None for a run whose queries
    see all keys before them. None instead of the list: this holds for every run."""
    if layout.max_length <= choice.num_keys:
        return None
    chosen: list[Tensor | None] = []
    start = 0
    for count, length in layout.runs:

        def pick(tensor: Tensor, tokens: slice = slice(start, start + count * length), length: int = length) -> Tensor:
            return tensor[0, tokens].unflatten(0, (-1, length))

        chosen.append(None if length <= choice.num_keys else choice.of_whole(length, pick)[0])
        start += count * length
    return chosen

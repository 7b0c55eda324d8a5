"""Which tokens see each other within a sequence, for attention that is registered with transformers: what its masks
become in packed training and cached generation, which keep sequences apart by themselves.

transformers masks what lies outside a window or a chunk, and also tells the attention of most families its window. The
attention of Phi-3.5-MoE and Qwen2-MoE learns it only from the mask, so here a number (Span) stands in for the mask.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from shardwise.families.support import INDEXED, chunk_size

HAS_OWN_MASK = "brings an attention mask of its own"


class Span(int):
    """Number of tokens of a window or chunk, in place of a mask. Gemma 4 slices its masks to the remaining queries in
    layers that share keys and values; those queries see equally far back, so a slice is the same Span."""

    def __getitem__(self, _queries: Any) -> "Span":
        return self


class AllBefore:
    """Stands for a mask that shows all tokens before a query, in layers with an indexer, which slice the mask."""

    def __getitem__(self, _part: Any) -> "AllBefore":
        return self


Mask = Tensor | Callable[..., Any] | Span | AllBefore | None
"""What attention gets as `attention_mask`: the size of a window or chunk, None without one, AllBefore in layers with an
indexer, or a mask of the family's own, which says more."""


def mask_as_span(
    *,
    mask_function: Callable[..., Any],
    config: Any,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_others: Any,
) -> Mask:
    """Mask function for transformers' AttentionMaskInterface. `use_vmap` marks a mask function of the family's own."""
    if use_vmap:
        return mask_function
    if local_size is not None:
        return Span(local_size)
    return AllBefore() if INDEXED in (getattr(config, "layer_types", None) or ()) else None


def is_own_mask(mask: Mask) -> bool:
    """Whether a mask is the family's own and says more than a window or chunk."""
    return mask is not None and not isinstance(mask, Span | AllBefore)


def image_blocks(is_image: Tensor) -> Tensor:
    """Numbers the images of sequences by their tokens, bool [..., L] -> int64 [..., L]: -1 for other tokens, some of
    which stand between two images. Where tokens of an image see each other both ways these are the blocks of a
    `PackedLayout`."""
    begins = is_image & ~pad(is_image, (1, 0))[..., :-1]
    return torch.where(is_image, begins.cumsum(-1) - 1, -1)


def shows_blocks(attention: nn.Module) -> bool:
    """Whether an attention module shows the tokens of an image to each other both ways, in a model that does: in Gemma
    4 only those with a window do."""
    config: Any = getattr(attention, "config", None)
    if getattr(config, "model_type", None) != "gemma4_text":
        return True
    return bool(config.layer_types[attention.layer_idx] == "sliding_attention")


def attention_span(attention: nn.Module, mask: Mask, window: int | None) -> tuple[int | None, int | None]:
    """Returns the sizes, in tokens, of an attention module's window (the query's own token included) and of its chunk;
    at least one of them is None.

    Args:
        mask: must not be one of the family's own.
        window: what the module passes to its attention function as `sliding_window`.
    """
    if (chunk := chunk_size(attention)) is not None:
        return None, chunk
    return mask if isinstance(mask, Span) else window, None

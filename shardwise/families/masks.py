"""Who sees whom within a sequence, for attention that is registered with transformers: what its masks become in packed
training and cached generation, which keep sequences apart by themselves.

transformers masks what lies outside a window or a chunk, and tells the attention of most families its window besides.
That of Phi-3.5-MoE and Qwen2-MoE knows it from the mask alone, so the number that describes a mask takes its place.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardwise.families.support import INDEXED, chunk_size

HAS_OWN_MASK = "brings an attention mask of its own"


class Span(int):
    """Tokens of a window or chunk. Gemma 4 cuts its masks to the queries that are left in layers which share keys and
    values; those see as far back as all do."""

    def __getitem__(self, _queries: Any) -> "Span":
        return self


class AllBefore:
    """All tokens before a query: in layers with an indexer, which gets a part of the mask."""

    def __getitem__(self, _part: Any) -> "AllBefore":
        return self


Mask = Tensor | Callable[..., Any] | Span | AllBefore | None
"""What attention gets as `attention_mask`: the tokens of a window or chunk, None without one, or what a family has made
itself, which says more."""


def mask_as_span(
    *,
    mask_function: Callable[..., Any],
    config: Any,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_others: Any,
) -> Mask:
    """A mask function for transformers' AttentionMaskInterface. `use_vmap` comes with functions of the family's own."""
    if use_vmap:
        return mask_function
    if local_size is not None:
        return Span(local_size)
    return AllBefore() if INDEXED in (getattr(config, "layer_types", None) or ()) else None


def is_own_mask(mask: Mask) -> bool:
    """Whether it says more than a window or chunk."""
    return mask is not None and not isinstance(mask, Span | AllBefore)


def attention_span(attention: nn.Module, mask: Mask, window: int | None) -> tuple[int | None, int | None]:
    """The tokens of an attention module's window, itself included, and of its chunk; at least one of them is None.

    Args:
        mask: none of the family's own.
        window: what the module gives its attention function as `sliding_window`.
    """
    if (chunk := chunk_size(attention)) is not None:
        return None, chunk
    return mask if isinstance(mask, Span) else window, None

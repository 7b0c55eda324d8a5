"""Which tokens of a pack a rank computes, which hidden states it scores, and where the results belong.

The one place that shifts: the hidden state of token s - 1 says what is predicted for token s.

Shapes: T tokens of the pack, P ranks that share it, t = ceil(T / P) tokens of one rank, N scored tokens of the pack,
n of one rank.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Self

import torch
from torch import Tensor

from shardwise.config import DataError
from shardwise.engine.ulysses import Ulysses
from shardwise.engine.vision import ImageShare, VisionTower
from shardwise.ops import PackedLayout
from shardwise.types import TokenBatch
from shardwise.uploads import to_device


class ScoredTokens(Enum):
    """Which tokens a head scores."""

    TRAINED = "trained"
    """Every token that loss_mask marks, from the state of the token before it."""
    LAST = "last"
    """The last token of each sequence, from the state of its last token that is not padding: it has seen the whole
    sequence. Where nothing ends in padding, and where the model names no padding token, both are the same token."""


@dataclass(frozen=True, slots=True)
class TokenSlice:
    """One rank's part of a packed batch, on the device.

    Example: T=5, P=2: the pack is padded to 6 tokens with a sequence of its own; rank 1 computes tokens 3, 4 and the
    padding. With token 3 trained, its logprob comes from the state of token 2, on rank 0.
    """

    input_ids: Tensor
    """[t] int64."""
    position_ids: Tensor
    """[t] or [3, t] int64."""
    layout: PackedLayout
    """Layout of the whole padded pack."""
    states: Tensor
    """[n] int64: which of this rank's hidden states are scored."""
    targets: Tensor
    """[n] int64: the token that each of them predicts."""
    sources: Tensor
    """[N] int64: where in the padded pack the scored states are."""
    destinations: Tensor
    """[N] int64: where in the pack their results belong."""
    num_tokens: int
    """T."""
    first_token: int
    """Where in the padded pack this rank's tokens begin."""
    experts: Tensor | None
    """[t, M, k] int16: which experts routers send these tokens to; -1 and None leave it to them."""
    images: ImageShare | None
    """None for a model that sees none."""

    @classmethod
    def of(
        cls,
        batch: TokenBatch,
        scored: ScoredTokens,
        *,
        ulysses: Ulysses | None,
        device: torch.device,
        pad_token_id: int | None = None,
        tower: VisionTower | None = None,
    ) -> Self:
        """Takes this rank's part of `batch`, which lies on the host: what is counted is counted there, so that nothing
        waits for the device.

        Args:
            pad_token_id: for `ScoredTokens.LAST`.
            tower: that of a model that sees images.
        """
        num_ranks, rank = (1, 0) if ulysses is None else (ulysses.size, ulysses.rank)
        num_tokens = len(batch.input_ids)
        num_padding = -num_tokens % num_ranks
        input_ids, position_ids, cu_seqlens = batch.input_ids, batch.position_ids, batch.cu_seqlens
        experts = batch.experts
        if num_padding:
            input_ids = torch.cat([input_ids, input_ids.new_zeros(num_padding)])
            padding = torch.arange(num_padding).expand(*position_ids.shape[:-1], -1)
            position_ids = torch.cat([position_ids, padding], dim=-1)
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_tensor([num_tokens + num_padding])])
            if experts is not None:
                experts = torch.cat([experts, experts.new_full((num_padding, *experts.shape[1:]), -1)])
        match scored:
            case ScoredTokens.TRAINED:
                destinations = batch.loss_mask.nonzero()[:, 0]
                sources = destinations - 1
            case ScoredTokens.LAST:
                destinations = batch.cu_seqlens[1:].long() - 1
                sources = destinations if pad_token_id is None else _ends_without_padding(batch, pad_token_id)
        width = len(input_ids) // num_ranks
        start = rank * width
        is_own = (sources >= start) & (sources < start + width)
        own = slice(start, start + width)

        def moved(tensor: Tensor) -> Tensor:
            return to_device(tensor, device)

        images = blocks = None
        if tower is not None:
            blocks = tower.blocks(input_ids)
            num_image_tokens = (input_ids == tower.image_token_id).view(num_ranks, width).sum(1).tolist()
            images = tower.share(batch, num_image_tokens, rank=rank, device=device)

        return cls(
            input_ids=moved(input_ids[own]),
            position_ids=moved(position_ids[..., own]),
            layout=PackedLayout.from_cu_seqlens(cu_seqlens, device=device, blocks=blocks),
            states=moved(sources[is_own] - start),
            targets=moved(batch.input_ids[destinations[is_own]]),
            sources=moved(sources),
            destinations=moved(destinations),
            num_tokens=num_tokens,
            first_token=start,
            experts=None if experts is None else moved(experts[own]),
            images=images,
        )

    def assemble(self, results: Tensor, ulysses: Ulysses | None) -> Tensor:
        """Results of this rank's states [n] -> results of the whole pack [T], 0 where not scored; the same on every
        rank."""
        if ulysses is not None:
            own = results.new_zeros(len(self.input_ids)).index_copy(0, self.states, results)
            results = ulysses.gather_tokens(own).index_select(0, self.sources)
        return results.new_zeros(self.num_tokens).index_copy(0, self.destinations, results)


def require_embeddable(input_ids: Tensor, vocab_size: int) -> None:
    """Raises DataError: a token has no embedding."""
    smallest, largest = (int(end) for end in torch.aminmax(input_ids))
    if smallest < 0:
        raise DataError(
            f"the data have token {smallest}, and tokens begin at 0; one that is not trained has loss_mask=False, and "
            "stays what it is"
        )
    if largest >= vocab_size:
        raise DataError(
            f"the data have token {largest}, and the model's vocabulary ends at {vocab_size - 1}: the tokenizer "
            "knows a special token that the model has no embedding for; take its text out of the data, or set "
            "model.tokenizer_path to the tokenizer that the model was made with"
        )


def _ends_without_padding(batch: TokenBatch, pad_token_id: int) -> Tensor:
    """[S]: the last token of each sequence that is not `pad_token_id`; the first one if all of its tokens are.

    transformers' sequence classifiers pool there. It matters where the end-of-sequence token serves as padding: it is
    then the state before it that is scored.
    """
    places = torch.arange(len(batch.input_ids))
    last_so_far = torch.where(batch.input_ids != pad_token_id, places, 0).cummax(0).values
    starts, stops = batch.cu_seqlens[:-1].long(), batch.cu_seqlens[1:].long()
    return torch.maximum(last_so_far[stops - 1], starts)

"""Images on their way into a language model: the tower's features, where the tokens of a rank need them.

Shapes: P ranks that share a pack, I images.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.engine.ulysses import Ulysses
from shardwise.families import Tower, image_blocks, sees_images_both_ways, takes_images, tower_of
from shardwise.types import Images, TokenBatch


@dataclass(frozen=True, slots=True)
class ImageShare:
    """What one rank looks at of a pack's images, and whose tokens the features belong to.

    Example: P=2, images of 3 and 5 tokens, of which rank 0 computes the first 4: rank 0 looks at the first image
    (sent=[3, 0], received=[3, 1]), rank 1 at the second (sent=[1, 4], received=[0, 4]).
    """

    images: Images
    """On the device; a black one, whose features nobody is sent, where a rank has none of its own."""
    sent: list[int]
    """How many features of these images each rank's tokens need."""
    received: list[int]
    """How many features of each rank's images the tokens of this rank need."""


@dataclass(frozen=True, slots=True)
class VisionTower:
    """A model's vision tower, as ranks that share a pack look through it."""

    image_token_id: int
    """What stands for a part of an image."""
    tower: Tower
    sees_both_ways: bool = False
    """Whether the tokens of an image see each other both ways."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self | None:
        """None for a model that is given no images."""
        tower = tower_of(model.config)
        if tower is None or not takes_images(model):
            return None
        return cls(image_token_id=model.config.image_token_id, tower=tower, sees_both_ways=sees_images_both_ways(model))

    def blocks(self, input_ids: Tensor) -> Tensor | None:
        """The blocks of a `PackedLayout` [T] of tokens [T]; None where none see each other both ways."""
        is_image = input_ids == self.image_token_id
        return image_blocks(is_image) if self.sees_both_ways and is_image.any() else None

    def share(self, batch: TokenBatch, num_tokens: Sequence[int], *, rank: int, device: torch.device) -> ImageShare:
        """`batch` lies on the host, and has either all images read or those that `divide_images` gives this rank.

        Args:
            num_tokens: [P], the image tokens of each rank.
        """
        num_patches, num_features = _counts(batch)
        divided = divide_images(num_patches, len(num_tokens))
        patches, features = (
            _consecutive([sum(counts[own.start : own.stop]) for own in divided])
            for counts in (num_patches, num_features)
        )
        tokens = _consecutive(num_tokens)
        return ImageShare(
            images=self._own_images(batch, divided[rank], patches[rank]).to(device),
            sent=[_num_common(features[rank], others) for others in tokens],
            received=[_num_common(others, tokens[rank]) for others in features],
        )

    def look(self, backbone: Any, input_ids: Tensor, share: ImageShare, ulysses: Ulysses | None) -> dict[str, Any]:
        """Runs the tower on this rank's images, and hands the language model the features of this rank's tokens.

        Where nothing of what the tower computed belongs to anyone's tokens, it has run all the same, and so does its
        backward pass with gradients of 0: its units gather and reduce on every rank.

        Args:
            input_ids: [1, T], the tokens of this rank.
        Returns:
            Arguments of the backbone's forward: the tokens and what is seen, or both in one as embeddings.
        """

        def placed(parts: Any) -> Tensor:
            """Returns the features of this rank's tokens, from those of one image after the other."""
            features = torch.cat(list(parts))[: sum(share.sent)]
            return features if ulysses is None else ulysses.send_rows(features, share.sent, share.received)

        seen = backbone.get_image_features(**self.tower.arguments(share.images), return_dict=True)
        if self.tower.follows_first_parameter:
            embedded = backbone.get_input_embeddings()(input_ids)
            places = (input_ids == self.image_token_id)[..., None]
            features = placed(seen.pooler_output).to(embedded.dtype)
            return {"inputs_embeds": embedded.masked_scatter(places, features)}
        in_tiles = isinstance(seen.pooler_output, Tensor)  # [N, tokens, D], where others have a list of [tokens, D]
        seen.pooler_output = placed(seen.pooler_output) if in_tiles else [placed(seen.pooler_output)]
        if "deepstack_features" in seen:
            seen.deepstack_features = [[placed(feature)] for feature in seen.deepstack_features]
        return {"input_ids": input_ids, "mm_encoder_outputs": {"image": seen}}

    def _own_images(self, batch: TokenBatch, own: range, patches: range) -> Images:
        if not own:
            return self.tower.black()
        images = batch.images
        assert images is not None, "images that nobody has read"
        if not batch.image_refs:
            images = Images(
                pixel_values=images.pixel_values[patches.start : patches.stop],
                num_patches=images.num_patches[own.start : own.stop],
                num_tokens=images.num_tokens[own.start : own.stop],
                sizes=images.sizes[own.start : own.stop],
            )
        assert (len(images.pixel_values), len(images.sizes)) == (len(patches), len(own)), "the images of another rank"
        return images


def divide_images(num_patches: Sequence[int], num_ranks: int) -> list[range]:
    """Which images of a pack each rank looks at: neighbours, with at most an image more than its part of the patches.

    An image goes where its middle is when the row of all patches is cut into equal parts.

    Args:
        num_patches: [I].
    Returns:
        [P] ranges over the images.
    """
    total, stops = sum(num_patches), accumulate(num_patches)
    ranks = [(2 * stop - size) * num_ranks // (2 * total) for size, stop in zip(num_patches, stops, strict=True)]
    return [range(bisect_left(ranks, rank), bisect_right(ranks, rank)) for rank in range(num_ranks)]


def _counts(batch: TokenBatch) -> tuple[list[int], list[int]]:
    """Patches, and tokens, of each image of the pack, whoever has read it."""
    if batch.image_refs:
        refs = batch.image_refs
        return [image_ref.num_patches for image_ref in refs], [image_ref.num_tokens for image_ref in refs]
    if batch.images is None:
        return [], []
    return batch.images.num_patches.tolist(), batch.images.num_tokens.tolist()


def _consecutive(counts: Sequence[int]) -> list[range]:
    return [range(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)]


def _num_common(one: range, other: range) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))

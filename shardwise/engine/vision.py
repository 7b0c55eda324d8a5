"""Images on their way into a language model: the tower's features, where the tokens of a rank need them.

Shapes: I images, N patches of all of them, F values of a patch, m patches that are merged into one image token.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.engine.token_slice import TokenSlice
from shardwise.ops import takes_images
from shardwise.types import Images


@dataclass(frozen=True, slots=True)
class VisionTower:
    """What a model's config says about its vision tower."""

    image_token_id: int
    """What stands for a part of an image, as many tokens as it has merged patches."""
    merge_size: int
    """Patches that are merged in height, and in width."""
    num_values: int
    """F."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self | None:
        """None for a model that is given no images."""
        if not takes_images(model):
            return None
        vision = model.config.vision_config
        return cls(
            image_token_id=model.config.image_token_id,
            merge_size=vision.spatial_merge_size,
            num_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        )

    def look(self, backbone: Any, tokens: TokenSlice) -> dict[str, Any]:
        """Runs the tower on all images of the pack, and hands the language model the features of this rank's tokens.

        Where nothing of what the tower computed belongs to this rank's tokens, it has run all the same, and so does its
        backward pass with gradients of 0: its units gather and reduce on every rank. Without images it looks at a
        black one of a single token.

        Returns:
            Arguments of the backbone's forward.
        """
        images = self._black(tokens.input_ids.device) if tokens.images is None else tokens.images
        seen = backbone.get_image_features(images.pixel_values, images.image_grid_thw, return_dict=True)
        own = slice(0, 0)
        if tokens.images is not None:
            own = slice(tokens.image_tokens.start, tokens.image_tokens.stop)
        seen.pooler_output = [_joined(seen.pooler_output)[own]]
        if "deepstack_features" in seen:
            seen.deepstack_features = [[_joined(feature)[own]] for feature in seen.deepstack_features]
        return {"mm_encoder_outputs": {"image": seen}}

    def _black(self, device: torch.device) -> Images:
        merge = self.merge_size
        return Images(
            pixel_values=torch.zeros(merge * merge, self.num_values, device=device),
            image_grid_thw=torch.tensor([[1, merge, merge]], device=device),
        )


def _joined(parts: Any) -> Tensor:
    """Features of one image after the other."""
    return torch.cat(list(parts))

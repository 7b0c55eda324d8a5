"""Images in a prefill of the embedded engine: the tower's features at their tokens, and where tokens stand."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.config import ConfigError, ModelError
from shardwise.families import backbone, takes_images
from shardwise.types import GenerateRequest, Images


def refuse_images(request: GenerateRequest, engine: str) -> None:
    """Raises ConfigError if it has any, for an `engine` that is not given them."""
    if request.images is not None:
        raise ConfigError(
            f"{request.uid} has images, which Shardwise does not pass on to {engine}; use rollout.engine=embedded"
        )


class CachedVisionTower:
    """The eyes of a model with a vision tower, one of Qwen's."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._backbone = backbone(model)
        self._merged = model.config.vision_config.spatial_merge_size**2
        self._device = device
        self.image_token_id: int = model.config.image_token_id
        """What stands for a part of an image."""

    @classmethod
    def of(cls, model: PreTrainedModel, device: torch.device) -> Self | None:
        """None for a model that sees no images."""
        return cls(model, device) if takes_images(model) else None

    def require_fitting(self, requests: Sequence[GenerateRequest]) -> None:
        """Raises ModelError where a prompt has more or fewer image tokens than its images take."""
        for request in requests:
            grids = [] if request.images is None else request.images.image_grid_thw.prod(1).tolist()
            found, needed = request.prompt_ids.count(self.image_token_id), sum(grids) // self._merged
            if found != needed:
                raise ModelError(
                    f"{request.uid}: the prompt has {found} image tokens (id {self.image_token_id}), and its "
                    f"{len(grids)} images take {needed}; give as many tokens as images take"
                )

    def look(self, images: Sequence[Images]) -> dict[str, Any]:
        """Runs the tower once over the images of all prompts, in their order.

        Returns:
            Arguments of the backbone's forward.
        """
        if not images:
            return {}
        pixels = torch.cat([one.pixel_values for one in images]).to(self._device)
        grids = torch.cat([one.image_grid_thw for one in images]).to(self._device)
        return {"mm_encoder_outputs": {"image": self._backbone.get_image_features(pixels, grids, return_dict=True)}}

    def places(self, prompts: Sequence[Tensor], images: Sequence[Images | None]) -> tuple[Tensor, Tensor]:
        """Where tokens are in time, height and width, as the model itself counts (M-RoPE).

        Args:
            prompts: [L] each.
            images: of each prompt.
        Returns:
            [3, P, longest L] of the prompts, and [P], what later tokens are ahead of their number in the sequence.
        """
        longest = max(map(len, prompts))
        positions = torch.arange(longest).repeat(3, len(prompts), 1)
        ahead = torch.zeros(len(prompts), dtype=torch.int64)
        for number, (tokens, own) in enumerate(zip(prompts, images, strict=True)):
            if own is not None:
                kinds = (tokens == self.image_token_id).int()[None]
                found, delta = self._backbone.get_rope_index(tokens[None], kinds, image_grid_thw=own.image_grid_thw)
                positions[:, number, : len(tokens)] = found[:, 0]
                ahead[number] = delta.item()
        return positions.to(self._device), ahead.to(self._device)

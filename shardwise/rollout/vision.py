"""Images in prompts: which tokens stand for them, and the vision tower of the embedded engine."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from shardwise.config import ModelError
from shardwise.families import (
    Tower,
    backbone,
    finds_positions,
    image_blocks,
    sees_images_both_ways,
    takes_images,
    tower_of,
    vision_reason,
)
from shardwise.types import GenerateRequest, Images


def requests_to_score(
    sequences: Sequence[Sequence[int]], images: Sequence[Images | None] | None
) -> list[GenerateRequest]:
    """Converts the arguments of `RolloutEngine.logprobs` to requests."""
    shown = [None] * len(sequences) if images is None else images
    return [
        GenerateRequest(uid=f"sequence {number}", prompt_ids=list(sequence), max_tokens=1, temperature=0.0, images=own)
        for number, (sequence, own) in enumerate(zip(sequences, shown, strict=True))
    ]


def image_spans(request: GenerateRequest, model: PreTrainedModel) -> list[tuple[int, int]]:
    """Returns, for each image, where its tokens begin in the prompt and how many there are, marks of rows included.

    Raises:
        ModelError: the model sees no images; the prompt has more or fewer image tokens than its images take, or other
            tokens between those of an image of a model that finds positions.
    """
    if (reason := vision_reason(model)) is not None:
        if request.images is not None:
            raise ModelError(f"{request.uid} has images: {reason}")
        return []
    token_id = model.config.image_token_id
    lengths = [] if request.images is None else request.images.num_tokens.tolist()
    places = [place for place, token in enumerate(request.prompt_ids) if token == token_id]
    if len(places) != sum(lengths):
        raise ModelError(
            f"{request.uid}: the prompt has {len(places)} image tokens (id {token_id}), and its {len(lengths)} images "
            f"take {sum(lengths)}; give as many tokens as images take"
        )
    images = [places[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)]
    spans = [(own[0], own[-1] + 1 - own[0]) for own in images]
    for number, ((_, length), own) in enumerate(zip(spans, images, strict=True), 1):
        if length > len(own) and finds_positions(model):
            raise ModelError(f"{request.uid}: other tokens stand between those of image {number}; put them behind it")
    return spans


class CachedVisionTower:
    """Runs the vision tower of a model, for cached generation."""

    def __init__(self, model: PreTrainedModel, tower: Tower, device: torch.device) -> None:
        self._backbone = backbone(model)
        self._tower = tower
        self._finds_positions = finds_positions(model)
        self._sees_both_ways = sees_images_both_ways(model)
        self._device = device
        self.image_token_id: int = model.config.image_token_id
        """The token that stands for a part of an image."""

    @classmethod
    def of(cls, model: PreTrainedModel, device: torch.device) -> Self | None:
        """Wraps a model's vision tower; None for a model that sees no images."""
        tower = tower_of(model.config)
        return cls(model, tower, device) if tower is not None and takes_images(model) else None

    def look(self, images: Sequence[Images]) -> dict[str, Any]:
        """Runs the tower over the images of all prompts, in their order: once, but prompt by prompt where a mask over
        all patches takes memory by their square.

        Returns:
            Keyword arguments for the backbone's forward.
        """
        if not images:
            return {}
        runs = images if self._tower.sees_all_patches else [Images.joined(images)]
        arguments = (self._tower.arguments(run.to(self._device)) for run in runs)
        seen, *others = [self._backbone.get_image_features(**own, return_dict=True) for own in arguments]
        if others:
            seen = BaseModelOutputWithPooling(
                pooler_output=[feature for one in (seen, *others) for feature in one.pooler_output]
            )
        return {"mm_encoder_outputs": {"image": seen}}

    def blocks(self, prompts: Sequence[Tensor]) -> Tensor | None:
        """Returns the images that the tokens [L] of each prompt belong to, [P, longest L], -1 for none; None for a
        model in which the tokens of an image do not see each other both ways."""
        if not self._sees_both_ways:
            return None
        blocks = [image_blocks(tokens == self.image_token_id) for tokens in prompts]
        return pad_sequence(blocks, batch_first=True, padding_value=-1).to(self._device)

    def places(self, prompts: Sequence[Tensor], images: Sequence[Images | None]) -> tuple[Tensor, Tensor]:
        """Computes positions of tokens in time, height and width, with the model's own method (M-RoPE); where it has
        none, counts them.

        Args:
            prompts: token ids, [L] each.
            images: the images of each prompt.
        Returns:
            Position ids of the prompts, [3, P, longest L] or [P, longest L], and [P], how far the position ids of later
            tokens are ahead of their index in the sequence.
        """
        longest = max(map(len, prompts))
        ahead = torch.zeros(len(prompts), dtype=torch.int64)
        if not self._finds_positions:
            positions = torch.arange(longest).expand(len(prompts), -1)
            return positions.to(self._device), ahead.to(self._device)
        positions = torch.arange(longest).repeat(3, len(prompts), 1)
        for number, (tokens, own) in enumerate(zip(prompts, images, strict=True)):
            if own is not None:
                kinds = (tokens == self.image_token_id).int()[None]
                found, delta = self._backbone.get_rope_index(tokens[None], kinds, image_grid_thw=own.sizes)
                positions[:, number, : len(tokens)] = found[:, 0]
                ahead[number] = delta.item()
        return positions.to(self._device), ahead.to(self._device)

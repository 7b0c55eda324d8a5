"""What training and rollout ask of every vision tower.

Shapes: I images, N patches of all of them, F values of a patch.
"""

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from shardwise.types import Images


class Tower(Protocol):
    """What the config of a model says about its vision tower."""

    sees_all_patches: ClassVar[bool]
    """Whether a mask over the patches of all images keeps them apart, which takes memory by the square of their number;
    else each image is looked at by itself."""
    follows_first_parameter: ClassVar[bool]
    """Whether the model gives pixels and features the dtype of its first parameter, which of one that is sharded is
    that of the masters; else that in which what takes them computes."""

    def arguments(self, images: Images) -> dict[str, Any]:
        """Returns what the model's get_image_features takes, on the device of the pixels, without waiting for it.
        Counts and sizes of `images` are on the host."""
        ...

    def black(self) -> Images:
        """Returns the smallest image that the tower takes, in black."""
        ...


def one_image(patches: Tensor, *, num_tokens: int, size: list[int]) -> Images:
    """Returns the `Images` of a single one, of `patches` [N, ...]."""
    return Images(
        pixel_values=patches,
        num_patches=torch.tensor([len(patches)]),
        num_tokens=torch.tensor([num_tokens]),
        sizes=torch.tensor([size]),
    )

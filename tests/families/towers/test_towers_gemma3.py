"""The tower of Gemma 3, against the model itself."""

import pytest
import torch
from tiny_models import tiny_vision_model
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from shardwise.families import Gemma3Tower, backbone, tower_of, unreached_modules
from shardwise.types import Images


@pytest.mark.parametrize("has_head", [True, False])
def test_all_of_gemma_3s_tower_is_reached_but_a_head(has_head):
    """Whose output nothing reads; the checkpoints of the hub have none."""
    config = tiny_vision_model("gemma3").config.to_dict()
    config["vision_config"] |= {"vision_use_head": has_head}
    model = Gemma3ForConditionalGeneration(Gemma3Config(**config))
    with torch.no_grad():
        model.model.multi_modal_projector.mm_input_projection_weight.normal_()
    tower = tower_of(model.config)
    assert tower == Gemma3Tower(num_channels=3, height=16, width=16, tokens_per_tile=4)
    tiles = Images(
        pixel_values=torch.randn(2, 3, 16, 16),
        num_patches=torch.tensor([1, 1]),
        num_tokens=torch.tensor([4, 4]),
        sizes=torch.tensor([[8, 8], [8, 16]]),
    )
    features = backbone(model).get_image_features(**tower.arguments(tiles), return_dict=True).pooler_output
    assert features.shape == (2, 4, 32)
    features.square().sum().backward()
    unreached = unreached_modules(model)
    assert unreached == (["model.vision_tower.head"] if has_head else [])
    for name, parameter in model.model.vision_tower.named_parameters():
        assert (parameter.grad is None) == (has_head and name.startswith("head.")), name

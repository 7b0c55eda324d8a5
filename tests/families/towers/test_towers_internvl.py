"""What of the tower of InternVL is reached."""

import pytest
from tiny_models import tiny_vision_model
from transformers import InternVLForConditionalGeneration

from shardwise.families import backbone, tower_of, unreached_modules


@pytest.mark.parametrize("use_mean_pooling", [True, False])
def test_all_of_internvls_tower_is_reached(use_mean_pooling):
    """Its norm too, where it has one."""
    config = tiny_vision_model("internvl").config
    config.vision_config.use_mean_pooling = use_mean_pooling
    model = InternVLForConditionalGeneration(config)
    found = tower_of(config)
    output = backbone(model).get_image_features(**found.arguments(found.black()), return_dict=True)
    output.pooler_output.sum().backward()
    assert unreached_modules(model) == []
    assert all(part.grad is not None for part in model.model.vision_tower.parameters())

"""What every vision tower is given, against the models themselves."""

import pytest
import torch
from tiny_models import VISION_FAMILIES, tiny_model, tiny_vision_model
from vision_samples import drawn_images, vision_families

from shardwise.families import backbone, tower_of
from shardwise.types import Images


@pytest.mark.parametrize("family", vision_families("qwen2_5_vl", "glm4v", "mistral3", "llava_next"))
def test_a_tower_makes_of_its_smallest_image_as_many_features_as_it_says(family):
    model = tiny_vision_model(family)
    tower = tower_of(model.config)
    black = tower.black()
    assert not black.pixel_values.any()
    (num_patches,), (num_tokens,) = black.num_patches.tolist(), black.num_tokens.tolist()
    assert num_patches == len(black.pixel_values)
    for images, expected in ((black, num_tokens), (Images.joined([black] * 3), 3 * num_tokens)):
        with torch.no_grad():
            features = backbone(model).get_image_features(**tower.arguments(images), return_dict=True).pooler_output
        assert sum(map(len, features)) == expected


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_what_a_model_is_given_is_on_the_device_of_the_pixels_which_is_not_waited_for(family, monkeypatch):
    """A device without values gives none away."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # which takes an accelerator
    model, device = tiny_vision_model(family), torch.device("meta")
    tower = tower_of(model.config)
    images = drawn_images(model, [(1, 4, 6), (1, 2, 2)], torch.Generator())
    given, expected = tower.arguments(images.to(device)), tower.arguments(images)
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert (given[name].device, given[name].shape) == (device, value.shape)


def test_a_model_of_words_has_no_tower():
    assert tower_of(tiny_model("llama").config) is None

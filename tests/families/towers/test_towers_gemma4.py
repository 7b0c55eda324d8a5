"""The tower of Gemma 4, against the model itself."""

import torch
from tiny_models import tiny_vision_model
from vision_samples import drawn_images, padded_patches

from shardwise.families import Gemma4Tower, backbone, tower_of, unreached_modules, vision_paths


def test_pictures_of_all_sizes_are_looked_at_as_if_each_were_padded_to_the_most_that_one_may_have():
    """All of the tower is reached, and of what is there for sounds nothing."""
    model = tiny_vision_model("gemma4").eval()
    tower = tower_of(model.config)
    assert tower == Gemma4Tower(patch_size=4, merge_size=2)
    images = drawn_images(model, [(1, 4, 6), (1, 2, 2), (1, 8, 2)], torch.Generator().manual_seed(0))
    given = tower.arguments(images)
    assert given["pixel_values"].shape == (3, 24, 48)
    seen = backbone(model).get_image_features(**given, return_dict=True).pooler_output
    assert [len(features) for features in seen] == images.num_tokens.tolist() == [6, 1, 4]
    with torch.no_grad():
        whole = backbone(model).get_image_features(**padded_patches(images), return_dict=True).pooler_output
    torch.testing.assert_close(torch.cat(seen), torch.cat(whole), atol=1e-6, rtol=1e-5)
    torch.cat(seen).square().sum().backward()
    assert unreached_modules(model) == ["model.audio_tower", "model.embed_audio"]
    assert vision_paths(model) == ["model.vision_tower", "model.embed_vision"]
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == name.startswith(tuple(vision_paths(model))), name


def test_a_picture_turned_on_its_side_is_another():
    """Its patches have other places."""
    model = tiny_vision_model("gemma4").eval()
    tower = tower_of(model.config)
    upright, turned = (drawn_images(model, [grid], torch.Generator().manual_seed(0)) for grid in ((1, 4, 6), (1, 6, 4)))
    assert torch.equal(upright.pixel_values, turned.pixel_values)
    with torch.no_grad():
        found = [
            torch.cat(backbone(model).get_image_features(**tower.arguments(own), return_dict=True).pooler_output)
            for own in (upright, turned)
        ]
    assert (found[0] - found[1]).abs().max() > 1e-2

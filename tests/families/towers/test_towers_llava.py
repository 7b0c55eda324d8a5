"""Features of the towers of LLaVA, LLaVA-NeXT and LLaVA-OneVision, against the models themselves."""

import random
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_vision_model
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaOnevisionConfig, LlavaOnevisionModel
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

from shardwise.families import (
    LlavaNextTower,
    LlavaOnevisionTower,
    LlavaTower,
    backbone,
    tower_of,
    unreached_modules,
    vision_paths,
)
from shardwise.types import Images

PICTURE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2} | {
    "patch_size": 4,
    "image_size": 8,
}
WORDS = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "pad_token_id": 0,
}
TOWERS_OF_LLAVA = {
    "clip": ({"model_type": "clip_vision_model"}, {}),
    "all of clip": ({"model_type": "clip_vision_model"}, {"vision_feature_select_strategy": "full"}),
    "two layers of clip": ({"model_type": "clip_vision_model"}, {"vision_feature_layer": [0, -3]}),
    "siglip": ({"model_type": "siglip_vision_model"}, {"vision_feature_select_strategy": "full"}),
    "siglip, to its end": (
        {"model_type": "siglip_vision_model"},
        {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
    ),
    "pixtral": (
        {"model_type": "pixtral", "head_dim": 16, "image_size": 64},
        {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
    ),
}


def llava_with(tower: str):
    vision, options = TOWERS_OF_LLAVA[tower]
    config = LlavaConfig(text_config=WORDS, vision_config=PICTURE | vision, image_token_id=5, **options)
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config)


@pytest.mark.parametrize("tower", TOWERS_OF_LLAVA)
def test_every_tower_of_llava_makes_as_many_features_as_it_says(tower):
    model = llava_with(tower)
    found = tower_of(model.config)
    images = Images.joined([found.black(), found.black()])
    with torch.no_grad():
        features = backbone(model).get_image_features(**found.arguments(images), return_dict=True).pooler_output
    assert [len(feature) for feature in features] == images.num_tokens.tolist()


@pytest.mark.parametrize("tower", TOWERS_OF_LLAVA)
def test_what_is_said_to_be_unreached_is_what_has_no_gradient(tower):
    model = llava_with(tower)
    found = tower_of(model.config)
    output = backbone(model).get_image_features(**found.arguments(found.black()), return_dict=True)
    sum(feature.sum() for feature in output.pooler_output).backward()
    unreached = tuple(f"{path}." for path in unreached_modules(model))
    seen = [path for path, _ in model.named_parameters() if path.startswith(tuple(vision_paths(model)))]
    assert {path for path in seen if path.startswith(unreached)} == {
        path for path in seen if model.get_parameter(path).grad is None
    }


def test_tokens_of_llava_next_are_the_features_that_the_model_keeps():
    """For pictures of random proportions and the pinpoints of LLaVA 1.6."""
    pinpoints = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]
    tile = LlavaTower(num_channels=3, height=336, width=336, tokens_per_tile=576)
    tower = LlavaNextTower(tiles=tile, pinpoints=pinpoints)
    drawn = random.Random(1)
    for number in range(300):
        size = (drawn.randint(1, 30 if number % 3 == 0 else 3000), drawn.randint(1, 3000))
        pinpoint = select_best_resolution(size, pinpoints)
        rows, columns = get_anyres_image_grid_shape(size, pinpoints, 336)
        kept = unpad_image(torch.empty(1, rows * 24, columns * 24, device="meta"), size)
        assert tower.num_tokens(pinpoint, size) == 576 + kept.shape[1] * (kept.shape[2] + 1), size
        assert tower.num_patches(pinpoint) == 1 + rows * columns


@pytest.mark.parametrize("aspect", ["anyres_max_9", "anyres_max_4"])
def test_tokens_of_llava_onevision_are_the_features_that_the_model_packs(aspect):
    """For pictures of random proportions and the pinpoints of the published models."""
    config = LlavaOnevisionConfig(vision_aspect_ratio=aspect)
    tower = tower_of(config)
    assert isinstance(tower, LlavaOnevisionTower)
    drawn = random.Random(1)
    num_scaled = 0
    for number in range(300):
        size = (drawn.randint(1, 30 if number % 3 == 0 else 3000), drawn.randint(1, 3000))
        pinpoint = select_best_resolution(size, config.image_grid_pinpoints)
        tiles = torch.empty(tower.num_patches(tuple(pinpoint)), 729, 1)
        (packed,), _ = LlavaOnevisionModel.pack_image_features(
            SimpleNamespace(config=config), [tiles], [size], torch.empty(1), aspect
        )
        assert tower.num_tokens(pinpoint, size) == len(packed), size
        num_scaled += len(packed) > 729 + tower.max_tiles * 729 // 2
    assert num_scaled > 30


def test_a_picture_of_several_is_one_tile_to_llava_onevision_also_where_the_others_are_elsewhere():
    """Between pictures that have no others beside them."""
    model = backbone(tiny_vision_model("llava_onevision"))
    tower = tower_of(model.config)
    counts, sizes = torch.tensor([3, 1, 5]), torch.tensor([[8, 16], [16, 9], [16, 16]])
    pixels = torch.randn(9, 3, 8, 8)
    images = Images(pixel_values=pixels, num_patches=counts, num_tokens=counts, sizes=sizes)

    def features(pixel_values, sizes, **options):
        with torch.no_grad():
            return model.get_image_features(pixel_values, sizes, **options, return_dict=True).pooler_output

    found = features(
        **{"sizes" if name == "image_sizes" else name: one for name, one in tower.arguments(images).items()}
    )
    (first,), (last,) = features(pixels[:3], sizes[:1]), features(pixels[4:], sizes[2:])
    second, _ = features(pixels[3:5], sizes[1:], batch_num_images=torch.tensor([2]))
    for one, expected in zip(found, (first, second, last), strict=True):
        torch.testing.assert_close(one, expected, atol=1e-6, rtol=1e-5)
    assert len(second) == tower.num_tokens_beside_others == int(tower.black().num_tokens)

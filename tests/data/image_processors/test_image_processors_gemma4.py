"""Pictures in whole tokens, and their marks, against the processor of Gemma 4."""

import pytest
import torch
from PIL import Image
from transformers import Gemma4ImageProcessorPil
from vision_folders import MARKED, tokenizer_with_images

from shardwise.config import ModelError
from shardwise.data.image_processors import Extent, Gemma4Processor, image_processor_for
from shardwise.data.image_tokens import ImageTokens
from shardwise.families import Gemma4Tower
from shardwise.types import ImageRef

TOWER = Gemma4Tower(patch_size=4, merge_size=2)
TINY = {"patch_size": 4, "pooling_kernel_size": 2}


@pytest.mark.parametrize("most", [70, 140])
def test_gemma_4s_pictures_are_those_of_its_own_processor_without_padding(most):
    processor = Gemma4ImageProcessorPil(**TINY, max_soft_tokens=most)
    found = image_processor_for(TOWER, processor)
    assert isinstance(found, Gemma4Processor)
    for width, height in [(16, 8), (24, 24), (20, 36), (3, 40), (400, 2), (64, 48), (100, 30)]:
        picture = Image.effect_noise((width, height), 90).convert("RGB")
        expected = processor([picture], return_tensors="pt")
        is_patch = (expected["image_position_ids"][0] >= 0).all(-1)
        patches, size = found.cut(picture)
        assert torch.equal(patches, expected["pixel_values"][0, is_patch])
        (num_tokens,) = torch.as_tensor(expected["num_soft_tokens_per_image"]).tolist()
        assert num_tokens <= most
        assert found.measure(width, height) == Extent(len(patches), num_tokens, size)
        columns, rows = (expected["image_position_ids"][0].max(0).values + 1).tolist()
        assert size == [4 * rows, 4 * columns]


@pytest.mark.parametrize(("key", "value", "read"), [("patch_size", 8, 4), ("pooling_kernel_size", 3, 2)])
def test_patches_that_the_tower_does_not_read_are_refused(key, value, read):
    with pytest.raises(
        ModelError, match=rf"^the image processor has {key}={value}, and the vision tower {read}, {key}"
    ):
        image_processor_for(TOWER, Gemma4ImageProcessorPil(**TINY | {key: value}))


def test_marks_stand_around_the_tokens_of_a_picture(tmp_path):
    words, mark, make_processor = MARKED["gemma4"]
    tokenizer = tokenizer_with_images(words, mark)
    own = make_processor(tokenizer)
    tokens = ImageTokens(tmp_path, tokenizer, tokenizer.convert_tokens_to_ids(words[0]))
    image_ref = ImageRef(name="?", path="?", num_patches=20, num_tokens=5, size=[8, 40])
    text = own.replace_image_token({"num_soft_tokens_per_image": [5]}, 0)
    found = image_processor_for(TOWER, own.image_processor).placeholder(image_ref, tokens)
    assert found == tokenizer.encode(text, add_special_tokens=False)

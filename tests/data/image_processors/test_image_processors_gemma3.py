"""Tiles and what is read of texts, against the processor of Gemma 3."""

import pytest
import torch
from PIL import Image
from transformers import Gemma3ImageProcessorPil
from vision_folders import MARKED, tokenizer_with_images

from shardwise.config import ModelError
from shardwise.data.image_processors import Extent, Gemma3Processor, image_processor_for
from shardwise.data.image_tokens import ImageTokens
from shardwise.data.synthetic import train_tokenizer
from shardwise.families import Gemma3Tower

TOWER = Gemma3Tower(num_channels=3, height=16, width=16, tokens_per_tile=4)
SQUARE = {"height": 16, "width": 16}


def test_gemma_3s_one_tile_is_that_of_its_own_processor():
    processor = Gemma3ImageProcessorPil(size=SQUARE)
    found = image_processor_for(TOWER, processor)
    assert isinstance(found, Gemma3Processor)
    for width, height in [(16, 8), (24, 24), (3, 40), (640, 48)]:
        picture = Image.effect_noise((width, height), 90).convert("RGB")
        tiles, size = found.cut(picture)
        assert torch.equal(tiles, processor([picture], return_tensors="pt")["pixel_values"])
        assert found.measure(width, height) == Extent(1, 4, size)
        assert size == [height, width]


@pytest.mark.parametrize("asked", [False, None])
def test_crops_beside_a_picture_are_refused(asked):
    assert image_processor_for(TOWER, Gemma3ImageProcessorPil(size=SQUARE, do_pan_and_scan=asked))
    with pytest.raises(ModelError, match=r"^do_pan_and_scan=true of the image processor, which shows crops of a pic"):
        image_processor_for(TOWER, Gemma3ImageProcessorPil(size=SQUARE, do_pan_and_scan=True))


def test_what_is_read_for_an_image_is_what_the_processor_writes_with_one_token_for_all(tmp_path):
    words, mark, make_processor = MARKED["gemma3"]
    tokenizer = tokenizer_with_images(words, mark)
    own = make_processor(tokenizer)
    found = image_processor_for(TOWER, own.image_processor)
    tokens = ImageTokens(tmp_path, tokenizer, tokenizer.convert_tokens_to_ids(words[0]))
    assert found.mark(tokens) == mark == own.image_token
    read = found.as_read(f"a{mark}b\n{mark}", tokens)
    assert read.replace(words[0], 4 * words[0]) == f"a{own.full_image_sequence}b\n{own.full_image_sequence}"
    assert found.as_read("a\n\nb", tokens) == "a\n\nb"


def test_a_tokenizer_that_does_not_name_the_marks_is_refused(tmp_path):
    tokens = ImageTokens(tmp_path, train_tokenizer(["2+3=5"], vocab_size=261), 5)
    with pytest.raises(ModelError, match="the tokenizer does not say what its boi_token is, which the model's proces"):
        image_processor_for(TOWER, Gemma3ImageProcessorPil(size=SQUARE)).as_read("a", tokens)

"""What belongs to the tiny models that see images beside their weights, and whole folders of them."""

import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from PIL import Image
from tiny_models import tiny_vision_model
from transformers import (
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Gemma4ImageProcessorPil,
    Gemma4Processor,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    InternVLProcessor,
    Lfm2VlImageProcessor,
    Lfm2VlProcessor,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaOnevisionImageProcessorPil,
    LlavaOnevisionProcessor,
    LlavaProcessor,
    PixtralImageProcessorPil,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    SmolVLMImageProcessorPil,
    SmolVLMProcessor,
)
from vision_samples import pixtral_processor

from shardwise.data.synthetic import train_tokenizer

MARK = "<|vision_start|><|image_pad|><|vision_end|>"
"""What the chat templates of Qwen write for an image."""
WORDS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokenizer_with_images(words: list[str], mark: str) -> PreTrainedTokenizerFast:
    """Bytes and special words, with a chat template that writes `mark` for an image."""
    tokenizer = train_tokenizer(["2+3=5"], vocab_size=261)
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    for name, word in zip(INTERNVL_NAMES, words, strict=False):
        setattr(tokenizer, name, word)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(word))
    tokenizer.chat_template = TEMPLATE.replace(MARK, mark)
    return tokenizer


def pixtral(tokenizer, merge_size=2):
    images = PixtralImageProcessorPil(patch_size={"height": 4, "width": 4}, size={"longest_edge": 32})
    return pixtral_processor(images, tokenizer, patch_size=4, spatial_merge_size=merge_size)


def internvl(tokenizer):
    images = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=4)
    with patch.object(InternVLProcessor, "check_argument_for_proper_class"):  # that of videos needs torchvision
        return InternVLProcessor(images, tokenizer, image_seq_length=4)


def llava(tokenizer):
    images = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    options = {"patch_size": 4, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    return LlavaProcessor(images, tokenizer, **options)


def llava_next(tokenizer):
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 8},
        crop_size={"height": 8, "width": 8},
        image_grid_pinpoints=tiny_vision_model("llava_next").config.image_grid_pinpoints,
    )
    options = {"patch_size": 4, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    return LlavaNextProcessor(images, tokenizer, **options)


def gemma3(tokenizer):
    tokenizer._set_model_specific_special_tokens(dict(zip(GEMMA3_NAMES, MARKED["gemma3"][0], strict=True)))
    return Gemma3Processor(Gemma3ImageProcessorPil(size={"height": 16, "width": 16}), tokenizer, image_seq_length=4)


def gemma4(tokenizer):
    tokenizer._set_model_specific_special_tokens(dict(zip(GEMMA4_NAMES, MARKED["gemma4"][0], strict=True)))
    images = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    with patch.object(Gemma4Processor, "check_argument_for_proper_class"):  # there are no sounds and no videos
        return Gemma4Processor(None, images, tokenizer, None)


def llava_onevision(tokenizer):
    config = tiny_vision_model("llava_onevision").config
    pinpoints = config.image_grid_pinpoints
    images = LlavaOnevisionImageProcessorPil(size={"height": 8, "width": 8}, image_grid_pinpoints=pinpoints)
    options = {"vision_feature_select_strategy": "full", "vision_aspect_ratio": config.vision_aspect_ratio}
    with patch.object(LlavaOnevisionProcessor, "check_argument_for_proper_class"):  # that of videos needs torchvision
        return LlavaOnevisionProcessor(images, tokenizer, num_image_tokens=4, **options)


def lfm2_vl(tokenizer):
    pytest.importorskip("torchvision")  # transformers has no other image processor for it
    limits = {"min_image_tokens": 2, "max_image_tokens": 16, "max_pixels_tolerance": 0.5, "max_tiles": 6}
    images = Lfm2VlImageProcessor(encoder_patch_size=4, tile_size=16, **limits)
    return Lfm2VlProcessor(images, tokenizer)


def idefics3(tokenizer):
    images = Idefics3ImageProcessorPil(size={"longest_edge": 48}, max_image_size={"longest_edge": 16})
    return Idefics3Processor(images, tokenizer, image_seq_len=4)


def smolvlm(tokenizer):
    images = SmolVLMImageProcessorPil(size={"longest_edge": 48}, max_image_size={"longest_edge": 16})
    videos = SimpleNamespace(num_frames=8, fps=1)  # transformers' needs torchvision, and num2words counts frames
    unchecked = patch.object(SmolVLMProcessor, "check_argument_for_proper_class")
    with unchecked, patch("transformers.models.smolvlm.processing_smolvlm.num2words"):
        return SmolVLMProcessor(images, tokenizer, videos, image_seq_len=4)


CUT = ["<image>", "<|image_start|>", "<|image_end|>", "<video>", "<|img_thumbnail|>"]
CUT += [f"<|img_row_{row}_col_{column}|>" for row in (1, 2, 3) for column in (1, 2, 3)]
"""Special tokens of LFM2-VL."""
TILED = ["<image>", "<fake_token_around_image>", "<global-img>"]
TILED += [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
TILED += ["<end_of_utterance>"]
"""Special tokens of Idefics 3 and SmolVLM."""
MARKED = {
    "mistral3": (["[IMG]", "[IMG_BREAK]", "[IMG_END]"], "[IMG]", pixtral),
    "pixtral": (["[IMG]", "[IMG_BREAK]", "[IMG_END]"], "[IMG]", partial(pixtral, merge_size=1)),
    "internvl": (["<IMG_CONTEXT>", "<img>", "</img>", "<video>"], "<IMG_CONTEXT>\n", internvl),
    "llava": (["<image>"], "<image>\n", llava),
    "llava_next": (["<image>"], "<image>\n", llava_next),
    "gemma3": (["<image_soft_token>", "<start_of_image>", "<end_of_image>"], "<start_of_image>", gemma3),
    "gemma4": (["<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>"], "<|image|>", gemma4),
    "llava_onevision": (["<image>"], "<image>", llava_onevision),
    "lfm2_vl": (CUT, "<image>", lfm2_vl),
    "idefics3": (TILED, "<image>", idefics3),
    "smolvlm": (TILED, "<image>", smolvlm),
}
"""Special tokens of families whose processor writes marks around or into an image, what their chat template writes for
one, and the processor."""
INTERNVL_NAMES = ("context_image_token", "start_image_token", "end_image_token", "video_token")
"""By which InternVL's tokenizer knows them."""
GEMMA3_NAMES = ("image_token", "boi_token", "eoi_token")
"""By which Gemma 3's does, and says so in its file."""
GEMMA4_NAMES = (*GEMMA3_NAMES, "audio_token", "boa_token", "eoa_token")
"""By which Gemma 4's does."""


def vision_folder(family: str, folder: Path, *, seed: int = 0) -> Any:
    """Saves a tiny model whole, as the hub has it, and returns it."""
    words, mark, make_processor = MARKED.get(family, (WORDS, MARK, None))
    tokenizer = tokenizer_with_images(words, mark)
    model = tiny_vision_model(family, seed=seed, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    model.config.image_token_id = tokenizer.convert_tokens_to_ids(words[1 if make_processor is None else 0])
    if make_processor is None:
        processor = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024})
    else:
        processor = make_processor(tokenizer).image_processor
    with torch.no_grad():
        model.save_pretrained(folder)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def noise(size: tuple[int, int], *, seed: int = 0) -> Image.Image:
    """A picture that is the same in every process, which those of `Image.effect_noise` are not."""
    return Image.frombytes("L", size, random.Random(seed).randbytes(size[0] * size[1])).convert("RGB")

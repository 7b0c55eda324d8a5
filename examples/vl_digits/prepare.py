"""Makes what examples/vl_digits_sft.yaml and vl_digits_grpo.yaml learn from: a small random Qwen3-VL, and
digits drawn with PIL. Needs pillow.

python examples/vl_digits/prepare.py [runs/vl_digits [NUM_TRAIN]]

A row asks for the digits of one to three pictures. Held-out rows have drawings of their own: places, sizes, angles and
colours are drawn anew for every digit.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from shardwise.data import train_tokenizer

NUM_TRAIN, NUM_HELD_OUT = 4000, 256
SIDE = 32
"""Pixels of a picture, which is 4 x 4 patches or 2 x 2 tokens."""
QUESTION = "Which digits?"
WORDS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def main(folder: Path, num_train: int) -> None:
    """Writes model/, pictures/, train.jsonl and validation.jsonl."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for split, count in {"train": num_train, "validation": NUM_HELD_OUT}.items():
        random.seed(split)
        rows = [row(folder, f"{split}_{number}") for number in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    save_model(folder / "model")
    print(f"model and rows are in {folder}")


def row(folder: Path, name: str) -> dict[str, Any]:
    """A question with one to three pictures, by their paths from the folder."""
    digits = [random.randrange(10) for _ in range(random.randint(1, 3))]
    paths = [f"pictures/{name}_{place}.png" for place in range(len(digits))]
    for digit, path in zip(digits, paths, strict=True):
        drawn(digit).save(folder / path)
    question = {"role": "user", "content": "<image>" * len(digits) + QUESTION}
    answer = "".join(map(str, digits))
    return {
        "messages": [question, {"role": "assistant", "content": answer}],
        "prompt": [question],
        "answer": answer,
        "images": paths,
    }


def drawn(digit: int) -> Image.Image:
    """One digit, somewhere on a picture, in some size, angle and colour."""
    light, dark = random.randint(190, 255), random.randint(0, 90)
    font = ImageFont.load_default(size=random.randint(20, 26))
    ink = Image.new("L", (SIDE, SIDE), 0)
    place = SIDE / 2 + random.uniform(-3, 3), SIDE / 2 + random.uniform(-3, 3)
    ImageDraw.Draw(ink).text(place, str(digit), fill=255, font=font, anchor="mm")
    ink = ink.rotate(random.uniform(-10, 10), resample=Image.Resampling.BILINEAR)
    paper = Image.new("RGB", (SIDE, SIDE), tuple(min(255, light + random.randint(-20, 20)) for _ in range(3)))
    paper.paste(Image.new("RGB", (SIDE, SIDE), tuple(dark + random.randint(0, 60) for _ in range(3))), mask=ink)
    return paper


def save_model(folder: Path) -> None:
    """A random Qwen3-VL with its tokenizer, chat template and image processor."""
    tokenizer = tokenizer_with_images()
    ids = dict(zip(WORDS, tokenizer.convert_tokens_to_ids(WORDS), strict=True))
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
            "initializer_range": 0.1,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_heads": 4,
            "patch_size": 8,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
            "initializer_range": 0.1,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pixels = {"shortest_edge": SIDE * SIDE, "longest_edge": 4 * SIDE * SIDE}
    Qwen2VLImageProcessorPil(patch_size=8, size=pixels).save_pretrained(folder)


def tokenizer_with_images() -> PreTrainedTokenizerFast:
    """Bytes, and the words that Qwen's families write around images."""
    tokenizer = train_tokenizer([QUESTION], vocab_size=261)
    tokenizer.add_special_tokens({"additional_special_tokens": WORDS})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/vl_digits"), help="default: %(default)s")
    parser.add_argument("num_train", nargs="?", type=int, default=NUM_TRAIN, help="rows; default: %(default)s")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.num_train)

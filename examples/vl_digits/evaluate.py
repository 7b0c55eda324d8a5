"""The share of held-out rows whose digits a model reads all right, by transformers' own greedy generation.

python examples/vl_digits/evaluate.py MODEL_FOLDER [runs/vl_digits/validation.jsonl]
"""

import argparse
import json
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer


@torch.inference_mode()
def accuracy(model_folder: Path, rows_file: Path) -> float:
    """Nothing of Shardwise is used here."""
    model = AutoModelForImageTextToText.from_pretrained(model_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    processor = AutoImageProcessor.from_pretrained(model_folder, backend="pil")
    image_token = tokenizer.decode([model.config.image_token_id])
    rows = [json.loads(line) for line in rows_file.read_text(encoding="utf-8").splitlines()]
    num_right = 0
    for row in rows:
        question, answer = row["messages"]
        seen = processor([Image.open(rows_file.parent / path) for path in row["images"]], return_tensors="pt")
        words = question["content"].removeprefix("<image>" * len(row["images"]))
        content = [*({"type": "image"} for _ in row["images"]), {"type": "text", "text": words}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        for grid in seen["image_grid_thw"]:  # as the processor of the family does it
            text = text.replace(image_token, "<|placeholder|>" * (int(grid.prod()) // processor.merge_size**2), 1)
        inputs = tokenizer(text.replace("<|placeholder|>", image_token), return_tensors="pt", add_special_tokens=False)
        is_image = (inputs["input_ids"] == model.config.image_token_id).int()
        tokens = model.generate(**inputs, **seen, mm_token_type_ids=is_image, max_new_tokens=5, do_sample=False)
        said = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        num_right += said == answer["content"]
    return num_right / len(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_folder", type=Path)
    held_out = Path("runs/vl_digits/validation.jsonl")
    parser.add_argument("rows_file", nargs="?", type=Path, default=held_out, help="default: %(default)s")
    arguments = parser.parse_args()
    print(f"held-out accuracy {accuracy(arguments.model_folder, arguments.rows_file):.3f}")

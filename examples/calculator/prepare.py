"""Makes what examples/calculator_*.yaml learn from: a small random model, and products of two-digit numbers.

python examples/calculator/prepare.py [runs/calculator]

Half of the demonstrations call the calculator and half answer from memory, which a small model is bad at: supervised
learning leaves a policy that does both, and reinforcement learning finds out which one pays.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardwise.data import build_model_folder, train_tokenizer

NUM_HELD_OUT = 256


def main(folder: Path) -> None:
    """Writes model/, sft_{train,validation}.jsonl and rl_{train,validation}.jsonl."""
    pairs = sorted(((a, b) for a in range(10, 100) for b in range(10, 100)), key=lambda pair: digest(*pair))
    folder.mkdir(parents=True, exist_ok=True)
    for split, problems in {"validation": pairs[:NUM_HELD_OUT], "train": pairs[NUM_HELD_OUT:]}.items():
        write(folder / f"sft_{split}.jsonl", ({"messages": demonstration(a, b)} for a, b in problems))
        write(folder / f"rl_{split}.jsonl", ({"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in problems))
    texts = (folder / "sft_train.jsonl").read_text(encoding="utf-8").splitlines()
    build_model_folder(folder / "model", tokenizer=train_tokenizer(map(spoken, texts), vocab_size=320))
    print(f"model and problems are in {folder}")


def demonstration(a: int, b: int) -> list[dict[str, str]]:
    """A conversation, with the calculator or without it."""
    question, answer = {"role": "user", "content": f"{a}*{b}="}, {"role": "assistant", "content": str(a * b)}
    if digest(a, b, "demonstration")[0] % 2:
        return [question, answer]
    call = json.dumps({"name": "calculate", "arguments": {"expression": f"{a}*{b}"}})
    return [
        question,
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": str(a * b)},
        answer,
    ]


def spoken(line: str) -> str:
    """What is said in a row, for the tokenizer to learn from."""
    return "\n".join(message["content"] for message in json.loads(line)["messages"])


def digest(*parts: Any) -> bytes:
    """Orders problems by nothing that their numbers say."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes jsonl."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/calculator"), help="default: %(default)s")
    main(parser.parse_args().folder)

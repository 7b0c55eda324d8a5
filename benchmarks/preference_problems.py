"""The quickstart's problems with right and wrong answers, which preference training learns from."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.data import arithmetic_problems


@dataclass(frozen=True, slots=True)
class PreferenceFiles:
    """Where the problems were written with right and wrong answers, in jsonl."""

    pairs_train: Path
    """Columns prompt, chosen (worked out, right) and rejected (one digit of the result is wrong)."""
    pairs_validation: Path
    labelled_train: Path
    """Columns prompt, response (of every problem either the right or the wrong answer) and label (a boolean)."""
    labelled_validation: Path


def preference_problems(folder: Path, *, seed: int, num_held_out: int = 1000) -> PreferenceFiles:
    """Writes the problems of `arithmetic_problems` and, split the same way, pairs of answers and labelled answers.

    Args: as in `arithmetic_problems`.
    Raises:
        ValueError: num_held_out out of range.
    """
    problems = arithmetic_problems(folder, seed=seed, num_held_out=num_held_out, worked=True)
    for split, file in (("train", problems.sft_train), ("validation", problems.sft_validation)):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        _write(folder / f"pairs_{split}.jsonl", (_pair_row(seed, **row) for row in rows))
        _write(folder / f"labelled_{split}.jsonl", (_labelled_row(seed, **row) for row in rows))
    return PreferenceFiles(
        pairs_train=folder / "pairs_train.jsonl",
        pairs_validation=folder / "pairs_validation.jsonl",
        labelled_train=folder / "labelled_train.jsonl",
        labelled_validation=folder / "labelled_validation.jsonl",
    )


def wrong_response(prompt: str, response: str, *, seed: int) -> str:
    """Returns a worked response with one digit of the result replaced: which and by what, seed and problem decide.

    Example: `wrong_response("47+85=", "12 132", seed=0) == "12 131"`
    """
    steps, result = response.split(" ")
    place, choice, *_ = _digest(seed, prompt, "wrong")
    place %= len(result)
    leads = place == 0 and len(result) > 1  # a number does not begin with 0
    digits = [digit for digit in "0123456789" if digit != result[place] and not (leads and digit == "0")]
    return f"{steps} {result[:place]}{digits[choice % len(digits)]}{result[place + 1 :]}"


def _pair_row(seed: int, prompt: str, response: str) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": response, "rejected": wrong_response(prompt, response, seed=seed)}


def _labelled_row(seed: int, prompt: str, response: str) -> dict[str, Any]:
    label = _digest(seed, prompt, "label")[0] % 2 == 0
    return {
        "prompt": prompt,
        "response": response if label else wrong_response(prompt, response, seed=seed),
        "label": label,
    }


def _digest(seed: int, prompt: str, purpose: str) -> bytes:
    return hashlib.blake2b(f"{seed}:{prompt}{purpose}".encode(), digest_size=16).digest()


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

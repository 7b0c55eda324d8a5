"""What both sides of grpo_step work on: the settings of a step, prompts, canned completions, a reward.

Standard library only: the peer imports it in its own interpreter.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

TASK_FILE, PROMPTS_FILE, COMPLETIONS_FILE = "task.json", "prompts.jsonl", "completions.json"
SHORTEST_PROMPT, LONGEST_PROMPT = 16, 48
"""Tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoTask:
    """The settings that the sides share. Its folder holds them beside a model, a tokenizer and prompts."""

    num_prompts: int
    """Of one step; the file holds several times as many, taken in order again and again."""
    group_size: int
    max_tokens: int
    """The longest completion."""
    temperature: float
    kl_coef: float
    learning_rate: float
    threads: int
    canned: bool
    """Completions are read from the folder instead of sampled, so that what is left of a step is its training."""

    @property
    def batch(self) -> int:
        """Completions of one step."""
        return self.num_prompts * self.group_size

    def save(self, folder: Path) -> None:
        (folder / TASK_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls(**json.loads((folder / TASK_FILE).read_text()))


def prompt_texts(folder: Path) -> list[str]:
    """The prompts in the order in which steps take them."""
    return [json.loads(line)["prompt"] for line in (folder / PROMPTS_FILE).read_text().splitlines()]


def canned_completions(folder: Path) -> dict[str, list[list[int]]]:
    """Of every prompt the token ids of its completions."""
    completions: dict[str, list[list[int]]] = json.loads((folder / COMPLETIONS_FILE).read_text())
    return completions


def reward_of(text: str) -> float:
    """The numbers in the words of a completion, summed modulo 101: cheap, and different within every group.

    Its standard deviation in a group is near 29, so that a constant added to it (1e-4 in TRL, 1e-6 here) is nothing.
    """
    return float(sum(int(word[1:]) for word in text.split()) % 101)


def compute_score(data_source: str, solution_str: str, ground_truth: object, extra_info: object) -> float:
    """The same in the form of a reward function of Shardwise."""
    return reward_of(solution_str)

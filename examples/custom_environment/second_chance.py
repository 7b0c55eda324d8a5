"""An environment of one's own: a wrong answer may be tried again, for less of a reward.

shardwise rl -c examples/gsm8k_grpo.yaml "reward.functions={type: environment}" \\
    rollout.environment=examples/custom_environment/second_chance.py:SecondChance \\
    trainer.output_dir=runs/second_chance
"""

from shardwise.rewards import number_match


class SecondChance:
    """One episode. `chances` and `discount` come from rollout.environment.parameters."""

    def __init__(self, *, chances: int = 2, discount: float = 0.5, reply: str = " Wrong. Try again: ") -> None:
        self._chances, self._discount, self._reply = chances, discount, reply
        self._num_wrong, self._is_solved = 0, False

    def reset(self, example) -> None:
        """Begins the episode of a row."""
        self._ground_truth = example.ground_truth

    def step(self, response: str) -> str | None:
        """What the policy reads next; None ends the episode."""
        self._is_solved = number_match("", response, self._ground_truth) > 0
        if self._is_solved or self._num_wrong + 1 == self._chances:
            return None
        self._num_wrong += 1
        return self._reply

    def reward(self) -> float:
        """Of the whole episode."""
        return self._discount**self._num_wrong if self._is_solved else 0.0

    def close(self) -> None:
        """There is nothing to release."""

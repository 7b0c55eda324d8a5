"""A reward of one's own: the right number scores 1, and a short way to it up to 0.2 more.

    shardwise rl -c examples/gsm8k_grpo.yaml reward.functions=examples/custom_reward/brevity.py:right_and_brief \\
        trainer.output_dir=runs/brevity

Beside another reward, with a weight and a parameter:

    reward:
      functions:
        - shardwise.rewards.math:gsm8k_score
        - {function: examples/custom_reward/brevity.py:right_and_brief, weight: 0.5, parameters: {room: 400}}
"""

from typing import Any

from shardwise.rewards import final_answer


def right_and_brief(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], room: int = 200
) -> dict[str, float]:
    """`score` is the reward; every other number is logged as a part; `acc` decides what counts as correct."""
    right = final_answer(solution_str) == final_answer(str(ground_truth))  # GSM8K's truth is a whole solution
    brevity = max(0.0, 1.0 - len(solution_str) / room)
    return {"score": right * (1.0 + 0.2 * brevity), "acc": float(right), "brevity": brevity}

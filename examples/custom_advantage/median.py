"""An advantage of one's own: reward minus the median of the group, which one lucky sample does not move.

shardwise rl -c examples/gsm8k_grpo.yaml algorithm.advantage=examples/custom_advantage/median.py:above_median \\
    trainer.output_dir=runs/median
"""

import torch
from torch import Tensor


def above_median(token_rewards: Tensor, loss_mask: Tensor, group_ids: Tensor, *, scale: float = 1.0) -> Tensor:
    """Args: rewards [N, L] on the token that earned them, trained tokens [N, L] bool, the prompt of each row [N].
    `scale` comes from algorithm.advantage.parameters.

    Returns one advantage for every token, [N, L]; what it says about untrained tokens is ignored.
    """
    rewards = torch.where(loss_mask, token_rewards, 0.0).sum(dim=1)
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        members = (group_ids == group) & loss_mask.any(dim=1)
        if members.sum() > 1:
            advantages[members] = rewards[members] - rewards[members].quantile(0.5)
    return scale * advantages[:, None] * loss_mask

"""Advantages of single turns in multi-turn completions: what followed a turn, compared with what followed other turns
that answered the same state.

Shape letters: N samples of a step, L width of the padded arrays, K turns of the sample that has most.
"""

from typing import Literal

import torch
from torch import Tensor

from shardwise.algorithms.group_advantages import grpo, scaled_deviations
from shardwise.algorithms.groups import has_baseline
from shardwise.types import Metrics, MetricValue


def gigpo(
    token_rewards: Tensor,
    loss_mask: Tensor,
    group_ids: Tensor,
    turns: Tensor,
    states: Tensor,
    *,
    scale: Literal["std", "none"],
    step_weight: float,
    gamma: float,
) -> Tensor:
    """Groups within groups: grpo's advantage of the whole completion + step_weight x the turn's advantage among the
    turns of its group that answered the same state.

    The return of turn k is the sum over j >= k of gamma^(j - k) x the rewards of turn j.

    Args:
        token_rewards: [N, L] float32; rewards where not trained are ignored.
        loss_mask: [N, L] bool, True = trained.
        group_ids: [N] int64, equal for the samples of one prompt.
        turns: [N, L] int64, the turn that each trained token belongs to, numbered from 0 in the sample.
        states: [N, K] int64, the state that each turn answered; equal numbers are the same state of the same group.
        scale: "std" divides both parts by the standard deviations of their groups; "none" does not divide.
        step_weight: weight of the turn's part.
        gamma: the discount per turn.
    Returns:
        [N, L] float32, 0 where not trained.
    Raises:
        ValueError: an unknown scale.
    Source: Feng et al. 2025 (GiGPO), eq. 3 to 8. Differs: a state that was answered once, and a group of one, give 0;
        samples without a trained token do not count.
    """
    rewards, counted = turn_rewards(token_rewards, loss_mask, turns, num_turns=states.shape[1])
    returns = rewards
    for turn in reversed(range(states.shape[1] - 1)):
        returns[:, turn] += gamma * returns[:, turn + 1]
    steps = scaled_deviations(returns.flatten(), counted.flatten(), states.flatten(), scale).view_as(returns)
    of_tokens = steps.gather(1, turns.clamp(min=0)).float()
    return grpo(token_rewards, loss_mask, group_ids, scale=scale) + torch.where(loss_mask, step_weight * of_tokens, 0.0)


def turn_rewards(token_rewards: Tensor, loss_mask: Tensor, turns: Tensor, *, num_turns: int) -> tuple[Tensor, Tensor]:
    """[N, K] float64, the rewards of each turn, and [N, K] bool, whether it has a trained token."""
    places = torch.where(loss_mask, turns, 0)
    empty = token_rewards.new_zeros(len(turns), num_turns, dtype=torch.float64)
    rewards = empty.scatter_add(1, places, torch.where(loss_mask, token_rewards.double(), 0.0))
    return rewards, empty.scatter_add(1, places, loss_mask.double()) > 0


def turn_metrics(loss_mask: Tensor, turns: Tensor, states: Tensor) -> Metrics:
    """advantage/lone_turn_fraction: the share of turns whose state no other turn of the group answered."""
    _, counted = turn_rewards(loss_mask.float(), loss_mask, turns, num_turns=states.shape[1])
    compared = has_baseline(counted.flatten(), states.flatten())
    num_turns = int(counted.sum())
    return {"advantage/lone_turn_fraction": MetricValue.mean(num_turns - int(compared.sum()), num_turns)}

"""Advantages of single tokens, from discounted rewards or from a teacher, computed on the controller.

Shape letters: N samples of a step, L width of the padded arrays.
Tokens that the policy did not sample (tool results, observations) are not steps of its trajectory: they neither
discount nor end it. The next token of a trained token is the next trained one.
"""

import torch
from torch import Tensor

from shardwise.algorithms.masked import whitened


def gae(
    token_rewards: Tensor, loss_mask: Tensor, values: Tensor, *, gamma: float, lam: float, whiten: bool
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation.

    With t+1 the next trained token, and V and A being 0 after the last one:

        delta(t) = r(t) + gamma V(t+1) - V(t)
        A(t) = delta(t) + gamma lam A(t+1)
        return(t) = A(t) + V(t)

    Args:
        token_rewards: [N, L] float32; rewards where not trained are ignored.
        loss_mask: [N, L] bool, True = trained.
        values: [N, L] float32, of the critic for the state before the token; ignored where not trained, NaN included.
        gamma: discount per trained token, 0..1.
        lam: 0..1; 1 is the discounted return minus the value, 0 is delta alone.
        whiten: gives the advantages mean 0 and variance 1 over the trained tokens of the step.
    Returns:
        Advantages and returns, [N, L] float32, 0 where not trained. Returns are those of unwhitened advantages.
    Source: Schulman et al. 2015 (GAE), eq. 16. Differs: carried unchanged across tokens that are not trained.
    """
    values = torch.where(loss_mask, values.double(), 0.0)
    advantages = _reverse_scan(token_rewards, loss_mask, values, gamma=gamma, lam=lam)
    returns = torch.where(loss_mask, advantages + values, 0.0)
    if whiten:
        advantages = whitened(advantages, loss_mask)
    return advantages.float(), returns.float()


def reinforce_plus_plus(token_rewards: Tensor, loss_mask: Tensor, group_ids: Tensor, *, gamma: float) -> Tensor:
    """The discounted return of each token, whitened over the trained tokens of the whole step.

    G(t) = r(t) + gamma G(t+1), with t+1 the next trained token.

    Args:
        token_rewards: [N, L] float32; rewards where not trained are ignored.
        loss_mask: [N, L] bool, True = trained.
        group_ids: [N] int64, not read: the baseline is the mean over the step, so a group of one learns too.
        gamma: discount per trained token, 0..1.
    Returns:
        [N, L] float32, 0 where not trained.
    Source: Hu et al. 2025 (REINFORCE++). Differs: the return crosses tokens that are not trained; elsewhere
        it is lost there, and only the last turn of a conversation learns.
    """
    no_values = torch.zeros_like(token_rewards, dtype=torch.float64)
    return whitened(_reverse_scan(token_rewards, loss_mask, no_values, gamma=gamma, lam=1.0), loss_mask).float()


def reverse_kl_advantages(logprobs: Tensor, teacher_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """-(logp - teacher logp) per token: with a policy-gradient loss its expectation is minus the gradient of each
    token's KL(student || teacher), the later tokens taken as given.

    Args:
        logprobs: [N, L] float32, nats, of the student that sampled the tokens.
        teacher_logprobs: [N, L] float32, nats, of the same tokens.
        loss_mask: [N, L] bool, True = trained; the other arrays are ignored elsewhere, NaN included.
    Returns:
        [N, L] float32, nats, 0 where not trained; carries no graph.
    Source: Agarwal et al. 2024 (GKD) with reverse KL; Gu et al. 2024 (MiniLLM), the single-step part.
    """
    return torch.where(loss_mask, teacher_logprobs - logprobs, 0.0).detach().float()


def _reverse_scan(token_rewards: Tensor, loss_mask: Tensor, values: Tensor, *, gamma: float, lam: float) -> Tensor:
    """[N, L] float64, the A(t) of `gae`, 0 where not trained."""
    rewards = torch.where(loss_mask, token_rewards, 0.0).double()
    # [L, N] from here on: the numbers that are read together lie together.
    rewards, trained, values = (array.T.contiguous() for array in (rewards, loss_mask, values))
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_value - values[t]
        next_advantage = torch.where(trained[t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(trained[t], values[t], next_value)
        advantages[t] = next_advantage
    return torch.where(loss_mask, advantages.T, 0.0)

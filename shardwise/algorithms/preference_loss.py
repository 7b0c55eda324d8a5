"""Losses on pairs of a chosen and a rejected completion, and on single completions marked desirable or not.

Shape letters: P pairs, S completions of one micro-batch; column 0 is chosen, column 1 rejected.
Inputs are sums over the trained tokens of a completion. Each loss belongs to one pair or completion: the caller divides
their sum by the number of pairs (completions) in the whole step. P = 0 gives no losses but still a graph. Metrics carry
no graph; a pair counts as right if the chosen completion has the larger reward.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from shardwise.types import Metrics, MetricValue


def dpo(
    sums: Tensor, ref_sums: Tensor, lengths: Tensor, *, beta: float, label_smoothing: float
) -> tuple[Tensor, Metrics]:
    """-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), with e = label_smoothing and
    h = (chosen - ref chosen) - (rejected - ref rejected).

    Args:
        sums, ref_sums: [P, 2] float32, nats, logprobs of the policy and the frozen reference.
        lengths: [P, 2] int64, trained tokens; not read.
        beta: strength of the pull towards the reference, positive; 0.1 in the paper.
        label_smoothing: the chance that a label is wrong, 0 <= e < 0.5; 0 is plain DPO.
    Returns:
        [P] float32 losses, and metrics over pairs: preference/margin, preference/accuracy, preference/chosen_reward,
        preference/rejected_reward, the reward being beta (logprob - ref logprob).
    Source: Rafailov et al. 2023 (DPO), eq. 7; label smoothing: Mitchell 2023 (cDPO).
    """
    rewards = beta * (sums - ref_sums)
    margins = rewards[:, 0] - rewards[:, 1]
    losses = -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)
    return losses, _pair_metrics(rewards)


def ipo(sums: Tensor, ref_sums: Tensor, lengths: Tensor, *, beta: float) -> tuple[Tensor, Metrics]:
    """(h - 1 / (2 beta))^2, with h as in `dpo` but from logprobs per token.

    Args:
        sums, ref_sums: [P, 2] float32, nats, logprobs of the policy and the frozen reference.
        lengths: [P, 2] int64, trained tokens; a completion without any has logprob 0.
        beta: the paper's tau, positive: h is pulled to 1 / (2 beta).
    Returns:
        [P] float32 losses, and the metrics of `dpo`, with rewards per token.
    Source: Azar et al. 2023 (IPO), eq. 17. Differs: divided by the lengths, as TRL does after its authors' advice.
    """
    rewards = beta * (_per_token(sums, lengths) - _per_token(ref_sums, lengths))
    margins = (rewards[:, 0] - rewards[:, 1]) / beta
    return (margins - 1 / (2 * beta)).square(), _pair_metrics(rewards)


def simpo(sums: Tensor, ref_sums: Tensor, lengths: Tensor, *, beta: float, gamma: float) -> tuple[Tensor, Metrics]:
    """-log sigmoid(beta (chosen - rejected) - gamma), with logprobs per token; there is no reference.

    Args:
        sums: [P, 2] float32, nats, logprobs of the policy.
        ref_sums: [P, 2], not read.
        lengths: [P, 2] int64, trained tokens; a completion without any has logprob 0.
        beta: scale of the rewards, positive; 2.0 to 2.5 in the paper.
        gamma: the margin that is aimed at, in units of the reward (not divided by beta).
    Returns:
        [P] float32 losses, and the metrics of `dpo`, the reward being beta times the logprob per token.
    Source: Meng et al. 2024 (SimPO), eq. 6.
    """
    rewards = beta * _per_token(sums, lengths)
    return -logsigmoid(rewards[:, 0] - rewards[:, 1] - gamma), _pair_metrics(rewards)


def orpo(sums: Tensor, ref_sums: Tensor, lengths: Tensor, *, beta: float) -> tuple[Tensor, Metrics]:
    """-chosen - beta log sigmoid(log odds(chosen) - log odds(rejected)), with logprobs per token and
    log odds(x) = x - log(1 - e^x); there is no reference.

    Args:
        sums: [P, 2] float32, nats, logprobs of the policy.
        ref_sums: [P, 2], not read.
        lengths: [P, 2] int64, trained tokens; a completion without any has logprob 0 and no gradient.
        beta: weight of the odds ratio, >= 0: lambda in the paper, 0.1; TRL calls it beta too.
    Returns:
        [P] float32 losses, and the metrics of `dpo`, the reward being beta times the logprob per token.
    Source: Hong et al. 2024 (ORPO), eq. 6 and 7. Differs: the likelihood of the chosen completion is averaged over its
        own tokens in every pair, where TRL averages over the tokens of the micro-batch; 1 - e^x is not below 1e-6.
    """
    means = _per_token(sums, lengths)
    log_odds = means - torch.log(-torch.expm1(means.clamp(max=-1e-6)))
    losses = -means[:, 0] - beta * logsigmoid(log_odds[:, 0] - log_odds[:, 1])
    return losses, _pair_metrics(beta * means)


def kto(
    sums: Tensor,
    ref_sums: Tensor,
    desirable: Tensor,
    kl: float,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> tuple[Tensor, Metrics]:
    """With h = logprob - ref logprob: desirable_weight (1 - sigmoid(beta (h - kl))) for a desirable completion,
    undesirable_weight (1 - sigmoid(beta (kl - h))) for an undesirable one.

    Args:
        sums, ref_sums: [S] float32, nats, logprobs of the policy and the frozen reference.
        desirable: [S] bool.
        kl: the reference point, nats: an estimate of KL(policy || reference) over the whole step, without a gradient.
            Below 0 it counts as 0.
        beta: steepness, positive; 0.1 in the paper.
        desirable_weight, undesirable_weight: >= 0; the paper wants weight times number to be within 1 to 4/3 of each
            other.
    Returns:
        [S] float32 losses, and metrics: preference/chosen_reward, preference/rejected_reward (means of beta h over
        desirable and over other completions), preference/accuracy (the share on the right side of beta kl). There are
        no pairs and no margin.
    Source: Ethayarajh et al. 2024 (KTO), eq. 7 and 8.
    """
    rewards = beta * (sums - ref_sums)
    lead = rewards - beta * max(kl, 0.0)
    margins = torch.where(desirable, lead, -lead)
    weight, other_weight = (sums.new_full((), weight) for weight in (desirable_weight, undesirable_weight))
    weights = torch.where(desirable, weight, other_weight)
    metrics = {
        "preference/chosen_reward": _mean_where(rewards, desirable),
        "preference/rejected_reward": _mean_where(rewards, ~desirable),
        "preference/accuracy": MetricValue.mean((margins.detach() > 0).sum(), len(margins)),
    }
    return weights * torch.sigmoid(-margins), metrics


def bradley_terry(scores: Tensor, margins: Tensor, *, center_coef: float) -> tuple[Tensor, Metrics]:
    """The reward model's loss: -log sigmoid(chosen - rejected - margin) + center_coef (chosen + rejected)^2.

    Args:
        scores: [P, 2] float32, of the reward model.
        margins: [P] float32, by how much the chosen score should lead, >= 0; 0 where the data do not say.
        center_coef: pulls the sum of a pair's scores to 0, which the rest of the loss leaves open; 0 = off, 0.01 in the
            paper.
    Returns:
        [P] float32 losses, and metrics over pairs: preference/margin, preference/accuracy (without the margin that is
        aimed at), preference/chosen_reward, preference/rejected_reward.
    Source: margin: Touvron et al. 2023 (Llama 2), eq. 2; centering: Eisenstein et al. 2023.
    """
    losses = -logsigmoid(scores[:, 0] - scores[:, 1] - margins) + center_coef * scores.sum(1).square()
    return losses, _pair_metrics(scores)


def _per_token(sums: Tensor, lengths: Tensor) -> Tensor:
    return sums / lengths.clamp(min=1)


def _pair_metrics(rewards: Tensor) -> Metrics:
    rewards = rewards.detach()
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    return {
        "preference/margin": MetricValue.mean((chosen - rejected).sum(), len(rewards)),
        "preference/accuracy": MetricValue.mean((chosen > rejected).sum(), len(rewards)),
        "preference/chosen_reward": MetricValue.mean(chosen.sum(), len(rewards)),
        "preference/rejected_reward": MetricValue.mean(rejected.sum(), len(rewards)),
    }


def _mean_where(values: Tensor, holds: Tensor) -> MetricValue:
    return MetricValue.mean(torch.where(holds, values.detach(), 0.0).sum(), holds.sum())

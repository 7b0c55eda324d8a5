"""Pure functions over tensors that turn rewards and logprobs into a loss.

No class, no config, no collective, no `.item()`: tensors and scalars in, tensors and partial metrics out. Losses have
the same value and gradient however a step is split, because tokens are summed and only global counts divide.
Imports torch and shardwise.types only.
"""

from shardwise.algorithms.covariance_policy_loss import clip_cov, clip_cov_selection, kl_cov, kl_cov_selection
from shardwise.algorithms.divergence_policy_loss import dppo_kl, dppo_tv
from shardwise.algorithms.group_advantages import (
    gdpo,
    gpg,
    group_metrics,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    outcome_token_rewards,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from shardwise.algorithms.kl import adaptive_kl_coef, kl_divergence
from shardwise.algorithms.masked import Aggregation, aggregate, sequence_sums, trained_mean
from shardwise.algorithms.overlong import overlong_penalty
from shardwise.algorithms.policy_loss import cispo, ppo_clip, reinforce, sapo
from shardwise.algorithms.preference_loss import bradley_terry, dpo, ipo, kto, orpo, simpo
from shardwise.algorithms.ratios import derived_mismatch_metrics, mismatch_metrics
from shardwise.algorithms.rollout_correction import correction_metrics, rollout_rejection, rollout_weights
from shardwise.algorithms.sequence_policy_loss import gmpo, gspo, kimi, topr
from shardwise.algorithms.sft_loss import cross_entropy
from shardwise.algorithms.token_advantages import gae, reinforce_plus_plus, reverse_kl_advantages
from shardwise.algorithms.turn_advantages import gigpo, turn_metrics
from shardwise.algorithms.value_loss import clipped_value_loss, explained_variance

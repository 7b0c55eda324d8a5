"""What turns rewards and logprobs into a loss: pure functions over tensors.

No class, no config, no collective, no `.item()`: tensors and scalars in, tensors and partial metrics out. Losses have
the same value and gradient however a step is split, because tokens are summed and only global counts divide.
Imports torch and shardwise.types only.
"""

from shardwise.algorithms.advantages import group_metrics, grpo, outcome_token_rewards, rloo
from shardwise.algorithms.kl import kl_divergence
from shardwise.algorithms.masked import aggregate, sequence_sums, trained_mean
from shardwise.algorithms.policy_loss import ppo_clip
from shardwise.algorithms.ratios import mismatch_metrics
from shardwise.algorithms.sft_loss import cross_entropy

"""Rollout engines: tokens in, tokens with logprobs and a policy version out."""

from shardwise.rollout.base import RolloutEngine
from shardwise.rollout.embedded import EmbeddedEngine

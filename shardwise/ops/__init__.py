"""Tensor operations that both the engine and the rollout need. Imports torch only."""

from shardwise.ops.attention import PackedLayout, attend, packed_attention
from shardwise.ops.logits import LogitTransform, project_float32, repeated_projection

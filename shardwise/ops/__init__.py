"""Tensor operations that several folders need. Imports torch only."""

from shardwise.ops.attention import PackedKernel, PackedLayout, attend, packed_attention, varlen_attention
from shardwise.ops.collectives import all_gather_flat
from shardwise.ops.families import DROPS_KEYWORDS, UNREGISTERED_ATTENTION, decoder_layers, unsupported_reason
from shardwise.ops.finite import is_finite, nonfinite_names
from shardwise.ops.logits import LogitTransform, project_float32, repeated_projection
from shardwise.ops.module_trace import ModuleTrace, Place, traced
from shardwise.ops.rotary import RotaryLimit, rotary_limit

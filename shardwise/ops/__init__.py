"""Tensor operations that several folders need. Imports torch only."""

from shardwise.ops.attention import (
    PackedKernel,
    PackedLayout,
    attend,
    packed_attention,
    seen_among_blocks,
    seen_keys,
)
from shardwise.ops.cached_blocks import release_cached_blocks
from shardwise.ops.collectives import all_gather_flat
from shardwise.ops.finite import is_finite, nonfinite_names
from shardwise.ops.host_copies import HostCopies
from shardwise.ops.logits import LogitTransform, project_float32, repeated_projection
from shardwise.ops.module_trace import ModuleTrace, Place, traced
from shardwise.ops.streams import on_current_stream
from shardwise.ops.varlen import VARLEN_READS_CACHES, varlen_attention, varlen_decode_attention, varlen_problem
from shardwise.ops.wrappers import name_without_copies, plain_name

"""Tensor operations that several folders need. Imports torch only."""

from shardwise.ops.attention import (
    VARLEN_READS_CACHES,
    PackedKernel,
    PackedLayout,
    attend,
    packed_attention,
    seen_keys,
    varlen_attention,
    varlen_decode_attention,
    varlen_problem,
)
from shardwise.ops.collectives import all_gather_flat
from shardwise.ops.families import (
    DROPS_KEYWORDS,
    UNREGISTERED_ATTENTION,
    VISION_CONFIG,
    attention_layers,
    attention_of,
    backbone,
    decoder_layers,
    hand_on_keywords,
    language_model_class,
    packed_tokens_limit,
    sequence_mixers,
    takes_images,
    unsupported_reason,
    vision_path,
    vision_reason,
)
from shardwise.ops.finite import is_finite, nonfinite_names
from shardwise.ops.host_copies import HostCopies
from shardwise.ops.logits import LogitTransform, project_float32, repeated_projection
from shardwise.ops.masks import HAS_OWN_MASK, Mask, attention_span, is_own_mask, mask_as_span
from shardwise.ops.module_trace import ModuleTrace, Place, traced
from shardwise.ops.proven import (
    CHECKS,
    PROVEN,
    other_release,
    proven_record,
    proven_release,
    unproven_reason,
    with_release,
)
from shardwise.ops.rotary import RotaryLimit, rotary_limit
from shardwise.ops.routers import EXPERTS, ROUTER_NAMES, Router, UnreadableRouter, routers_of
from shardwise.ops.wrappers import name_without_copies, plain_name

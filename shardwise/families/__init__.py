"""What is known about model families: which are proven or refused, and where their parts are. Loads no model."""

from shardwise.families.key_choice import HIDES_CHOICE, KeyChoice, defer_choices, lacks_choice
from shardwise.families.masks import (
    HAS_OWN_MASK,
    Mask,
    attention_span,
    image_blocks,
    is_own_mask,
    mask_as_span,
    shows_blocks,
)
from shardwise.families.proven import (
    CHECKS,
    PROVEN,
    is_proven,
    other_release,
    proven_record,
    proven_release,
    unproven_reason,
    with_release,
)
from shardwise.families.rotary import RotaryLimit, context_of, rotary_limit
from shardwise.families.routers import (
    EXPERTS,
    ROUTER_NAMES,
    ROW_BYTES,
    Router,
    UnreadableRouter,
    avoid_unaligned,
    routers_of,
    unaligned_expert,
)
from shardwise.families.support import (
    DROPS_KEYWORDS,
    FOR_IMAGES_ALONE,
    UNREGISTERED_ATTENTION,
    attention_layers,
    attention_of,
    backbone,
    decoder_layers,
    families_of,
    finds_positions,
    hand_on_keywords,
    indexers,
    language_model_class,
    packed_tokens_limit,
    sees_images_both_ways,
    sequence_mixers,
    takes_images,
    unreached_modules,
    unseen_modules,
    unsupported_reason,
    vision_paths,
    vision_reason,
    wrapper_reason,
)
from shardwise.families.towers import (
    VISION_CONFIG,
    Gemma3Tower,
    Gemma4Tower,
    GridTower,
    Idefics3Tower,
    InternVLTower,
    Lfm2VlTower,
    LlavaNextTower,
    LlavaOnevisionTower,
    LlavaTower,
    PixtralTower,
    TileTower,
    Tower,
    tower_of,
)

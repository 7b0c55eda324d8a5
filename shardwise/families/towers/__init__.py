"""How models are given images: what their vision towers read, and how many tokens they make of it."""

from typing import Any

from shardwise.families.towers.base import Tower
from shardwise.families.towers.gemma3 import Gemma3Tower
from shardwise.families.towers.gemma4 import Gemma4Tower
from shardwise.families.towers.grid import GridTower
from shardwise.families.towers.idefics3 import Idefics3Tower
from shardwise.families.towers.internvl import InternVLTower
from shardwise.families.towers.lfm2_vl import Lfm2VlTower
from shardwise.families.towers.llava import LlavaNextTower, LlavaOnevisionTower, LlavaTower
from shardwise.families.towers.pixtral import PixtralTower
from shardwise.families.towers.tiles import TileTower

VISION_CONFIG = "vision_config"
_GRID_SIZES = ("spatial_merge_size", "in_channels", "temporal_patch_size", "patch_size")
"""What the config of a tower says that is given grids."""


def tower_of(config: Any) -> Tower | None:
    """Returns the vision tower of a model with this config; None if it has none, or one of another kind."""
    vision = getattr(config, VISION_CONFIG, None)
    if all(hasattr(vision, name) for name in _GRID_SIZES):
        return GridTower.of(vision)
    match config.model_type, getattr(vision, "model_type", None):
        case "mistral3" | "llava", "pixtral":
            return PixtralTower.of(config)
        case "gemma3", "siglip_vision_model":
            return Gemma3Tower.of(config)
        case "gemma4", "gemma4_vision":
            return Gemma4Tower.of(vision)
        case "idefics3" | "smolvlm", _:
            return Idefics3Tower.of(config)
        case "internvl", _:
            return InternVLTower.of(config)
        case "lfm2_vl", "siglip2_vision_model":
            return Lfm2VlTower.of(config)
        case "llava", "clip_vision_model" | "siglip_vision_model":
            return LlavaTower.of(config)
        case "llava_next", "clip_vision_model" | "siglip_vision_model":
            return LlavaNextTower.of(config)
        case "llava_onevision", "siglip_vision_model":
            return LlavaOnevisionTower.of(config)
    return None

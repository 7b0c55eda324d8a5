"""How vLLM is given prompts: their tokens, and their images as they are prepared for training.

vLLM is imported when it is used, so that this file can be read without it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from shardwise.checksum import checksum
from shardwise.config import ConfigError, ModelError
from shardwise.families import finds_positions, takes_images
from shardwise.rollout.own_arguments import OwnArgument
from shardwise.rollout.vision import image_spans
from shardwise.types import GenerateRequest, Images

if TYPE_CHECKING:
    from vllm.inputs import EngineInput

_KIND = "image"
"""vLLM's name of what a prompt has beside words."""
_OF_ROPE = {"mrope_section": "[...]", "mrope_interleaved": "true"}
"""What vLLM takes from config.json alone, and transformers has a value for where it is not there."""


def shows_images(model: PreTrainedModel) -> bool:
    """Whether vLLM is given the images of a model: of those families that find positions, Qwen's and GLM's."""
    return takes_images(model) and finds_positions(model)


def image_arguments(folder: Path, model: PreTrainedModel) -> dict[str, OwnArgument]:
    """Returns arguments for EngineArgs for a model that sees images.

    Args:
        model: that of the folder in transformers, also on the meta device.
    Raises:
        ModelError: vLLM would place its tokens otherwise than transformers does.
    """
    if not shows_images(model):
        return {}
    config = model.config.get_text_config()
    known = getattr(config, "ignore_keys_at_rope_validation", ())
    for key, value in _OF_ROPE.items():
        if key in known and not config.rope_parameters.get(key):
            raise ModelError(
                f"{folder}: vLLM would place the tokens of images otherwise than {type(model).__name__}, which has a "
                f'default of its own; add "{key}": {value} to rope_parameters in its config.json'
            )
    return {
        "mm_device_do_normalize": OwnArgument(False),  # pixels come as numbers that the tower reads
        "mm_processor_cache_gb": OwnArgument(0),  # of a processor that has nothing to do
    }


def engine_input(request: GenerateRequest, model: PreTrainedModel) -> "EngineInput":
    """A prompt, with what was sampled behind it before an interruption.

    Args:
        model: in transformers, also on the meta device.
    Raises:
        ModelError: as `image_spans`.
        ConfigError: the prompt has images that vLLM is not given.
    """
    spans = image_spans(request, model)
    if request.images is not None and not shows_images(model):
        raise ConfigError(
            f"{request.uid} has images, which rollout.engine=vllm is not given for the family "
            f"{model.config.model_type}; use rollout.engine=embedded"
        )
    from vllm.inputs import mm_input, tokens_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    token_ids = request.prompt_ids + request.partial_token_ids
    if request.images is None:
        return tokens_input(token_ids)
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes(_KIND, request.images.num_patches),
        "image_grid_thw": MultiModalFieldConfig.batched(_KIND, keep_on_cpu=True),
    }
    values = {"pixel_values": request.images.pixel_values, "image_grid_thw": request.images.sizes}
    return mm_input(
        token_ids,
        MultiModalKwargsItems.from_hf_inputs(values, fields),
        {_KIND: _digests(request.images)},
        {_KIND: [PlaceholderRange(start, length) for start, length in spans]},
    )


def _digests(images: Images) -> list[str]:
    """Which tell images from each other where vLLM keeps what it has computed of them."""
    parts = images.pixel_values.split(images.num_patches.tolist())
    return [f"{checksum(pixels):x} {size.tolist()}" for pixels, size in zip(parts, images.sizes, strict=True)]

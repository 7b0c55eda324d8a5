"""Tokens that end completions, or never come, whatever the engine."""

from collections.abc import Sequence

from transformers import GenerationConfig, PretrainedConfig

from shardwise.config import ConfigError, ModelError


def end_of_sequence_ids(generation: GenerationConfig | None, config: PretrainedConfig) -> list[int]:
    """Of the generation config, or of the config where that has none.

    Raises:
        ModelError: neither has one.
    """
    ids = None if generation is None else generation.eos_token_id
    if ids is None:
        ids = config.eos_token_id
    if ids is None:
        raise ModelError(
            f"{config.model_type}: neither generation_config.json nor config.json has an eos_token_id, so no "
            "completion would ever end; set one"
        )
    return [ids] if isinstance(ids, int) else list(ids)


def require_words(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ConfigError unless the vocabulary has all of them."""
    unknown = [token for token in token_ids if token >= vocab_size]
    if unknown:
        raise ConfigError(
            f"rollout.stop_token_ids and bad_token_ids have {unknown[0]}, but the model's vocabulary ends at "
            f"{vocab_size - 1}; remove it"
        )

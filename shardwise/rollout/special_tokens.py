"""Checks of the tokens that end completions or are never drawn, for every engine."""

from collections.abc import Sequence

from transformers import GenerationConfig, PretrainedConfig

from shardwise.config import ConfigError, ModelError
from shardwise.model_config import end_of_sequence_ids


def require_ends(generation: GenerationConfig | None, config: PretrainedConfig) -> list[int]:
    """Returns the tokens that end completions. Raises ModelError if neither config names any."""
    ids = end_of_sequence_ids(generation, config)
    if not ids:
        raise ModelError(
            f"{config.model_type}: neither generation_config.json nor config.json has an eos_token_id, so no "
            "completion would ever end; set one"
        )
    return ids


def require_words(stop_token_ids: Sequence[int], bad_token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ConfigError if a token is outside the vocabulary or in both lists, or if no token is left to draw."""
    unknown = [token for token in (*stop_token_ids, *bad_token_ids) if not 0 <= token < vocab_size]
    if unknown:
        raise ConfigError(
            f"rollout.stop_token_ids and bad_token_ids have {unknown[0]}, but the model's vocabulary begins at 0 and "
            f"ends at {vocab_size - 1}; remove it"
        )
    if both := sorted(set(stop_token_ids) & set(bad_token_ids)):
        raise ConfigError(
            f"rollout.stop_token_ids and bad_token_ids both have {both[0]}, which never comes and so ends nothing; "
            "remove it from one of them"
        )
    if len(set(bad_token_ids)) == vocab_size:
        raise ConfigError(
            f"rollout.bad_token_ids leave none of the model's {vocab_size} tokens to draw; remove some of them"
        )

"""Builds what samples completions, as a GenerationConfig says."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from shardwise.config import EmbeddedRollout, GenerationConfig, LoraConfig, ModelConfig, VllmRollout
from shardwise.data import load_tokenizer
from shardwise.rollout import EmbeddedEngine, RolloutEngine, VllmEngine


def build_rollout(
    model: ModelConfig,
    config: GenerationConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    lora: LoraConfig | None = None,
) -> RolloutEngine:
    """A rollout engine with the weights of a local model folder. Raises as the engine's `from_folder`.

    Args:
        lora: of the adapter that weight syncs will bring by itself; None: they bring the whole model.
    """
    shared: dict[str, Any] = {
        "dtype": dtype,
        "max_rows": config.max_concurrent_sequences,
        "device": device,
        "stop_token_ids": config.stop_token_ids,
        "bad_token_ids": config.bad_token_ids,
    }
    match config.engine:
        case EmbeddedRollout():
            decode = partial(load_tokenizer(model).decode, skip_special_tokens=True) if config.stop else None
            return EmbeddedEngine.from_folder(
                Path(model.path),
                decode=decode,
                compile_decode=config.engine.compile_decode,
                attach_adapter=None if lora is None else _attaching(lora),
                **shared,
            )
        case VllmRollout():
            return VllmEngine.from_folder(
                Path(model.path),
                config.engine,
                temperature=config.temperature,
                has_stop_strings=bool(config.stop),
                **shared,
            )


def _attaching(lora: LoraConfig) -> Callable[[PreTrainedModel], dict[str, str]]:
    from shardwise.engine.adapters import attach_adapter  # peft takes a second to import

    return partial(attach_adapter, config=lora)

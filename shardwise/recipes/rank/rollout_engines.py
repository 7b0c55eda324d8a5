"""Builds the rollout engine that a SamplingConfig describes."""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from shardwise.config import (
    EmbeddedRollout,
    EngineProcessConfig,
    LoraConfig,
    ModelConfig,
    SamplingConfig,
    SglangRollout,
    VllmRollout,
)
from shardwise.data import load_tokenizer
from shardwise.rollout import (
    EmbeddedEngine,
    EngineProcess,
    RolloutEngine,
    SglangEngine,
    SupervisedEngine,
    VllmEngine,
    environment_of,
)


def build_rollout(
    model: ModelConfig,
    config: SamplingConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    lora: LoraConfig | None = None,
) -> RolloutEngine:
    """Builds a rollout engine with the weights of a local model folder, in this process or in one of its own. Raises as
    the engine's `from_folder`, and EngineLostError: no process lived until its engine was built.

    Args:
        lora: the adapter, if weight syncs bring it alone; None: they bring the whole model.
    """
    if config.engine.process is not None:
        return _supervised(model, config, config.engine.process, dtype=dtype, device=device, lora=lora)
    return build_here(model, config, dtype=dtype, device=device, lora=lora)


def build_here(
    model: ModelConfig,
    config: SamplingConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    lora: LoraConfig | None = None,
) -> EmbeddedEngine | VllmEngine | SglangEngine:
    """Builds the engine in this process, whatever rollout.engine.process says; see `build_rollout`."""
    shared: dict[str, Any] = {
        "dtype": dtype,
        "max_rows": config.max_concurrent_sequences,
        "device": device,
        "stop_token_ids": config.stop_token_ids,
        "bad_token_ids": config.bad_token_ids,
    }
    attaching = None if lora is None else _attaching(lora)
    match config.engine:
        case EmbeddedRollout():
            return EmbeddedEngine.from_folder(
                Path(model.path),
                decode=_decode(model, config),
                compile_decode=config.engine.compile_decode,
                sleep_level=config.engine.sleep_level,
                allow_unproven=config.engine.allow_unproven,
                attach_adapter=attaching,
                **shared,
            )
        case VllmRollout():
            return VllmEngine.from_folder(
                Path(model.path),
                config.engine,
                temperature=config.temperature,
                has_stop_strings=bool(config.stop),
                attach_adapter=attaching,
                **shared,
            )
        case SglangRollout():
            return SglangEngine.from_folder(Path(model.path), config.engine, decode=_decode(model, config), **shared)


def _decode(model: ModelConfig, config: SamplingConfig) -> Callable[[list[int]], str] | None:
    """Returns what turns tokens into the text that stop strings are looked for in; None without such strings."""
    return partial(load_tokenizer(model).decode, skip_special_tokens=True) if config.stop else None


def _attaching(lora: LoraConfig) -> Callable[[PreTrainedModel], dict[str, str]]:
    from shardwise.engine.files.adapters import attach_adapter  # peft takes a second to import

    return partial(attach_adapter, config=lora)


def _supervised(
    model: ModelConfig,
    config: SamplingConfig,
    process: EngineProcessConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    lora: LoraConfig | None,
) -> SupervisedEngine:
    """Builds the engine in a process of its own."""
    num_devices = config.engine.tensor_parallel_size if isinstance(config.engine, VllmRollout) else 1
    setup = {
        "model": model.model_dump(mode="json"),
        "rollout": config.model_dump(mode="json"),
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "lora": None if lora is None else lora.model_dump(mode="json"),
    }
    environment = environment_of(device, num_devices=num_devices)
    name = f"the rollout engine of rank {os.environ.get('RANK', '0')}"

    def start(memory_fd: int) -> EngineProcess:
        return EngineProcess(
            [sys.executable, "-m", "shardwise.recipes.rank.engine_child"],
            json.dumps(setup),
            environment=environment,
            memory_fd=memory_fd,
            config=process,
            name=name,
        )

    return SupervisedEngine(start, max_restarts=process.max_restarts, name=name)

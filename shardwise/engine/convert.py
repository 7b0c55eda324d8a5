"""A model folder written again in another dtype, adapters merged; no rank needs more memory than its shard of it."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.config import ConfigError, ExportError, ModelError
from shardwise.engine.agreement import raised_on_every_rank
from shardwise.engine.conversions import stored_dtypes
from shardwise.engine.export import export_folder, require_finite
from shardwise.engine.heads import VALUE_PROJECTIONS
from shardwise.engine.loading import load_weights
from shardwise.engine.model_classes import class_named
from shardwise.engine.model_folder import take_generation_config
from shardwise.engine.shards import local_shard
from shardwise.model_config import blaming_config, read_model_config


def convert_folder(
    source: Path,
    target: Path,
    tokenizer: Any,
    dtype: torch.dtype,
    *,
    max_shard_size: str,
    device: torch.device,
    adapter: Path | None = None,
) -> None:
    """Collective. Loads a model folder (and an adapter folder) over all ranks and writes it in `dtype`.

    No engine is built: a model that cannot be trained here can be converted all the same.

    Raises:
        ModelError, ConfigError: on every rank: source or adapter cannot be loaded. ExportError: on every rank: target
            cannot be written, or a weight holds NaN or an infinity in the dtype.
    """
    with raised_on_every_rank(ModelError, ConfigError):
        model = on_meta(source, dtype)
        if adapter is not None:
            _inject_adapter(model, source, adapter)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    fully_shard(nn.Sequential(model), mesh=mesh)  # around the model: what is sharded itself changes its class
    model.requires_grad_(False).to_empty(device=device)
    load_weights(model, source)
    if adapter is not None:
        from shardwise.engine.adapters import load_adapter

        load_adapter(model, adapter)
    with raised_on_every_rank(ExportError):
        require_finite({name: local_shard(tensor) for name, tensor in model.state_dict().items()})
    export_folder(model, tokenizer, target, dtype, max_shard_size=max_shard_size)


def _inject_adapter(model: PreTrainedModel, source: Path, adapter: Path) -> None:
    from shardwise.engine.lora import inject_lora, stored_lora  # importing peft takes seconds

    lora = stored_lora(adapter)
    if not set(VALUE_PROJECTIONS).isdisjoint(lora.modules_to_save) and model.get_output_embeddings() is not None:
        raise ModelError(
            f"{adapter} is the adapter of a critic or reward model, and {source} is a language model, which has no "
            "head to merge its head into; train with engine.lora.save_merged=true"
        )
    inject_lora(model, lora)


def on_meta(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model that config.json names, every parameter in the dtype it will be stored in.

    Raises:
        ModelError: its class is none of transformers, and none that an export made.
    """
    config = read_model_config(folder)
    model_class = _model_class(folder, config)
    with blaming_config(folder, model_class.__name__), torch.device("meta"):
        model = model_class._from_config(config, dtype=dtype)
    take_generation_config(model, folder)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for name, stored in stored_dtypes(model, model.state_dict(), dtype).items():
        tensors[name].data = tensors[name].data.to(stored)
    return model


def _model_class(folder: Path, config: PreTrainedConfig) -> type[PreTrainedModel]:
    for name in config.architectures or []:
        found: type[PreTrainedModel] | None = getattr(transformers, name, None) or class_named(name, config)
        if found is not None:
            return found
    raise ModelError(
        f"{folder / 'config.json'} names the architectures {config.architectures}, none of which transformers "
        f"{transformers.__version__} knows; models with code of their own cannot be exported"
    )

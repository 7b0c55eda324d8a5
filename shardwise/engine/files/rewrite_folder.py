"""Rewrites a model folder in another dtype, adapters merged; no rank needs more memory than its shard of the model."""

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
from shardwise.engine.files.export import export_folder, require_finite
from shardwise.engine.files.loading import load_weights
from shardwise.engine.files.model_folder import take_generation_config
from shardwise.engine.heads import HeadName, fresh_head
from shardwise.engine.model_classes import class_named, declaring_float32, kind_of, model_from_config
from shardwise.engine.runtime_state import buffer_names
from shardwise.engine.shards import local_shard
from shardwise.model_config import blaming_config, read_model_config
from shardwise.stored_dtypes import stored_dtypes


def rewrite_folder(
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
    head: HeadName = "logprobs"
    with raised_on_every_rank(ModelError, ConfigError):
        if adapter is None:
            model = on_meta(source, dtype)
        else:
            model, head = _adapted(source, adapter, dtype, tokenizer)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    fully_shard(nn.Sequential(model), mesh=mesh)  # wrapped, because a module that is sharded changes its class
    model.requires_grad_(False).to_empty(device=device)
    load_weights(model, source, fresh=fresh_head(model, head))
    if adapter is not None:
        from shardwise.engine.files.adapters import load_adapter

        load_adapter(model, adapter)
    with raised_on_every_rank(ExportError):
        shards = {name: local_shard(tensor) for name, tensor in model.state_dict().items()}
        require_finite(shards, buffers=buffer_names(model))
    export_folder(model, tokenizer, target, dtype, max_shard_size=max_shard_size)


def _adapted(source: Path, adapter: Path, dtype: torch.dtype, tokenizer: Any) -> tuple[PreTrainedModel, HeadName]:
    """Returns the model that an adapter was trained on, with a place for the adapter, and the model's head, which the
    adapter holds if it is a value head."""
    from shardwise.engine.files.adapters import StoredForm  # importing peft takes seconds
    from shardwise.engine.lora import inject_lora

    form = StoredForm.of(adapter)
    model = on_meta(source, dtype, form.head)
    take_generation_config(model, adapter)  # the run's: with the token that it learned to end turns with
    if form.head == "sequence_scores" and tokenizer.pad_token_id is not None:
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    inject_lora(model, form.lora, form.head)
    return model, form.head


def on_meta(folder: Path, dtype: torch.dtype, head: HeadName = "logprobs") -> PreTrainedModel:
    """Builds the model that config.json names, or one with a value head on it, on the meta device, with every parameter
    in the dtype that it will be stored in.

    Raises:
        ModelError: its class is neither one of transformers nor one that an export made.
    """
    options: dict[str, Any] = {} if head == "logprobs" else {"num_labels": 1}
    config = read_model_config(folder, **options)
    if head == "logprobs":
        model_class = _model_class(folder, config)
        with blaming_config(folder, model_class.__name__), torch.device("meta"):
            model = declaring_float32(model_class._from_config(config, dtype=dtype))
        take_generation_config(model, folder)
    else:
        with blaming_config(folder, kind_of(head)), torch.device("meta"):
            model = model_from_config(config, head, dtype=dtype)
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

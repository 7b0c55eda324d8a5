"""Writes a model again as a Hugging Face folder, in another dtype; no rank needs more memory than its shard of it."""

from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from shardwise.config import ConfigError, ModelConfig, ModelError
from shardwise.controller.base import WorkerGroup
from shardwise.data import load_tokenizer
from shardwise.engine import export_folder, load_weights, stored_dtypes
from shardwise.recipes.build import open_model


def export(source: str, target: str, group: WorkerGroup, *, dtype: str | None, max_shard_size: str) -> None:
    """Runs on rank 0; every rank loads and writes its part.

    Args:
        source: a run's output folder (its newest checkpoint), a model folder, or a hub name.
        target: a folder that does not exist yet, or an empty one.
        dtype: of the written weights; None keeps the one that the source's config.json names.
        max_shard_size: of a weight file, such as "5GB".
    Raises:
        ConfigError: there is something in target, or no dtype is known. ModelError: source cannot be loaded.
        ExportError: target cannot be written.
    """
    folder = Path(target)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{target} is not an empty folder; name a new one, or remove what is there")
    opened = open_model(ModelConfig(path=source))
    dtype = dtype if dtype is not None else _named_dtype(opened.folder)
    group.call("export_model", str(opened.folder), target, dtype, max_shard_size)
    files = list(folder.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    print(f"{target}: {dtype}, {num_bytes / 2**30:.2f} GiB in {len(files)} files", flush=True)


def convert(source: Path, target: Path, dtype: torch.dtype, *, max_shard_size: str, device: torch.device) -> None:
    """Collective. Loads a model folder over all ranks and writes it in `dtype`.

    No engine is built: a model that cannot be trained here can be converted all the same.
    """
    tokenizer = load_tokenizer(ModelConfig(path=str(source)))
    model = _empty_sharded(source, dtype, device)
    load_weights(model, source)
    export_folder(model, tokenizer, target, dtype, max_shard_size=max_shard_size)


def _empty_sharded(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Every parameter in the dtype it will be stored in, sharded over all ranks, never written."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = _model_class(folder, config.architectures)._from_config(config, dtype=dtype)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for name, stored in stored_dtypes(model, model.state_dict(), dtype).items():
        tensors[name].data = tensors[name].data.to(stored)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    fully_shard(nn.Sequential(model), mesh=mesh)  # around the model: what is sharded itself changes its class
    return model.to_empty(device=device)


def _model_class(folder: Path, architectures: list[str] | None) -> type[PreTrainedModel]:
    for name in architectures or []:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    raise ModelError(
        f"{folder / 'config.json'} names the architectures {architectures}, none of which transformers "
        f"{transformers.__version__} knows; models with code of their own cannot be exported"
    )


def _named_dtype(folder: Path) -> str:
    dtype = AutoConfig.from_pretrained(folder).dtype
    if dtype is None:
        raise ConfigError(f"{folder / 'config.json'} names no dtype; choose one with --dtype, such as bfloat16")
    return str(dtype).removeprefix("torch.")

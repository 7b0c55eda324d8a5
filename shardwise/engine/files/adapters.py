"""The tensors of LoRA adapters on a sharded model: drawn, written as peft writes them, and read back.

peft's own code for this needs whole tensors; here every rank works on its rows.
"""

import copy
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME

from shardwise.config import LoraConfig, ModelError
from shardwise.durable import fsync_folder
from shardwise.engine.agreement import raised_on_every_rank, written_on_every_rank
from shardwise.engine.files.loading import LOADABLE_DTYPES, LOADABLE_NAMES
from shardwise.engine.files.safetensors_file import SafetensorsReader, differences
from shardwise.engine.gathering import gathered, gathered_in_order
from shardwise.engine.heads import VALUE_PROJECTIONS, HeadName
from shardwise.engine.lora import (
    ADAPTER,
    TASK_TYPES,
    adapted_weights,
    adapter_names,
    inject_lora,
    stored_config,
    stored_targets,
    trained_copies,
)
from shardwise.engine.quantized import FORMAT, quantized_weights
from shardwise.engine.runtime_state import runtime_names, runtime_state
from shardwise.engine.shards import local_box, local_shard
from shardwise.ops import nonfinite_names
from shardwise.stored_dtypes import stored_dtypes

WITHOUT_EFFECT_ON_WEIGHTS = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "modules_to_save",
    "peft_version",
    "revision",
    "runtime_config",
    "target_modules",
    "target_parameters",
    "task_type",
}
"""Keys of adapter_config.json that may differ from ours: which modules are adapted shows in the tensors' names, and
peft tells from the layer's class whether a weight is [in, out], whatever the file says."""
_DRAW_THE_ADAPTER_ALONE = (True, False, "gaussian", "orthogonal")
"""Values of init_lora_weights that only say how A and B were drawn, which loading replaces. Other values also change
the base or the ranks."""
_QUANTIZE_BASE = "quantize_base"
"""Key in the metadata of adapter_model.safetensors: the format of the base that the adapter was trained on, if that was
quantized. adapter_config.json has no key for it, and peft would warn of one of ours."""
_KEYS_OF_OURS = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "use_rslora", "use_dora": "use_dora"}
"""The keys that may not differ and that engine.lora can set, each with its name there."""


@torch.no_grad()
def init_adapters(model: PreTrainedModel, seed: int) -> None:
    """Collective. Fills the adapters with what peft draws, the same on every layout: A kaiming-uniform, B zero, DoRA's
    magnitudes the norms of the base's outputs. To be called after the base is loaded; modules_to_save are loaded like
    the base.

    Each A is drawn whole on the CPU from a generator of its own, seeded by (seed, name); a rank keeps its rows. An
    output is a row of the base; where it is a column (Conv1D), every rank has a part of it, and the base is gathered.
    """
    state = model.state_dict()
    for adapted in adapted_weights(model).values():
        path = adapted.path
        lora_a = state[f"{path}.lora_A.{ADAPTER}.weight"]
        digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
        drawn = torch.empty(lora_a.shape, device="cpu")
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        local_shard(lora_a).copy_(drawn[tuple(local_box(lora_a))])
        local_shard(state[f"{path}.lora_B.{ADAPTER}.weight"]).zero_()
        magnitude = state.get(f"{path}.lora_magnitude_vector.{ADAPTER}.weight")
        if magnitude is not None:
            base = state[f"{path}.base_layer.weight"]
            if adapted.is_transposed:
                norms = torch.linalg.vector_norm(gathered(base, torch.float32), dim=0)[tuple(local_box(magnitude))]
            else:
                norms = torch.linalg.vector_norm(local_shard(base).float(), dim=1)
            local_shard(magnitude).copy_(norms)


def attach_adapter(model: PreTrainedModel, config: LoraConfig) -> dict[str, str]:
    """Puts an adapter of zeros into an unsharded model, over which the weights to compute with are then copied.

    Returns:
        Name in an adapter file -> name in `model.state_dict()`.
    Raises:
        ConfigError: as `inject_lora`.
    """
    inject_lora(model, config)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                zeros = torch.zeros(parameter.shape, dtype=model.dtype, device=model.device)
                setattr(module, name, nn.Parameter(zeros, requires_grad=False))
    return {in_file: name for name, in_file in adapter_names(model).items()}


def adapter_weights(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Collective. Yields (name in an adapter file, full tensor) of everything trained, one at a time: in
    `dtype`, trained copies of what transformers keeps in float32 (routers) in that."""
    state = model.state_dict()
    names, bases = adapter_names(model), runtime_names(model)
    stored = stored_dtypes(model, runtime_state(model), dtype)
    copies = {copy: stored.get(bases[name], dtype) for name, copy in trained_copies(model).items()}
    wholes = gathered_in_order((state[name], copies.get(name, dtype)) for name in names)
    for in_file in names.values():
        yield in_file, next(wholes)


def export_adapter(model: PreTrainedModel, path: Path, base_model_name: str) -> None:
    """Collective. Writes a folder that `PeftModel.from_pretrained(base, path)` loads: the config and float32 tensors.

    Rank 0 writes to a temporary name and renames it when everything is on disk, so `path` is whole or absent.

    Raises:
        ExportError: on every rank, if it could not be written.
    """
    adapter = StagedAdapter.of(model, base_model_name)
    staging = path.with_name(f".{path.name}.partial")
    with written_on_every_rank(path):
        if dist.get_rank() == 0:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            adapter.write(staging)
            shutil.rmtree(path, ignore_errors=True)
            os.replace(staging, path)


@dataclass(frozen=True, slots=True)
class StagedAdapter:
    """An adapter on its way into a folder, as it was when it was staged."""

    _config: Any
    _generation_config: Any
    """The generation config of a language model, which says what ends a completion; None for other models."""
    _metadata: dict[str, str]
    """Metadata of the file with the tensors."""
    _tensors: dict[str, Tensor]
    """Whole tensors on rank 0, nothing elsewhere: adapters are small."""

    @classmethod
    def of(cls, model: PreTrainedModel, base_model_name: str) -> Self:
        """Collective. Stages the adapter of a model: its tensors are copied to the host of rank 0."""
        config = copy.copy(model.peft_config[ADAPTER])
        config.base_model_name_or_path = base_model_name
        config.inference_mode = True
        config.target_modules = sorted(config.target_modules)  # peft keeps a set, whose order differs from run to run
        if config.target_parameters is not None:
            config.target_parameters = sorted(config.target_parameters)
        tensors = {}
        for name, tensor in adapter_weights(model, torch.float32):
            if dist.get_rank() == 0:
                tensors[name] = tensor.to("cpu", copy=True).contiguous()
        metadata = {"format": "pt"} | ({_QUANTIZE_BASE: FORMAT} if quantized_weights(model) else {})
        return cls(config, model.generation_config if model.can_generate() else None, metadata, tensors)

    def nonfinite_names(self) -> list[str]:
        """Names of the tensors that hold NaN or an infinity; on rank 0."""
        return nonfinite_names(self._tensors.items())

    def write(self, folder: Path) -> None:
        """Writes the adapter durably into an existing folder; called on rank 0. Raises OSError."""
        self._config.save_pretrained(str(folder))
        if self._generation_config is not None:
            self._generation_config.save_pretrained(folder)
        try:
            save_file(self._tensors, folder / ADAPTER_SAFE_WEIGHTS_NAME, metadata=self._metadata)
        except SafetensorError as error:  # its error for a full disk
            raise OSError(str(error)) from None
        fsync_folder(folder)


@dataclass(frozen=True, slots=True)
class StoredForm:
    """The settings of an adapter in a folder, and the head of the model that it adapts."""

    lora: LoraConfig
    head: HeadName
    """Head of the model that it adapts."""

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Reads it from the folder. Raises ModelError: there is no adapter, or it is not one of LoRA."""
        stored = stored_config(folder)
        with closing(SafetensorsReader(folder / ADAPTER_SAFE_WEIGHTS_NAME)) as file:
            is_quantized = _QUANTIZE_BASE in file.metadata
            targets = stored_targets(stored, file.specs)
        lora = LoraConfig(
            rank=stored.r,
            alpha=stored.lora_alpha,
            target_modules=targets,
            target_parameters=sorted(stored.target_parameters or ()),
            # peft names every possible value head; ours are trained whole without being named.
            modules_to_save=[name for name in stored.modules_to_save or () if name not in VALUE_PROJECTIONS],
            use_dora=stored.use_dora,
            use_rslora=stored.use_rslora,
            quantize_base=FORMAT if is_quantized else None,
        )
        heads = {task_type: head for head, task_type in TASK_TYPES.items()}
        return cls(lora, heads.get(stored.task_type, "logprobs"))


@torch.no_grad()
def load_adapter(model: PreTrainedModel, folder: Path, *, require_finite: bool = True) -> None:
    """Collective. Fills the adapters of a materialized model from an adapter folder; each rank reads its rows only.

    Args:
        require_finite: False also takes adapters that hold NaN or infinities.
    Raises:
        ModelError: on every rank: no adapter there, one of another form (rank, alpha, DoRA), or tensors missing, left
            over, of another shape or of a dtype that is no weight's; lists them. Or one holds NaN or an infinity where
            any rank reads it.
    """
    with raised_on_every_rank(ModelError):
        _load_rows(model, folder, require_finite=require_finite)


def _load_rows(model: PreTrainedModel, folder: Path, *, require_finite: bool) -> None:
    try:
        written = json.loads((folder / ADAPTER_CONFIG_NAME).read_text())
        if not isinstance(written, dict):
            raise ValueError(f"{ADAPTER_CONFIG_NAME} is not a JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} cannot be read as a LoRA adapter: {error}") from None
    stored = stored_config(folder)  # where a key is not written, peft's default is meant
    _check_config(model, folder, written | {key: getattr(stored, key) for key in _KEYS_OF_OURS})
    state = model.state_dict()
    wanted = {in_file: state[name] for name, in_file in adapter_names(model).items()}
    with closing(SafetensorsReader(folder / ADAPTER_SAFE_WEIGHTS_NAME, require_finite=require_finite)) as file:
        if _QUANTIZE_BASE in file.metadata and not quantized_weights(model):
            raise ModelError(
                f"{folder}: the adapter was trained on a base in 4 bits, and this one is whole; set "
                f"engine.lora.quantize_base={FORMAT}, or merge it first (`shardwise export`) and give the result as "
                "model.path"
            )
        expected = {name: list(tensor.shape) for name, tensor in wanted.items()}
        if problems := differences(expected, {name: list(spec.shape) for name, spec in file.specs.items()}):
            raise ModelError(
                f"{folder}: the adapter does not fit engine.lora (target_modules, target_parameters, modules_to_save) "
                f"and engine.freeze_module_prefix: {problems}"
            )
        for name, spec in file.specs.items():
            if spec.dtype not in LOADABLE_DTYPES:
                raise ModelError(
                    f"{file.path}: {name} is {spec}, and adapters are stored as {LOADABLE_NAMES}; save it again with "
                    "peft's save_pretrained"
                )
        for name, tensor in wanted.items():
            local_shard(tensor).copy_(file.read(name, local_box(tensor)))


def _check_config(model: PreTrainedModel, folder: Path, stored: dict[str, object]) -> None:
    """Raises ModelError unless what the tensors' names and shapes do not show is equal: alpha, rsLoRA, DoRA and
    variants of peft."""
    ours = model.peft_config[ADAPTER].to_dict()
    if stored.get("init_lora_weights") in _DRAW_THE_ADAPTER_ALONE:
        ours |= {"init_lora_weights": stored["init_lora_weights"]}
    different = [
        key
        for key, value in sorted(stored.items())
        if key not in WITHOUT_EFFECT_ON_WEIGHTS and (ours.get(key) or None) != (value or None)
    ]
    if not different:
        return
    shown = ", ".join(f"{key}={stored[key]!r} (here {ours.get(key)!r})" for key in different)
    if foreign := [key for key in different if key not in _KEYS_OF_OURS]:
        raise ModelError(
            f"{folder}: the adapter has {shown}; engine.lora knows no {', '.join(foreign)}, so merge the adapter into "
            "its base (peft's merge_and_unload) and give that as model.path"
        )
    named = ", ".join(f"{_KEYS_OF_OURS[key]} ({key} in the file)" for key in different)
    raise ModelError(
        f"{folder}: the adapter has {shown}; give engine.lora the adapter's {named}, or start without the adapter"
    )

"""How vLLM is given weights: the whole model by its names in a checkpoint, or an adapter by itself.

vLLM is imported when it is used, so that this file can be read without it.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.checksum import checksum
from shardwise.config import ConfigError, TrainingError, in_one_line
from shardwise.processes import die_with
from shardwise.scratch import scratch_folder

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

_IN_MEMORY = Path("/dev/shm")
"""Where vLLM is given adapters, and where its workers on a CPU share memory."""

_SINKS = {"sinks", "attention_sink_bias"}
"""vLLM's names for attention sinks."""


class WeightLoader:
    """What vLLM's worker gains: all weights at once, by their names in a checkpoint; an end with its engine; and names
    of shared memory taken away."""

    model_runner: Any

    def end_with(self, process: int) -> None:
        """Ends with that of the engine, also where it hangs or is stopped, and its word to leave would reach nobody."""
        if process != os.getpid():
            die_with(process)

    def unlink_shared_memory(self) -> None:
        """The workers of an engine have mapped each other's memory when vLLM is there. Without its names it goes with
        them, however they end, and is in nobody's way: on a CPU those of ranks that are one engine are always the
        same."""
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        queue = None if group.mq_broadcaster is None else group.mq_broadcaster.buffer
        if queue is not None and queue.is_creator:
            queue.shared_memory.unlink()  # else Python does as its process ends, with a warning
            queue.is_creator = False
        communicator = group.device_communicator
        if (name := getattr(getattr(communicator, "dist_module", None), "group_name", None)) is not None:
            for file in _IN_MEMORY.iterdir():
                if file.name.startswith(name.lstrip("/")):
                    file.unlink(missing_ok=True)

    def load_checkpoint_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Streams the tensors into the model, which keeps them in the layout of its kernels."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model, config = self.model_runner.get_model(), self.model_runner.model_config
        _forget_packed_experts(model)
        _name_loaders(model)
        try:
            initialize_layerwise_reload(model)
            _make_sinks_real(model)
            if type(model).__name__ == "GptOssForCausalLM":
                weights = _experts_by_layer(model, weights)
            self.model_runner.reload_weights(weights_iterator=weights)
        except BaseException:
            # Layers wait on the meta device for their tensors; a later load has to find them whole.
            finalize_layerwise_reload(model, config)
            raise
        if any(getattr(one, "tie_word_embeddings", False) for one in (config.hf_config, config.hf_text_config)):
            _repack_heads(model)


def itself(model: torch.nn.Module) -> torch.nn.Module:
    return model


def in_names_of(skeleton: torch.nn.Module, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields the modules of vLLM's model by their names in the transformers class, if it has them: in models that see
    images the two begin with other prefixes."""
    known = {name for name, _ in skeleton.named_modules()}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    begins = {} if mapper is None else {new: old for old, new in reversed(mapper.orig_to_new_prefix.items()) if new}
    for name, module in model.named_modules():
        if name not in known:
            renamed = (old + f"{name}.".removeprefix(new) for new, old in begins.items() if f"{name}.".startswith(new))
            name = next((one[:-1] for one in renamed if one[:-1] in known), name)
        yield name, module


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Makes vLLM pack fused experts again: 0.32 packs them for the CPU once, when it builds their kernel."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    for module in model.modules() if current_platform.is_cpu() else ():
        if isinstance(method := getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def _name_loaders(model: torch.nn.Module) -> None:
    """Names the loaders that are partial functions: vLLM 0.32 asks all loaders for their names as a reload begins."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for module in model.modules():
        for parameter in get_layerwise_info(module).restore_metadata[0].values():
            if isinstance(loader := getattr(parameter, "weight_loader", None), partial):
                loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def as_vllm_reads(model_type: str, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by their names on the hub, laid out as there: transformers writes the fused experts of Qwen3-VL as it
    computes with them, [E, output, input], and reads them either way."""
    for name, tensor in weights:
        yield name, tensor.transpose(1, 2) if model_type == "qwen3_vl_moe" and ".experts." in name else tensor


def _make_sinks_real(model: torch.nn.Module) -> None:
    """Gives attention sinks memory before a reload. vLLM 0.32 copies them into their parameters without the loader
    that a reload waits for: into meta tensors, so the engine would keep the sinks it had."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, materialize_layer

    for module in model.modules():
        if not _SINKS.isdisjoint(module._parameters):
            info = get_layerwise_info(module)
            materialize_layer(module, info)
            info.load_numel = info.load_numel_total / 2  # loaded in part, also one sink: is processed at the end


def _experts_by_layer(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Passes on all tensors but the experts of GPT-OSS, which vLLM copies like sinks: loads a layer's experts itself
    once they are all there."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        _layerwise_process,
        get_layerwise_info,
        materialize_layer,
    )

    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        layer, is_expert, _ = name.partition(".experts.")
        if not is_expert:
            yield name, tensor
            continue
        tensors = waiting.setdefault(layer, {})
        tensors[name] = tensor
        (experts,) = (one for one in model.get_submodule(layer).modules() if "w13_weight" in one._parameters)
        if len(tensors) == len(experts._parameters):
            info = get_layerwise_info(experts)
            materialize_layer(experts, info)
            model.load_weights(waiting.pop(layer).items())
            _layerwise_process(experts, info)


def _repack_heads(model: torch.nn.Module) -> None:
    """Packs tied heads again: they are not loaded themselves, so vLLM 0.32 keeps the copy it packed at the start."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


class VllmAdapter:
    """The adapter that vLLM's requests are computed with. vLLM reads each version from a folder, under a number of its
    own."""

    def __init__(self, llm: "LLM", skeleton: PreTrainedModel, in_file: Mapping[str, str], *, is_readable: bool) -> None:
        """Begins with one of zeros.

        Args:
            skeleton: the model with the adapter, on the meta device.
            in_file: name in an adapter file -> name in the skeleton's state_dict.
            is_readable: vLLM's layers are in this process, and whole.
        Raises:
            ConfigError: vLLM cannot compute with such an adapter.
        """
        state = skeleton.state_dict()
        self.forms = {name: state[path] for name, path in in_file.items()}
        """The adapter's tensors by their names in an adapter file, on the meta device."""
        self.request: LoRARequest | None = None
        self._engine, self._llm = llm.llm_engine, llm
        self._config = _lora_config(skeleton)
        self._is_readable = is_readable
        self._tensors: dict[str, Tensor] = {}
        try:
            self.serve({name: torch.zeros(form.shape, dtype=form.dtype) for name, form in self.forms.items()})
            for _ in self.checksums():
                pass
        except (ValueError, RuntimeError, TrainingError) as error:
            raise ConfigError(
                f"rollout.sync_adapter_only=true: vLLM cannot serve this adapter: {said(error)}; change engine.lora, "
                "set rollout.sync_adapter_only=false, or use rollout.engine=embedded"
            ) from error

    def serve(self, tensors: dict[str, Tensor]) -> None:
        """Computes with these from the next request on, and no longer with those before."""
        from vllm.lora.request import LoRARequest

        number = 1 if self.request is None else self.request.lora_int_id + 1
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        has_room = _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > num_bytes
        with scratch_folder(_IN_MEMORY if has_room else None) as folder:
            self._config.save_pretrained(str(folder))
            save_file(tensors, folder / "adapter_model.safetensors")
            request = LoRARequest(f"version {number}", number, str(folder))
            if self.request is not None:
                self._engine.remove_lora(self.request.lora_int_id)
            self._engine.add_lora(request)
        self.request, self._tensors = request, tensors

    def checksums(self) -> Iterator[tuple[str, int | None]]:
        """Of what was loaded, once vLLM's layers are found to hold it; None where they cannot be read.

        Raises:
            TrainingError: they hold something else, or have no place for it.
        """
        from vllm.lora.utils import parse_fine_tuned_lora_name

        if not self._is_readable:
            yield from dict.fromkeys(self._tensors).items()
            return
        model: Any
        (model,) = self._llm.apply_model(itself)
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        names = None if mapper is None else mapper.get_rename_mapper()
        served = dict(_served(model))
        for name, tensor in self._tensors.items():
            module, is_a = parse_fine_tuned_lora_name(name, names)
            held = served.get((module, "A" if is_a else "B"))
            if held is None:
                raise TrainingError(f"vLLM computes nothing with {name}")
            expected = torch.zeros_like(held)
            expected[: tensor.shape[0], : tensor.shape[1]] = tensor if is_a else tensor * self._scale
            if not torch.equal(held, expected):
                raise TrainingError(f"vLLM computes with other values of {name} than were loaded")
            yield name, checksum(tensor)

    @property
    def _scale(self) -> float:
        """The factor that vLLM multiplies B by when it loads an adapter."""
        rank = self._config.r
        return float(self._config.lora_alpha / (rank**0.5 if self._config.use_rslora else rank))


def _served(model: Any) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yields ((path of a module in vLLM's model as if it were not fused, "A" or "B"), what its layer computes with), in
    host memory."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    for path, layer in model.named_modules():
        if not isinstance(layer, BaseLinearLayerWithLoRA):
            continue
        parent, _, fused = path.rpartition(".")
        parts = model.packed_modules_mapping.get(fused, [fused])
        slices_of_a = [a[0, 0].cpu() for a in layer.lora_a_stacked]
        slices_of_b = [b[0, 0].cpu() for b in layer.lora_b_stacked]
        if len(parts) == 1 and len(slices_of_b) > 1:  # one module whose outputs vLLM cuts, each with the same A
            if all(torch.equal(a, slices_of_a[0]) for a in slices_of_a):
                slices_of_a = slices_of_a[:1]
            slices_of_a, slices_of_b = [torch.cat(slices_of_a)], [torch.cat(slices_of_b)]
        for part, a, b in zip(parts, slices_of_a, slices_of_b, strict=True):
            yield (f"{parent}.{part}", "A"), a
            yield (f"{parent}.{part}", "B"), b


def lora_arguments(skeleton: PreTrainedModel) -> dict[str, Any]:
    """Returns arguments for EngineArgs for the one adapter that was put into the model."""
    from vllm.config.lora import MaxLoRARanks

    config = _lora_config(skeleton)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": min((known for known in get_args(MaxLoRARanks) if known >= config.r), default=config.r),
        # The head among them, vLLM 0.32 could give no logprobs of prompts, which a probe of the weights asks for.
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in config.target_modules}),
    }


def _lora_config(skeleton: PreTrainedModel) -> Any:
    """Returns peft's config of the one adapter that was put into the model."""
    (config,) = skeleton.peft_config.values()
    return config


def said(error: BaseException) -> str:
    """Returns what an exception says, in one line."""
    return f"{type(error).__name__}: {in_one_line(error)}"

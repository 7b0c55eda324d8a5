"""Which dtype each parameter is kept in, and which dtype each FSDP unit computes in.

Trained parameters are masters in `master_dtype`; frozen ones need no master and are kept in the dtype they compute in,
or in float32 where transformers keeps them so.
FSDP casts to the compute dtype before it gathers, so whatever a unit gathers has one dtype. Packed weights
(quantized.py) are never cast; a unit that has some gathers bytes.

A module whose weights transformers keeps in float32 (routers of DeepSeek-V3, GLM-4.5, Nemotron-H, hyper-connections of
HY-V4) computes in float32 here too, as it does where the weights are served: a router rounded on one side alone sends
tokens to other experts.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedModel

from shardwise.config import ConfigError, EngineConfig, LayoutConfig, ModulePrecisionConfig
from shardwise.engine.names import CONTAINERS, closest_modules, has_parameters, is_within
from shardwise.engine.runtime_state import runtime_names, runtime_state
from shardwise.families import FOR_IMAGES_ALONE, tower_of, vision_paths
from shardwise.stored_dtypes import stored_dtypes


class Precision:
    """The dtypes of one engine, by module."""

    def __init__(self, model: PreTrainedModel, config: LayoutConfig) -> None:
        """
        Raises:
            ConfigError: an entry of module_precision matches no module, or has no effect.
        """
        tower = tower_of(model.config)
        self._casting = vision_paths(model) if tower is not None and tower.follows_first_parameter else []
        """Paths of modules whose units have to cast what they are given, beside the root."""
        self._compute: torch.dtype = getattr(torch, config.param_dtype)
        self._reduce: torch.dtype = self._compute
        self._master: torch.dtype = self._compute
        if isinstance(config, EngineConfig):
            self._reduce = getattr(torch, config.reduce_dtype)
            self._master = getattr(torch, config.master_dtype)
        self.overrides: dict[str, ModulePrecisionConfig] = {}
        """Path of a module -> its entry in module_precision, or that of one in `kept`."""
        for entry in config.module_precision:
            paths = [
                path
                for path, part in model.named_modules()
                if path and _matches(path, entry.module) and not isinstance(part, CONTAINERS)
            ]
            if not paths:
                raise ConfigError(
                    f"engine.module_precision: {entry.module} matches no module of {type(model).__name__}; "
                    f"{closest_modules(model, entry.module)}"
                )
            if entry.param_dtype is None and not any(has_parameters(model.get_submodule(path)) for path in paths):
                raise ConfigError(
                    f"engine.module_precision: {entry.module} has no parameters and computes in engine.param_dtype "
                    "anyway, so this entry has no effect; set its param_dtype, or remove it"
                )
            if taken := [path for path in paths if path in self.overrides]:
                raise ConfigError(
                    f"engine.module_precision: two entries, {self.overrides[taken[0]].module} and {entry.module}, mean "
                    f"{taken[0]}; remove one of them"
                )
            self.overrides |= dict.fromkeys(paths, entry)
        stored = stored_dtypes(model, runtime_state(model), self._compute) if self._compute != torch.float32 else {}
        kept = {name for name, dtype in stored.items() if dtype == torch.float32}
        self._kept_names = {name for name, base in runtime_names(model).items() if base in kept}
        """Names in `state_dict()` of what transformers keeps in float32 in every dtype."""
        # A router inside a tiled MLP would be gathered for every piece.
        tiled = isinstance(config, EngineConfig) and config.apply_tiled_mlp
        own = {
            path: ModulePrecisionConfig(module=path, param_dtype="float32", cast_forward_inputs=False)
            for path in ([] if tiled else _float32_modules(model, stored))
        }
        self.kept = own.keys() - self.overrides.keys()
        """Paths of the modules that compute in float32 because their family's do."""
        self.overrides = own | self.overrides

    def policy(self, path: str | None) -> MixedPrecisionPolicy:
        """Returns the policy of the unit at `path`; None stands for the root."""
        at = None if path is None else self._override_of(path)
        if path is None or at is None:
            # What the root has cast stays so. Most towers cast pixels themselves, and what is in float32 inside a model
            # must not be cast: angles of rotary embeddings, weights of experts.
            casts = path is None or any(is_within(path, outer) for outer in self._casting)
            return MixedPrecisionPolicy(param_dtype=self._compute, reduce_dtype=self._reduce, cast_forward_inputs=casts)
        # What follows the overridden module computes in the dtype around it and would not take another one.
        around = self._override_of(path.rpartition(".")[0])
        return MixedPrecisionPolicy(
            param_dtype=self._compute_dtype(at),
            reduce_dtype=self._reduce,
            output_dtype=self._compute_dtype(around) if at == path and path not in self.kept else None,
            cast_forward_inputs=self.overrides[at].cast_forward_inputs,
        )

    def cast_parameters(self, model: nn.Module) -> None:
        """Gives every parameter of a model on the meta device the dtype that it is kept in."""
        for name, parameter in model.named_parameters():
            dtype = self._master if parameter.requires_grad else self._frozen_dtype(name)
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)

    def _frozen_dtype(self, name: str) -> torch.dtype:
        """What is not trained is exported as it was loaded; where it is gathered FSDP casts it."""
        return torch.float32 if name in self._kept_names else self._compute_dtype(self._override_of(name))

    def _override_of(self, path: str) -> str | None:
        """The innermost module with an override that `path` is or lies in."""
        above = [at for at in self.overrides if is_within(path, at)]
        return max(above, key=len, default=None)

    def _compute_dtype(self, at: str | None) -> torch.dtype:
        name = None if at is None else self.overrides[at].param_dtype
        return self._compute if name is None else getattr(torch, name)


def emulated_dtype(dtype: torch.dtype) -> str | None:
    """Returns a warning about layers that compute in `dtype` on a CPU without instructions for it; None if it has them
    or an accelerator computes. It is no error, because with few tokens it does not matter.

    On a CPU with AVX2 alone products of 512 x 512 in bfloat16 take 5 times as long as in float32, and their gradients
    22 times.
    """
    if torch.accelerator.is_available() or dtype == torch.float32:
        return None
    mkldnn = torch.ops.mkldnn
    has_instructions = {
        torch.bfloat16: mkldnn._is_mkldnn_bf16_supported,
        torch.float16: mkldnn._is_mkldnn_fp16_supported,
    }
    if torch.backends.mkldnn.is_available() and has_instructions[dtype]():
        return None
    name, processor = str(dtype).removeprefix("torch."), torch.backends.cpu.get_cpu_capability()
    return (
        f"param_dtype={name}: this processor ({processor}) has no instructions for {name} and takes many times as long "
        "as in float32; set param_dtype=float32"
    )


def _float32_modules(model: PreTrainedModel, stored: Mapping[str, torch.dtype]) -> list[str]:
    """The paths of modules whose tensors are all stored in float32, outer ones alone.

    Not layers of torch, whose weights families also read without calling them, as FSDP needs it (convolutions of linear
    attention), and not what a rank without images does not call.
    """
    kept = {at for name, dtype in stored.items() if dtype == torch.float32 for at in _holders(name)}
    kept -= {at for name, dtype in stored.items() if dtype != torch.float32 for at in _holders(name)}
    found: list[str] = []
    for path, module in model.named_modules():
        is_torchs = type(module).__module__.startswith(torch.nn.__name__)
        if path not in kept or is_torchs or not has_parameters(module) or any(is_within(path, at) for at in found):
            continue
        if FOR_IMAGES_ALONE.isdisjoint(path.split(".")):
            found.append(path)
    return found


def _holders(name: str) -> list[str]:
    """Paths of the modules that a parameter lies in, from its own to the model, whose path is empty."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def _matches(path: str, pattern: str) -> bool:
    parts, patterns = path.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))

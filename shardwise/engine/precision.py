"""Which dtype each parameter is kept in, and which dtype each FSDP unit computes in.

Trained parameters are masters in `master_dtype`; frozen ones need no master and are kept in the dtype they compute in.
FSDP casts to the compute dtype before it gathers, so whatever a unit gathers has one dtype.
"""

from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise.config import ConfigError, EngineConfig, LayoutConfig, ModulePrecisionConfig
from shardwise.engine.names import closest_modules


class Precision:
    """The dtypes of one engine, by module."""

    def __init__(self, model: nn.Module, config: LayoutConfig) -> None:
        """
        Raises:
            ConfigError: an entry of module_precision matches no module.
        """
        self._compute: torch.dtype = getattr(torch, config.param_dtype)
        self._reduce: torch.dtype = self._compute
        self._master: torch.dtype = self._compute
        if isinstance(config, EngineConfig):
            self._reduce = getattr(torch, config.reduce_dtype)
            self._master = getattr(torch, config.master_dtype)
        self.overrides: dict[str, ModulePrecisionConfig] = {}
        """By the path of a module."""
        for entry in config.module_precision:
            paths = [path for path, _ in model.named_modules() if _matches(path, entry.module)]
            if not paths:
                raise ConfigError(
                    f"engine.module_precision: {entry.module} matches no module of {type(model).__name__}; "
                    f"{closest_modules(model, entry.module)}"
                )
            self.overrides |= dict.fromkeys(paths, entry)

    def policy(self, path: str | None) -> MixedPrecisionPolicy:
        """Of the unit at `path`; None stands for a unit without an override."""
        entry = self.overrides.get(path) if path is not None else None
        if entry is None:
            return MixedPrecisionPolicy(param_dtype=self._compute, reduce_dtype=self._reduce)
        # What follows the module computes in the engine's dtype and would not take another one.
        return MixedPrecisionPolicy(
            param_dtype=self._compute_dtype(entry),
            reduce_dtype=self._reduce,
            output_dtype=self._compute,
            cast_forward_inputs=entry.cast_forward_inputs,
        )

    def cast_parameters(self, model: nn.Module) -> None:
        """Gives every parameter of a model on meta its dtype between steps."""
        innermost_first = sorted(self.overrides.items(), key=lambda item: item[0].count("."), reverse=True)
        for name, parameter in model.named_parameters():
            dtype = self._master
            if not parameter.requires_grad:
                dtype = next(
                    (self._compute_dtype(e) for path, e in innermost_first if name.startswith(f"{path}.")),
                    self._compute,
                )
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)

    def _compute_dtype(self, entry: ModulePrecisionConfig) -> torch.dtype:
        return self._compute if entry.param_dtype is None else getattr(torch, entry.param_dtype)


def _matches(path: str, pattern: str) -> bool:
    parts, patterns = path.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))

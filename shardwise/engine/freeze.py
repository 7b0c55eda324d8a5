"""Keeps modules, named by the beginning of their path, out of training."""

from collections.abc import Sequence

from torch import nn

from shardwise.config import ConfigError
from shardwise.engine.names import closest_modules, is_within


def freeze(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Freezes every parameter whose name is, or begins before a dot with, one of the prefixes.

    Raises:
        ConfigError: a prefix matches nothing, or nothing is left to train.
    """
    for prefix in prefixes:
        matched = [parameter for name, parameter in model.named_parameters() if is_within(name, prefix.rstrip("."))]
        if not matched:
            raise ConfigError(
                f"engine.freeze_module_prefix: {prefix!r} names no module or parameter of {type(model).__name__}; "
                f"{closest_modules(model, prefix)}"
            )
        for parameter in matched:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"engine.freeze_module_prefix={list(prefixes)} freezes the whole model; nothing would be trained"
        )

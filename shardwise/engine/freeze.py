"""Keeps modules, named by the beginning of their path, and routers out of training."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from shardwise.config import ConfigError
from shardwise.engine.names import closest_modules, is_within, tied_elsewhere
from shardwise.families import EXPERTS, ROUTER_NAMES, Router, routers_of


def freeze(model: PreTrainedModel, prefixes: Sequence[str], *, routers: bool = False) -> None:
    """Freezes every parameter whose name is, or begins before a dot with, one of the prefixes.

    Args:
        routers: whether the parameters of every router are frozen too.
    Raises:
        ConfigError: a prefix matches nothing, there is no router, or nothing is left to train.
    """
    for prefix in prefixes:
        for parameter in named_by_prefix(model, prefix):
            parameter.requires_grad_(False)
    for router in require_routers(model, "engine.freeze_router=true") if routers else ():
        for module in router.modules:
            module.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"engine.freeze_module_prefix={list(prefixes)} freezes the whole model; nothing would be trained"
        )


def named_by_prefix(model: PreTrainedModel, prefix: str) -> list[nn.Parameter]:
    """Returns the parameters that an entry of engine.freeze_module_prefix means. Raises ConfigError: there are none."""
    module = prefix.rstrip(".")
    matched = [parameter for name, parameter in model.named_parameters() if is_within(name, module)]
    if not matched and (tied := tied_elsewhere(model, module)):
        raise ConfigError(f"engine.freeze_module_prefix: {tied}")
    if not matched:
        raise ConfigError(
            f"engine.freeze_module_prefix: {prefix!r} names no module or parameter of {type(model).__name__}; "
            f"{closest_modules(model, prefix)}"
        )
    return matched


def require_routers(model: PreTrainedModel, setting: str) -> list[Router]:
    """Returns the routers of the model.

    Raises:
        ConfigError: the model has none, so the setting (`engine.freeze_router=true`) has no effect on it.
    """
    if found := routers_of(model):
        return found
    raise ConfigError(
        f"{setting} has no effect on {type(model).__name__}, which has no router: neither a module that transformers "
        "records router_logits of (such as Qwen3MoeTopKRouter, MixtralTopKRouter, DeepseekV3TopkRouter) nor one called "
        f"{' or '.join(ROUTER_NAMES)} beside one called {EXPERTS}; remove it"
    )

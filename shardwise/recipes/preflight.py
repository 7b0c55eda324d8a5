"""What can be checked in a second, before any rank starts."""

import inspect

import torch

from shardwise.config import ConfigError, Custom, EvalConfig, RecipeConfig, RLConfig
from shardwise.data import check_files
from shardwise.recipes.resume import find_start
from shardwise.rewards import check_rewards, load_function

CUSTOM_ARGUMENTS = {
    "advantage": ("token_rewards", "loss_mask", "group_ids"),
    "policy_loss": ("logprobs", "old_logprobs", "advantages", "loss_mask", "cu_seqlens"),
}
"""What functions of one's own are called with, before their parameters."""


def check_inputs(config: RecipeConfig) -> None:
    """Missing data files, rewards that cannot work, functions of one's own that cannot be imported, a run in the output
    folder that this config does not go on with.

    Raises:
        DataError, ConfigError, ModelError: the first thing that is wrong.
    """
    if not isinstance(config, EvalConfig):
        find_start(config)
    train_files = [] if isinstance(config, EvalConfig) else config.data.train_files
    check_files([*train_files, *config.data.validation_files])
    if isinstance(config, RLConfig | EvalConfig):
        check_rewards(config.reward)
    if isinstance(config, RLConfig):
        for key, arguments in CUSTOM_ARGUMENTS.items():
            chosen = getattr(config.algorithm, key)
            if isinstance(chosen, Custom):
                _check_custom(chosen, f"algorithm.{key}", arguments)


def _check_custom(chosen: Custom, key: str, arguments: tuple[str, ...]) -> None:
    """Raises ConfigError if the function cannot be imported, or cannot be called as it will be."""
    shown = f"({', '.join([*arguments, *chosen.parameters])})"
    function = load_function(chosen.function, key=key, expected=f"a function of {shown}")
    try:
        inspect.signature(function).bind(*arguments, **chosen.parameters)
    except TypeError as error:
        raise ConfigError(f"{key}={chosen.function} cannot be called with {shown}: {error}") from None


def default_num_ranks() -> int:
    """Two ranks show more than one; on a machine with a single accelerator there is room for one."""
    return min(2, torch.accelerator.device_count()) if torch.accelerator.is_available() else 2

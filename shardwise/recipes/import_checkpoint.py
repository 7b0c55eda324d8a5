"""Imports a checkpoint of another trainer: its weights as a Hugging Face folder, its optimizer as a run's state."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from shardwise.config import ConfigError, ModelConfig, ModelError, PreferenceConfig, RLConfig, SFTConfig, TrainingConfig
from shardwise.console import counted
from shardwise.controller.base import WorkerGroup
from shardwise.data import check_vocabulary, load_tokenizer
from shardwise.engine import resolve_folder
from shardwise.engine.files.export import require_finite
from shardwise.engine.files.foreign import ForeignCheckpoint, FoundWeights, ShardedTensors, open_checkpoint
from shardwise.engine.files.imported_state import AdamWStates
from shardwise.engine.files.importing import RuntimeWeights, import_weights
from shardwise.engine.files.rewrite_folder import on_meta
from shardwise.engine.files.safetensors_file import differences
from shardwise.engine.freeze import freeze
from shardwise.engine.model import build_on_meta
from shardwise.model_config import read_model_config
from shardwise.recipes.checkpointing.checkpoints import CHECKPOINTS, WEIGHTS, latest_hf_folder, step_folder
from shardwise.recipes.checkpointing.manifest import deal_files, write_manifest
from shardwise.recipes.checkpointing.publishing import new_checkpoint
from shardwise.recipes.checkpointing.resume import STATE, write_run
from shardwise.recipes.export import named_dtype, new_folder, require_empty, written
from shardwise.recipes.rank.hosted_engines import POLICY

TITLE = "import-checkpoint"


def import_checkpoint(
    source: str,
    target: str,
    group: WorkerGroup,
    *,
    model: str | None,
    prefix: str | None,
    dtype: str | None,
    max_shard_size: str,
    run: TrainingConfig | None,
) -> None:
    """Imports a checkpoint, and prints what was found, where it went and what was left out. Runs on one rank.

    Args:
        source: a folder of verl's FSDP workers (or the step folder around it), or one of torch.distributed.checkpoint.
        target: a folder that does not exist yet, or an empty one: a model folder; with `run` an output folder with one
            checkpoint that such a run can be resumed from.
        model: the folder of config.json and the tokenizer; None: the `huggingface` folder in the source.
        prefix: prefix of the model's names in the source; None: the one that fits most of them.
        dtype: dtype of the written weights; None keeps the one that config.json names.
        run: config of the run that is to resume from the checkpoint; None: imports the weights alone.
    Raises:
        ConfigError: an option cannot work. ModelError: the source is damaged, incomplete, does not fit its config.json
            or asks to run code. ExportError: target cannot be written, or a tensor holds NaN or an infinity in the
            dtype that it is written in.
    """
    if run is None:
        hf = new_folder(target)
    else:
        require_empty(target)
        _require_plain_adamw(run)
    found = open_checkpoint(Path(source))
    print(f"{TITLE}: {found.title}: {found.folder}", flush=True)
    folder = _model_folder(found, model)
    dtype = dtype if dtype is not None else named_dtype(folder)
    meta = on_meta(folder, getattr(torch, dtype))
    if run is not None:
        _require_model_of_run(meta, folder, run, key="the checkpoint's" if model is None else "--model")
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    check_vocabulary(tokenizer, meta.config.get_text_config().vocab_size)
    _require_no_adapters(found)
    weights = found.find_weights(meta, prefix)
    print(f"{TITLE}: {_weights_text(weights)}", flush=True)

    def write(path: Path) -> None:
        import_weights(meta, weights.weights, tokenizer, path, getattr(torch, dtype), max_shard_size=max_shard_size)

    states = None
    if run is None:
        write(hf)
    else:
        states = _states(found, meta, weights, run)
        step = _step(found.folder, default=states.num_updates)
        finite = ShardedTensors(found.folder, states.tensors).finite_in(torch.float32)
        with _leaving_nothing(Path(target)), new_checkpoint(Path(target), step) as checkpoint:
            write(checkpoint / WEIGHTS)
            replace(states, tensors=finite.tensors).write(
                checkpoint / STATE / POLICY, RuntimeWeights(meta, weights.weights)
            )
            write_run(checkpoint, run, step=step, parts=None, files={})
            shares = group.scatter("hash_files", deal_files(checkpoint, group.size), str(checkpoint))
            write_manifest(checkpoint, shares, step=step, all_finite=True)
        hf = step_folder(Path(target), step) / WEIGHTS
        print(
            f"{TITLE}: AdamW after {states.num_updates:,} updates; continue with trainer.resume={hf.parent}", flush=True
        )
    left_out = found.left_out(weights, [] if states is None else states.tensors.values())
    print(f"{TITLE}: left out: {', '.join(left_out) or 'nothing'}", flush=True)
    print(written(hf, dtype), flush=True)
    print(f"{TITLE}: try it with `shardwise generate {target}`", flush=True)


@contextmanager
def _leaving_nothing(target: Path) -> Iterator[None]:
    """Inside, a failure leaves an output folder that was empty as it was, or removes one that did not exist."""
    was_there = target.exists()
    try:
        yield
    except BaseException:
        with suppress(OSError):  # it is not empty by now, or does not exist
            (target / CHECKPOINTS).rmdir()
            if not was_there:
                target.rmdir()
        raise


def _model_folder(found: ForeignCheckpoint, model: str | None) -> Path:
    """Returns the folder of config.json. Raises ConfigError: there is no such file; ModelError: transformers does not
    know it."""
    folder = found.folder / "huggingface" if model is None else Path(model)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder / 'config.json'} does not exist; name a folder with the model's config.json and tokenizer as "
            "--model (it needs no weights)"
        )
    read_model_config(folder)  # raises if it cannot be used
    return folder


def _require_model_of_run(meta: PreTrainedModel, folder: Path, run: TrainingConfig, *, key: str) -> None:
    """Compares the checkpoint's model with the one that the run trains.

    Args:
        meta, folder: the checkpoint's model, and the folder of its config.json.
        key: the option that named the folder, for errors.
    Raises:
        ConfigError: the run trains another model. ModelError: there is none at its model.path.
    """
    try:
        of_run = build_on_meta(resolve_folder(latest_hf_folder(run.model.path)))
    except ModelError as error:
        raise ModelError(f"model.path of --config: {error}") from None
    of_run_shapes, shapes = (
        {name: list(parameter.shape) for name, parameter in model.named_parameters()} for model in (of_run, meta)
    )
    if different := differences(of_run_shapes, shapes):
        raise ConfigError(
            f"model.path={run.model.path} of --config and {folder} ({key}) are different models: measured by the "
            f"first, the second has {different}; set model.path to the model that was trained, or --model to its folder"
        )


def _require_no_adapters(found: ForeignCheckpoint) -> None:
    """Raises ModelError: the checkpoint holds adapters."""
    adapters = [name for name in found.tensors.tensors if ".lora_A." in name]
    if adapters:
        raise ModelError(
            f"{found.folder} holds LoRA adapters ({adapters[0]}), which are not imported; merge them where they were "
            "trained, or export them there as a peft adapter and merge that with `shardwise export`"
        )


def _weights_text(weights: FoundWeights) -> str:
    specs = weights.weights.specs.values()
    dtypes = ", ".join(sorted({str(spec.dtype).removeprefix("torch.") for spec in specs}))
    prefix = f" under {weights.prefix}" if weights.prefix else ""
    return f"{counted(len(specs), 'tensor')}{prefix}, {dtypes}, {weights.weights.num_bytes / 2**20:,.1f} MiB"


def _require_plain_adamw(run: TrainingConfig) -> None:
    """Raises ConfigError: the run cannot resume from AdamW states of another trainer."""
    recipes, engine = (SFTConfig, PreferenceConfig, RLConfig), run.engine
    misfits = {
        f"recipe={type(run).__name__.removesuffix('Config')}": not isinstance(run, recipes),
        f"trainer.optimizer={run.trainer.optimizer}": run.trainer.optimizer != "adamw",
        "engine.lora": engine.lora is not None,
        f"engine.master_dtype={engine.master_dtype}": engine.master_dtype != "float32",
        "engine.param_dtype=float16": engine.param_dtype == "float16",
        "critic": isinstance(run, RLConfig) and run.critic is not None,
    }
    if given := [key for key, is_given in misfits.items() if is_given]:
        raise ConfigError(
            f"--config has {' and '.join(given)}; an imported training state is AdamW's of one language model with "
            "float32 masters (sft, preference or rl): change it, or import the weights alone (without --config)"
        )


def _states(found: ForeignCheckpoint, meta: PreTrainedModel, weights: FoundWeights, run: TrainingConfig) -> AdamWStates:
    """Finds the optimizer's states. Raises ModelError: the checkpoint has none that the run can resume from.
    ExportError: its number of updates is not finite."""
    parameters = dict(meta.named_parameters())
    in_order = [name for name in weights.weights.tensors if name in parameters]
    if len(in_order) < len(parameters):
        raise ModelError(
            f"{found.folder}: the weights have other names than in this version of transformers, so the optimizer's "
            "states cannot be assigned; import the weights alone (without --config)"
        )
    freeze(meta, run.engine.freeze_module_prefix, routers=run.engine.freeze_router)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items() if parameter.requires_grad}
    states = found.optimizer_states(in_order, weights)
    require_finite({name: state.read() for name, state in states.items() if name.startswith("step/")})
    return AdamWStates.of(shapes, states)


def _step(folder: Path, *, default: int) -> int:
    """Returns the training step that the innermost folder named for a step gives, else `default`."""
    names = (re.fullmatch(r"(?:global_)?step[-_](\d+)", name) for name in reversed(folder.resolve().parts))
    return next((int(match[1]) for match in names if match), default)

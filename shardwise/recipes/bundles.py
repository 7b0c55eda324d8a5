"""nonfinite/step_N of a run: a bundle of all that it takes to replay an optimizer step that was skipped because a loss
or a gradient was not finite.

bundle.json           the step: losses, gradient norm, and what every rank found; what engine and loss were made from;
                      and where base and teacher are, with hashes of their files
rank_R.safetensors    the micro-batches of rank R, `K/FIELD` of TokenBatch, `K/images.FIELD` of its Images
hf/ or adapter/       the weights as they were, in the masters' dtype; with LoRA the adapter alone
manifest.json         every file with its size and hash
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from shardwise.config import (
    Config,
    ConfigError,
    EngineConfig,
    ExportError,
    ModelConfig,
    ModelError,
)
from shardwise.data import load_tokenizer
from shardwise.durable import fsync_folder
from shardwise.engine import PHASES, Fault, TrainEngine, written_on_every_rank
from shardwise.engine.exchange import all_gather_json, gather_json
from shardwise.engine.files.safetensors_file import SafetensorsReader, TensorSpec
from shardwise.engine.files.state_files import ShardFile, shard_name
from shardwise.engine.files.verified_files import read_sealed_json, write_sealed_json
from shardwise.recipes.checkpointing.checkpoints import ADAPTER, WEIGHTS
from shardwise.recipes.checkpointing.fingerprints import Fingerprints, changed_files, model_fingerprints
from shardwise.recipes.checkpointing.manifest import hash_share, verify_share, write_manifest
from shardwise.recipes.checkpointing.publishing import NONFINITE, make_name_durable, unfinished_bundle
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.losses import LossSource
from shardwise.types import Denominators, Images, TokenBatch

MAX_BUNDLES = 3
"""Most bundles that one process writes: more would tell little and fill the disk."""
BUNDLE = "bundle.json"
FORMAT = 1
"""Format version; increases when bundles written before can no longer be read."""


class Record(BaseModel):
    """A part of bundle.json, where numbers that are not finite are written as strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    def tree(self) -> dict[str, Any]:
        """Returns it as JSON-serializable values."""
        tree: dict[str, Any] = json.loads(self.model_dump_json())
        return tree


class MicroBatchRecord(Record):
    """What a micro-batch held, and its loss."""

    sample_index: list[int]
    uids: list[str]
    loss: float
    """This rank's share of the step's loss, as computed in the step itself."""


class RankRecord(Record):
    """One rank's part of a step."""

    micro_batches: list[MicroBatchRecord]
    faults: list[Fault]
    """Faults found by the pass with hooks that followed the step. If no rank has any, that pass was finite: the fault
    is not reproducible."""


class ModelsOutside(Config):
    """The models whose weights a bundle does not hold."""

    base: ModelConfig | None
    """The base of an adapter; None if the whole model was trained."""
    teacher: ModelConfig | None

    @property
    def paths(self) -> dict[str, str]:
        """Key in the fingerprints -> path."""
        return {f"{name}.path": model.path for name, model in self if model is not None}

    def fingerprints(self) -> Fingerprints:
        """Returns the fingerprints of those that are there. Raises ConfigError, ModelError: as `model_fingerprints`."""
        return model_fingerprints(self)


class SkippedStep(Record):
    """An optimizer step that was skipped."""

    format: int = FORMAT
    role: str
    engine: EngineSource
    teacher: EngineSource | None
    """The teacher, if a student's step was skipped."""
    loss: LossSource
    numbers: dict[str, Any]
    """The engine's numbers before the step: optimizer steps done, loss scale."""
    denominators: Denominators
    grad_norm: float
    """NaN also if a loss was not finite."""
    ranks: list[RankRecord] = []
    files: Fingerprints = {}
    """Fingerprints of the models outside when the bundle was written; earlier versions kept none."""

    @property
    def models_outside(self) -> ModelsOutside:
        layout, teacher = self.engine.layout, self.teacher
        assert isinstance(layout, EngineConfig)
        return ModelsOutside(
            base=None if layout.lora is None else ModelConfig(path=self.engine.model.path),
            teacher=None if teacher is None else ModelConfig(path=teacher.model.path),
        )

    @property
    def number(self) -> int:
        """Number of the step among the engine's optimizer steps, from 1."""
        return int(self.numbers["num_steps"]) + 1

    @property
    def faults(self) -> list[tuple[int, Fault]]:
        """(rank, fault), in the order in which the ranks met them."""
        met = [(rank, fault) for rank, record in enumerate(self.ranks) for fault in record.faults]
        return sorted(met, key=lambda one: by_time(one[0], one[1].micro_batch, one[1]))

    @property
    def summary(self) -> str:
        """Why the step was skipped, in words."""
        if not self.faults:
            return f"the gradient norm was {self.grad_norm}, and a second pass found no tensor that is not finite"
        rank, fault = self.faults[0]
        return f"rank {rank}, micro-batch {fault.micro_batch}: {fault}"


def by_time(rank: int, micro_batch: int, fault: Fault) -> tuple[int, int, int, int]:
    """Sort key of faults by time: ranks go through their micro-batches together."""
    return micro_batch, PHASES.index(fault.phase), fault.order, rank


def write_bundle(
    folder: Path,
    engine: TrainEngine,
    step: SkippedStep,
    batches: Sequence[TokenBatch],
    *,
    losses: Sequence[float],
    faults: Sequence[Fault],
) -> tuple[Path, SkippedStep]:
    """Collective. Writes the bundle of a step whole or not at all.

    Args:
        folder: where it goes; a number is appended if that exists.
        batches, losses, faults: this rank's.
    Returns:
        The bundle's folder, valid on rank 0, and the step with the records of all ranks.
    Raises:
        ExportError: on every rank, if a rank could not write; nothing of it is left.
    """
    staging, rank = unfinished_bundle(folder.parent), dist.get_rank()
    mine = RankRecord(
        micro_batches=[
            MicroBatchRecord(sample_index=batch.sample_index, uids=batch.uids, loss=loss)
            for batch, loss in zip(batches, losses, strict=True)
        ],
        faults=list(faults),
    )
    records = [RankRecord.model_validate(tree) for tree in all_gather_json(mine.tree())]
    sources = {
        "engine": _with_absolute_paths(step.engine),
        "teacher": step.teacher and _with_absolute_paths(step.teacher),
    }
    step = step.model_copy(update={"ranks": records, **sources})
    try:
        with written_on_every_rank(staging):
            if rank == 0:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
        _write_weights(engine, step.engine, staging)
        with written_on_every_rank(staging):
            if rank % step.engine.layout.ulysses_size == 0:  # the others of its group have the same
                tensors = _tensors(batches)
                specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
                ShardFile.write(staging / shard_name(rank), specs, tensors.items())
            if rank == 0:
                with_files = step.model_copy(update={"files": _fingerprints_to_keep(step)})
                write_sealed_json(staging / BUNDLE, with_files.tree())
        with written_on_every_rank(staging):
            hashes = hash_share(staging)
        shares = gather_json(hashes)
        final = folder
        with written_on_every_rank(folder):
            if rank == 0:
                write_manifest(staging, shares, step=step.number)
                for part in (staging, *(path for path in staging.iterdir() if path.is_dir())):
                    fsync_folder(part)
                final = _free(folder)
                os.replace(staging, final)
                make_name_durable(final)
    except ExportError:
        if rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    return final, step


def _with_absolute_paths(source: EngineSource) -> EngineSource:
    """Makes the paths of local models absolute, since a replay may start in another folder."""
    paths = {key: os.path.abspath(path) for key, path in source.model if path is not None and Path(path).exists()}
    return source.model_copy(update={"model": source.model.model_copy(update=paths)})


def _fingerprints_to_keep(step: SkippedStep) -> Fingerprints:
    """Fingerprints the models outside. Raises ExportError: a file cannot be read, or one with weights is damaged."""
    try:
        return step.models_outside.fingerprints()
    except (ConfigError, ModelError) as error:
        raise ExportError(str(error)) from None


def _free(folder: Path) -> Path:
    """Returns the first of step_N, step_N.2, step_N.3 and so on that does not exist."""
    path, number = folder, 1
    while path.exists():
        number += 1
        path = folder.with_name(f"{folder.name}.{number}")
    return path


def _write_weights(engine: TrainEngine, source: EngineSource, folder: Path) -> None:
    """Collective. Writes the weights, in the masters' dtype so that nothing is rounded."""
    layout = source.layout
    assert isinstance(layout, EngineConfig)
    if layout.lora is not None:
        engine.export_adapter(folder / ADAPTER, source.model.path)
    else:
        engine.export_hf(folder / WEIGHTS, load_tokenizer(source.model), getattr(torch, layout.master_dtype))


def _tensors(batches: Sequence[TokenBatch]) -> dict[str, Tensor]:
    return {f"{k}/{name}": tensor for k, batch in enumerate(batches) for name, tensor in _named_tensors(batch)}


def _named_tensors(noun: TokenBatch | Images) -> Iterator[tuple[str, Tensor]]:
    for part in fields(noun):
        match getattr(noun, part.name):
            case Tensor() as tensor:
                yield part.name, tensor
            case Images() as images:
                yield from ((f"{part.name}.{name}", tensor) for name, tensor in _named_tensors(images))


def _batch(tensors: dict[str, Tensor], record: "MicroBatchRecord") -> TokenBatch:
    """Makes the batch from what `_named_tensors` gave."""
    seen = {name.removeprefix(_IMAGES): tensors.pop(name) for name in list(tensors) if name.startswith(_IMAGES)}
    values: dict[str, Any] = {**tensors, "images": Images(**seen) if seen else None}
    return TokenBatch(sample_index=record.sample_index, uids=record.uids, **values)


_IMAGES = "images."


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch of a bundle."""

    rank: int
    index: int
    """Its index among the micro-batches of its rank."""
    tokens: TokenBatch
    loss: float
    """The recorded loss."""

    def __str__(self) -> str:
        return f"rank {self.rank}, micro-batch {self.index}"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle that was read."""

    folder: Path
    step: SkippedStep

    @classmethod
    def read(cls, path: str) -> Self:
        """Collective. Reads a bundle and verifies every file.

        Raises:
            ConfigError: there is no bundle. ModelError: a file of it is missing or damaged, or it is of another version
                of Shardwise.
        """
        folder = Path(path)
        if not (folder / BUNDLE).is_file():
            raise ConfigError(
                f"{path} is no bundle: it has no {BUNDLE}; name a folder in {NONFINITE}/ of a run's output folder"
            )
        try:
            verify_share(folder)
        except ModelError as error:
            raise ModelError(f"{error}; copy the bundle again, or replay that of another step") from None
        tree = read_sealed_json(folder / BUNDLE)
        if tree["format"] != FORMAT:
            raise ModelError(
                f"{folder / BUNDLE} has format {tree['format']}, and this version of Shardwise reads {FORMAT}; replay "
                "it with the version that wrote it"
            )
        try:
            return cls(folder, SkippedStep.model_validate(tree))
        except ValidationError as error:
            reason = error.errors()[0]
            raise ModelError(
                f"{folder / BUNDLE}: {'.'.join(map(str, reason['loc']))}: {reason['msg']}; replay it with the version "
                "of Shardwise that wrote it"
            ) from None

    def require_models_outside(self) -> None:
        """Raises ConfigError: the base or the teacher is not where it was, or not what it was. ModelError: damaged."""
        now, paths = self.step.models_outside.fingerprints(), self.step.models_outside.paths
        if missing := [f"{key}={path}" for key, path in paths.items() if key not in now]:
            raise ConfigError(
                f"{self.folder} does not hold the model of {' and '.join(missing)}, and it is not there; put it back, "
                "or a link to it"
            )
        if changed := changed_files(self.step.files, now):
            listed = " and ".join(f"those of {key}={paths[key]} ({file})" for key, file in changed.items())
            raise ConfigError(
                f"{self.folder} was written with other files: {listed} have changed since, so another step would be "
                "run; put them back"
            )

    def micro_batches(self) -> list[MicroBatch]:
        """Reads the micro-batches of all ranks; those that ran at the same time follow each other."""
        found = [
            MicroBatch(rank, index, tokens, record.loss)
            for rank, ranks_own in enumerate(self.step.ranks)
            if (self.folder / shard_name(rank)).is_file()
            for index, (tokens, record) in enumerate(self._read(rank, ranks_own))
        ]
        return sorted(found, key=lambda batch: (batch.index, batch.rank))

    def _read(self, rank: int, own: RankRecord) -> Iterator[tuple[TokenBatch, MicroBatchRecord]]:
        with closing(SafetensorsReader(self.folder / shard_name(rank))) as file:
            for index, record in enumerate(own.micro_batches):
                tensors = {
                    name.partition("/")[2]: file.read(name, [slice(0, size) for size in spec.shape])
                    for name, spec in file.specs.items()
                    if name.startswith(f"{index}/")
                }
                yield _batch(tensors, record), record

    def source(self) -> EngineSource:
        """Returns the source of the engine on one process, with the weights of the bundle."""
        source = _alone(self.step.engine)
        layout = source.layout
        assert isinstance(layout, EngineConfig)
        if layout.lora is None:
            model = ModelConfig(path=str(self.folder / WEIGHTS))
            return source.model_copy(update={"model": model})
        lora = layout.lora.model_copy(update={"adapter_path": str(self.folder / ADAPTER)})
        return source.model_copy(update={"layout": layout.model_copy(update={"lora": lora})})

    def teacher_source(self) -> EngineSource | None:
        """Returns the source of the teacher on one process, if there was one."""
        return None if self.step.teacher is None else _alone(self.step.teacher)


def _alone(source: EngineSource) -> EngineSource:
    """Returns a source that computes the same on one process."""
    update: dict[str, Any] = {"fsdp_size": None, "ulysses_size": 1, "ep_size": 1, "reshard_after_forward": True}
    update["compile_layers"] = False
    if isinstance(source.layout, EngineConfig):
        update["reduce_gradients"] = "each_micro_batch"
    return source.model_copy(update={"layout": source.layout.model_copy(update=update)})

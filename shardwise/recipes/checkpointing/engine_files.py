"""The engines' files in a checkpoint, written by the engines themselves or from copies while they train on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shardwise.config import ExportError
from shardwise.controller.base import WorkerGroup
from shardwise.recipes.checkpointing.manifest import deal_files
from shardwise.recipes.checkpointing.resume import STATE
from shardwise.recipes.engines import RemoteEngine


class EngineFiles(Protocol):
    """What has all ranks write the engines' part of a checkpoint. Its methods may be called again after a failure."""

    @property
    def group(self) -> WorkerGroup:
        """The group whose `nonfinite_tensors` checks on every rank what is to be saved of an engine."""
        ...

    def write(self, checkpoint: Path) -> None:
        """Writes the weights of every engine and, if it is saved, its training state. Raises ExportError."""

    def hash_shares(self, checkpoint: Path) -> list[dict[str, Any]]:
        """Returns what each rank found in its share of a checkpoint's files, for the manifest. Raises ExportError,
        OSError."""
        ...


class LiveEngines:
    """Engines that write their files while nothing else is done."""

    def __init__(self, engines: Mapping[str, RemoteEngine], *, with_state: bool) -> None:
        """
        Args:
            engines: subfolder of a checkpoint -> the engine that it holds.
            with_state: whether the training state is saved beside the weights.
        """
        self._engines = engines
        self._with_state = with_state
        self.group = next(iter(engines.values())).group

    def write(self, checkpoint: Path) -> None:
        """See EngineFiles.write."""
        for name, engine in self._engines.items():
            state = str(checkpoint / state_subfolder(engine)) if self._with_state else ""
            engine.save(str(checkpoint / name), state=state)

    def hash_shares(self, checkpoint: Path) -> list[dict[str, Any]]:
        """See EngineFiles.hash_shares."""
        return self.group.scatter("hash_files", deal_files(checkpoint, self.group.size), str(checkpoint))


class StagedEngines:
    """Copies of engines in host memory, which the ranks' CheckpointWriters write while the engines train on."""

    def __init__(self, engines: Mapping[str, RemoteEngine], writers: WorkerGroup, *, with_state: bool) -> None:
        """Has every rank begin to copy its shards; the engines wait for the copies before they change a shard.

        Args:
            engines, with_state: as in LiveEngines.
            writers: the ranks' CheckpointWriters.
        """
        self.group = writers
        writers.call("clear")
        for name, engine in engines.items():
            engine.stage(name)
        if with_state:
            for engine in engines.values():
                engine.stage_state(state_subfolder(engine))

    def write(self, checkpoint: Path) -> None:
        """See EngineFiles.write."""
        written = _results(self.group.call("write", str(checkpoint)))
        others = [None] * (len(written) - 1)  # what all ranks wrote grows with their number: one gets it
        _results(self.group.scatter("finish", [written, *others], str(checkpoint)))

    def hash_shares(self, checkpoint: Path) -> list[dict[str, Any]]:
        """See EngineFiles.hash_shares."""
        return _results(self.group.scatter("hash_files", deal_files(checkpoint, self.group.size), str(checkpoint)))


def _results(outcomes: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Returns the results in the Outcomes of the ranks' CheckpointWriters. Raises ExportError: a rank has failed."""
    for rank, outcome in enumerate(outcomes):
        if outcome["error"]:
            where = "" if len(outcomes) == 1 else f"rank {rank}{outcome['host']}: "
            raise ExportError(f"{where}{outcome['error']}")
    return [outcome["result"] for outcome in outcomes]


def state_subfolder(engine: RemoteEngine) -> str:
    """Returns the folder in a checkpoint that holds the training state of an engine."""
    return f"{STATE}/{engine.role.replace(' ', '_')}"

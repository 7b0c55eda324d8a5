"""Writes each rank's part of a checkpoint in the background, while its engines train on."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config import ExportError, ModelConfig, ModelError
from shardwise.console import on_host
from shardwise.data import load_tokenizer
from shardwise.engine import StagedExport, named_failures
from shardwise.engine.files.state_files import ShardFile
from shardwise.recipes.checkpointing.manifest import hash_files
from shardwise.types import Connections

if TYPE_CHECKING:
    from shardwise.engine.files.adapters import StagedAdapter
    from shardwise.engine.files.checkpoint import StagedState

    Staged = StagedExport | StagedAdapter | StagedState

Outcome = dict[str, Any]
"""{"result": a call's result, "error": why there is none, or "", "host": `on_host()`}: one rank's failure must not end
the others."""


class CheckpointWriter:
    """Writes what the engines of this rank have staged. Its methods are called on every rank, alongside the worker's;
    those that touch files return an Outcome."""

    def __init__(self, rank: int, links: Connections) -> None:
        """
        Args:
            links: connections that only these calls use.
        """
        self._rank = rank
        self._links = links
        self._staged: dict[str, list[Staged]] = {}
        self._exports: dict[str, tuple[StagedExport, ModelConfig]] = {}
        self._adapters: dict[str, StagedAdapter] = {}
        self._states: dict[str, StagedState] = {}

    def add_export(self, role: str, subfolder: str, export: StagedExport, model: ModelConfig) -> None:
        """Adds it to the next checkpoint, in `subfolder`, with the tokenizer of the model's config."""
        self._staged.setdefault(role, []).append(export)
        self._exports[subfolder] = export, model

    def add_adapter(self, role: str, subfolder: str, adapter: "StagedAdapter") -> None:
        """Adds it to the next checkpoint, in `subfolder`."""
        self._staged.setdefault(role, []).append(adapter)
        self._adapters[subfolder] = adapter

    def add_state(self, role: str, subfolder: str, state: "StagedState") -> None:
        """Adds it to the next checkpoint, in `subfolder`."""
        self._staged.setdefault(role, []).append(state)
        self._states[subfolder] = state

    def clear(self) -> None:
        """Forgets what is staged."""
        self._staged, self._exports, self._adapters, self._states = {}, {}, {}, {}

    def nonfinite_tensors(self, role: str) -> list[str]:
        """Returns names of staged weights and optimizer states whose part on this rank holds NaN or an infinity. Waits
        for: their copies."""
        return list(dict.fromkeys(name for staged in self._staged.get(role, []) for name in staged.nonfinite_names()))

    def write(self, checkpoint: str) -> Outcome:
        """Writes this rank's files. The Outcome's result is subfolder -> ShardFile of the state there."""
        folder, failures = Path(checkpoint), list[str]()

        def attempt(subfolder: str, work: Callable[[Path], Any]) -> Any:
            """Notes a failure and does not raise it: the other ranks need this rank's part of what follows."""
            path = folder / subfolder
            made = _outcome(path, partial(_make_inside, folder, path))
            done = _outcome(path, partial(work, path))
            failures.extend(outcome["error"] for outcome in (made, done) if outcome["error"])
            return done["result"]

        with ThreadPoolExecutor(1, thread_name_prefix="state") as thread:
            # In a thread, since a rank that writes no model would wait for those that do.
            files = {
                subfolder: thread.submit(attempt, subfolder, state.write) for subfolder, state in self._states.items()
            }
            for subfolder, (export, model) in self._exports.items():
                tokenizer = partial(load_tokenizer, model)
                attempt(subfolder, partial(export.write, tokenizer=tokenizer, links=self._links))
            if self._rank == 0:
                for subfolder, adapter in self._adapters.items():
                    attempt(subfolder, adapter.write)
        records = {
            subfolder: None if file.result() is None else asdict(file.result()) for subfolder, file in files.items()
        }
        return _answer(records, failures[0] if failures else "")

    def finish(self, written: Sequence[dict[str, Any]] | None, checkpoint: str) -> Outcome:
        """Writes the indexes, when every rank has written; `written`: what `write` returned, by rank, and None on all
        ranks but rank 0, which have nothing to do. What was staged stays until `clear`, so that all of it can be
        written again."""
        return _outcome(Path(checkpoint), partial(self._write_indexes, Path(checkpoint), written))

    def hash_files(self, share: Sequence[str], checkpoint: str) -> Outcome:
        """Hashes this rank's share of a checkpoint's files, for its manifest."""
        return _outcome(Path(checkpoint), partial(hash_files, share, Path(checkpoint)))

    def _write_indexes(self, folder: Path, written: Sequence[dict[str, Any]] | None) -> None:
        if written is None:
            return
        for subfolder, (export, _) in self._exports.items():
            export.finish(folder / subfolder)
        for subfolder, state in self._states.items():
            trees = [files[subfolder] for files in written]
            state.finish(folder / subfolder, [None if tree is None else ShardFile(**tree) for tree in trees])


def _make_inside(checkpoint: Path, path: Path) -> None:
    """Makes a folder in the one that rank 0 has made. Raises ExportError: this rank does not see that; OSError."""
    if not checkpoint.is_dir():
        raise ExportError(
            f"{checkpoint} is not there: trainer.output_dir has to be on a file system that all ranks share"
        )
    path.mkdir(parents=True, exist_ok=True)


def _outcome(folder: Path, work: Callable[[], Any]) -> Outcome:
    try:
        with named_failures(folder):
            return _answer(work())
    except (ExportError, ModelError) as error:
        return _answer(None, str(error))


def _answer(result: Any, error: str = "") -> Outcome:
    return {"result": result, "error": error, "host": on_host()}

"""What every rank writes in the background, while its engines train on."""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config import ExportError, ModelConfig, ModelError
from shardwise.data import load_tokenizer
from shardwise.engine import Links, StagedExport, named_failures
from shardwise.engine.state_files import ShardFile
from shardwise.recipes.checkpointing.manifest import hash_share

if TYPE_CHECKING:
    from shardwise.engine.adapters import StagedAdapter
    from shardwise.engine.checkpoint import StagedState

    Staged = StagedExport | StagedAdapter | StagedState

Outcome = dict[str, Any]
"""{"result": of a call, "error": why there is none, or ""}: one rank's failure must not end the others."""


class CheckpointWriter:
    """Writes what the engines of this rank have staged. Its methods are called on every rank beside the worker's; those
    that touch files answer with an Outcome."""

    def __init__(self, rank: int, links: Links) -> None:
        """
        Args:
            links: over which nothing but these calls travels.
        """
        self._rank = rank
        self._links = links
        self._staged: dict[str, list[Staged]] = {}
        self._exports: dict[str, tuple[StagedExport, ModelConfig]] = {}
        self._adapters: dict[str, StagedAdapter] = {}
        self._states: dict[str, StagedState] = {}

    def add_export(self, role: str, subfolder: str, export: StagedExport, model: ModelConfig) -> None:
        """The next checkpoint holds it in `subfolder`, with the tokenizer of the model's config."""
        self._staged.setdefault(role, []).append(export)
        self._exports[subfolder] = export, model

    def add_adapter(self, role: str, subfolder: str, adapter: "StagedAdapter") -> None:
        """The next checkpoint holds it in `subfolder`."""
        self._staged.setdefault(role, []).append(adapter)
        self._adapters[subfolder] = adapter

    def add_state(self, role: str, subfolder: str, state: "StagedState") -> None:
        """The next checkpoint holds it in `subfolder`."""
        self._staged.setdefault(role, []).append(state)
        self._states[subfolder] = state

    def clear(self) -> None:
        """Forgets what is staged."""
        self._staged, self._exports, self._adapters, self._states = {}, {}, {}, {}

    def nonfinite_tensors(self, role: str) -> list[str]:
        """The staged weights and optimizer states of which this rank's part holds NaN or an infinity. Waits for: their
        copies."""
        return list(dict.fromkeys(name for staged in self._staged.get(role, []) for name in staged.nonfinite_names()))

    def write(self, checkpoint: str) -> Outcome:
        """Writes this rank's files. The result holds the ShardFile of each state, by subfolder."""
        folder, failures = Path(checkpoint), list[str]()

        def attempt(subfolder: str, work: Callable[[Path], Any]) -> Any:
            """The others need this rank's part of what follows, so a failure is noted."""
            path = folder / subfolder
            made = _outcome(path, partial(_make_inside, folder, path))
            done = _outcome(path, partial(work, path))
            failures.extend(outcome["error"] for outcome in (made, done) if outcome["error"])
            return done["result"]

        with ThreadPoolExecutor(1, thread_name_prefix="state") as thread:
            # Who writes no model would wait for those who do.
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
        return {"result": records, "error": failures[0] if failures else ""}

    def finish(self, checkpoint: str, written: Sequence[dict[str, Any]]) -> Outcome:
        """When every rank has written: what `write` gave, by rank. Rank 0 writes the indexes. What was staged stays
        until `clear`, so that all of it can be written again."""
        return _outcome(Path(checkpoint), partial(self._write_indexes, Path(checkpoint), written))

    def hash_files(self, checkpoint: str) -> Outcome:
        """Of this rank's share of a checkpoint's files, for its manifest."""
        return _outcome(Path(checkpoint), partial(hash_share, Path(checkpoint)))

    def _write_indexes(self, folder: Path, written: Sequence[dict[str, Any]]) -> None:
        if self._rank > 0:
            return
        for subfolder, (export, _) in self._exports.items():
            export.finish(folder / subfolder)
        for subfolder, state in self._states.items():
            trees = [files[subfolder] for files in written]
            state.finish(folder / subfolder, [None if tree is None else ShardFile(**tree) for tree in trees])


def _make_inside(checkpoint: Path, path: Path) -> None:
    """Makes a folder in what rank 0 has made. Raises ExportError: this rank does not see that; OSError."""
    if not checkpoint.is_dir():
        raise ExportError(
            f"{checkpoint} is not there on {socket.gethostname()}: trainer.output_dir has to be on a file system that "
            "all ranks share"
        )
    path.mkdir(parents=True, exist_ok=True)


def _outcome(folder: Path, work: Callable[[], Any]) -> Outcome:
    try:
        with named_failures(folder):
            return {"result": work(), "error": ""}
    except (ExportError, ModelError) as error:
        return {"result": None, "error": str(error)}

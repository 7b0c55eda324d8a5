"""A medium over a shared folder: safetensors files, and a marker that appears when all of them are whole."""

import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from shardwise.config import ConfigError, ExportError
from shardwise.durable import fsync_path, write_json_atomic
from shardwise.memfd import SharedTensors
from shardwise.transfer.buckets import BucketReader, Header, Segment
from shardwise.transfer.medium import MEASUREMENT, SENDER, MediumError, Place, Rendezvous, name_of, nowhere
from shardwise.transfer.receipt import SyncReceipt, WeightSyncError
from shardwise.transfer.sync import load_verified
from shardwise.types import WeightReceiver

MARKER = "complete.json"
OWNER = "owner.json"
"""Says which run owns a folder of weights. A run never removes what a folder held before the run came to it."""
_VERSION = re.compile(r"version-(0|[1-9][0-9]*)")
_MEASURED = "measurement"
_REMEDY = "remove its folder, and the version before it is the newest; or let the run write another"


class DiskMedium:
    """A medium that writes each bucket as a safetensors file in the folder of its version. The marker, written last,
    holds the files' xxh3 hashes; a version without one does not exist for readers. Beginning a version removes all
    others but the newest whole one before it: later ones are from a run that has gone back to an earlier checkpoint. A
    measurement leaves nothing behind and removes no version."""

    large_bytes = sys.maxsize
    """No tensor counts as large: each bucket is a file that has to reach the disk."""

    def __init__(self, folder: Path, rendezvous: Rendezvous) -> None:
        self._folder, self._rendezvous = folder, rendezvous
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._hashes: dict[str, str] = {}
        self._unread: Iterator[tuple[str, list[Tensor]]] | None = None
        self._is_measuring = False

    @classmethod
    def join(
        cls,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        folder: Path,
        run: str,
        timeout: timedelta = timedelta(minutes=10),
    ) -> Self:
        """Waits until all ends have joined.

        Args:
            store, rank, size: as for ProcessGroupMedium.join.
            folder: the same for all ends. It is made if there is none; otherwise it has to be empty or the same run's.
            run: identifies the run, also after it was resumed. The sender's value counts.
            timeout: limits every single wait; a whole version has to be written within it.
        Raises:
            ConfigError: at every end: the folder is another run's, holds something else, cannot be written to, or is
                not the same one for all.
            MediumError: an end did not come in time.
        """
        rendezvous = Rendezvous(store, rank, size, timeout=timeout)
        phase = "joining the folder of weights"
        with ExitStack() as stack:
            seen = ""
            if rank == SENDER:
                try:
                    _claim(folder, run)
                except ConfigError as error:
                    with suppress(MediumError):  # the user has to fix it, whoever else is missing
                        rendezvous.meet(phase, json.dumps({"refusal": str(error)}))
                    raise
                seen = Path(stack.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix=".joining.")).name).name
            said = json.loads(rendezvous.meet(phase, json.dumps({"file": seen}))[SENDER])
            if "refusal" in said:
                raise ConfigError(said["refusal"])
            blind = rendezvous.meet(phase, "" if (folder / said["file"]).is_file() else socket.gethostname())
        if named := [f"{name_of(end)} on {host}" for end, host in enumerate(blind) if host]:
            raise ConfigError(
                f"rollout.placement.folder={folder}: what the sender writes there is not seen by {', '.join(named)}; "
                "give a folder on a file system that all hosts share"
            )
        return cls(folder, rendezvous)

    @property
    def device(self) -> torch.device:
        """See Medium."""
        return torch.device("cpu")

    def meet(self, phase: str, message: str) -> list[str]:
        """See Medium. An end that has come has taken what was sent before."""
        try:
            return self._rendezvous.meet(phase, message)
        finally:
            if self._is_measuring:
                shutil.rmtree(self._folder_of(MEASUREMENT))
                self._is_measuring = False

    def expose(self, memory: SharedTensors, places: Mapping[str, tuple[int, int]]) -> None:
        """See Medium. Does nothing: this medium cannot write to such memory."""

    def exposed(self) -> Mapping[str, Tensor]:
        """See Medium."""
        return {}

    def buffer(self, num_bytes: int) -> Tensor:
        """See Medium. A bucket is on the disk when `send` returns, so one buffer is enough."""
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer[:num_bytes]

    def send(self, header: str, packed: Tensor, laid: Sequence[Tensor] = ()) -> None:
        """See Medium. Receivers hear of the version when it is whole. Raises ExportError: it cannot be written."""
        assert not laid, "no tensor is large here"
        bucket = Header.decode(header)
        if not bucket.failure:
            with self._written():
                self._write(bucket, header, packed)
        if bucket.is_last:
            self._rendezvous.meet("writing weights", header)

    def receive(self, place: Place = nowhere) -> tuple[str, list[Tensor]]:
        """See Medium. Ignores `place`: data stays in the memory that the file was read into."""
        if self._unread is None:
            last = self._rendezvous.meet("waiting for weights to be written", "")[SENDER]
            written = Header.decode(last)
            if written.failure:
                return last, []
            # A file that cannot be read ends the generator: then the last header is what is left to receive.
            self._unread = chain(_read_buckets(self._folder_of(written.version)), [(last, [])])
        header, blocks = next(self._unread)
        if Header.decode(header).is_last:
            self._unread = None
        return header, blocks

    def break_off(self, message: str) -> list[str | None]:
        """See Medium."""
        return self._rendezvous.break_off(message)

    def close(self) -> None:
        """See Medium. The newest whole version stays, for engines that start later."""

    def _folder_of(self, version: int) -> Path:
        return self._folder / (_MEASURED if version == MEASUREMENT else f"version-{version}")

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise ExportError(
                f"rollout.placement.folder={self._folder} cannot be written to ({error}); free space there, or give a "
                "folder that rank 0 may write to"
            ) from None

    def _write(self, bucket: Header, header: str, data: Tensor) -> None:
        folder = self._folder_of(bucket.version)
        if bucket.index == 0:
            self._begin(bucket.version)
        name = _bucket_name(bucket.index)
        self._hashes[name] = _write_bucket(folder / name, header, bucket.segments, data)
        if bucket.is_last:
            fsync_path(folder)
            write_json_atomic(folder / MARKER, {"version": bucket.version, "xxh3": self._hashes})
            fsync_path(folder)
            fsync_path(self._folder)

    def _begin(self, version: int) -> None:
        if version != MEASUREMENT:
            keep = max((whole for whole in _whole_versions(self._folder) if whole < version), default=None)
            for other, folder in _versions(self._folder).items():
                if other != keep:
                    shutil.rmtree(folder)
        self._folder_of(version).mkdir()
        self._is_measuring = version == MEASUREMENT
        self._hashes = {}


def load_version(receiver: WeightReceiver, folder: Path, *, version: int | None = None) -> SyncReceipt:
    """Loads the newest whole version in a folder into an engine and commits it: for an engine that starts long after
    its sender has written, or when the sender is gone.

    Args:
        version: the version that is due; None takes the newest.
    Raises:
        WeightSyncError: there is no whole version, files were damaged, or as `pull_weights`.
    """
    started = time.perf_counter()
    buckets = _read_buckets(_newest(folder))
    reader = BucketReader(lambda _: next(buckets))
    receipt = load_verified(reader, receiver, version=version)
    receiver.commit_weights(receipt.version)
    return replace(receipt, seconds=time.perf_counter() - started)


def _claim(folder: Path, run: str) -> None:
    """Makes the folder the run's, or checks that it is. Raises ConfigError."""
    given = f"rollout.placement.folder={folder}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # it can be written to
            names = {name for name in os.listdir(folder) if not name.startswith(".")}  # file systems add those
        ours = {OWNER, _MEASURED, *(path.name for path in _versions(folder).values())} if OWNER in names else set()
        if others := sorted(names - ours):
            raise ConfigError(
                f"{given} holds {others[0]}, which is not a run's; give an empty folder, or one that is yet to be "
                "made, or move away what is in this one"
            )
        try:
            with (folder / OWNER).open("x") as file:  # if two runs come at once, one succeeds
                json.dump({"run": run}, file)
        except FileExistsError:
            _require_owner(folder / OWNER, run, given)
        shutil.rmtree(folder / _MEASURED, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{given} cannot be written to ({error}); give a folder that rank 0 may write to") from None


def _require_owner(path: Path, run: str, given: str) -> None:
    try:
        owner = json.loads(path.read_text())["run"]
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{given} is a run's, but {path} does not say whose; give another folder") from None
    if owner != run:
        raise ConfigError(
            f"{given} is that of the run {owner}, and this run is {run}; give each run a folder of its own, or remove "
            "this one if nothing needs the weights in it"
        )


def _versions(folder: Path) -> dict[int, Path]:
    """Version -> its folder, whether it is whole or not."""
    named = ((_VERSION.fullmatch(path.name), path) for path in folder.glob("version-*"))
    return {int(match[1]): path for match, path in named if match and path.is_dir() and not path.is_symlink()}


def _whole_versions(folder: Path) -> dict[int, Path]:
    return {version: path for version, path in _versions(folder).items() if (path / MARKER).exists()}


def _newest(folder: Path) -> Path:
    whole = _whole_versions(folder)
    if not whole:
        raise WeightSyncError(f"{folder} holds no whole version of the weights: no version-N/{MARKER} is in it")
    return whole[max(whole)]


def _write_bucket(path: Path, header: str, segments: list[Segment], data: Tensor) -> str:
    """Writes a bucket to the disk and returns the xxh3 hash of the file."""
    tensors = {}
    for segment in segments:
        part = data[segment.offset : segment.offset + segment.num_bytes]
        tensors[_key(segment)] = segment.entry.tensor(part) if _is_whole(segment) else part
    save_file(tensors, path, metadata={"bucket": header})
    fsync_path(path)
    return xxhash.xxh3_64_hexdigest(np.fromfile(path, dtype=np.uint8).data)


def _read_buckets(folder: Path) -> Iterator[tuple[str, list[Tensor]]]:
    """Yields headers and blocks as they were sent, but with the offsets in the file, because safetensors puts tensors
    in an order of its own. Raises WeightSyncError."""
    for name, expected in _read_marker(folder):
        path = folder / name
        try:
            raw = np.fromfile(path, dtype=np.uint8)
        except OSError as error:
            raise WeightSyncError(f"{path} cannot be read: {error}") from error
        if xxhash.xxh3_64_hexdigest(raw.data) != expected:
            raise WeightSyncError(f"{path} is damaged: its xxh3 hash is not the one in {MARKER}")
        length = int.from_bytes(raw[:8].tobytes(), "little")
        table = json.loads(raw[8 : 8 + length].tobytes())
        bucket = Header.decode(table["__metadata__"]["bucket"])
        moved = [replace(segment, offset=table[_key(segment)]["data_offsets"][0]) for segment in bucket.segments]
        yield replace(bucket, segments=moved).encode(), [torch.from_numpy(raw[8 + length :])]
    # Readers stop at the last bucket, so they get here only if it is missing.
    raise WeightSyncError(f"{folder / MARKER} is damaged: it does not name the version's last file; {_REMEDY}")


def _read_marker(folder: Path) -> list[tuple[str, str]]:
    """Files and their hashes, in the order of the buckets. Raises WeightSyncError."""
    path = folder / MARKER
    try:
        marker = json.loads(path.read_text())
    except OSError as error:
        raise WeightSyncError(f"{folder} holds no whole version of the weights: {error}") from error
    except ValueError:  # not JSON, or not text
        marker = None
    match marker:
        case {"xxh3": dict(hashes)} if hashes:
            names = [_bucket_name(index) for index in range(len(hashes))]
            if hashes.keys() == set(names):
                return [(name, hashes[name]) for name in names]
    raise WeightSyncError(f"{path} is damaged: it does not hold the hashes of the version's files; {_REMEDY}")


def _bucket_name(index: int) -> str:
    return f"bucket-{index:05}.safetensors"


def _key(segment: Segment) -> str:
    return segment.entry.name if _is_whole(segment) else f"{segment.entry.name}#{segment.start}"


def _is_whole(segment: Segment) -> bool:
    """Whether it is a tensor that others can read under its name, and not a part of one or its changes."""
    return segment.entry.encoding == "whole" and segment.num_bytes == segment.entry.num_bytes

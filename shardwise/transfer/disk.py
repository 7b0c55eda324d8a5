"""A medium over a shared folder: safetensors files, and a marker that appears when all of them are whole."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from shardwise.observability import write_json_atomic
from shardwise.transfer.base import SyncReceipt, WeightSyncError
from shardwise.transfer.buckets import BucketReader, Header, Segment
from shardwise.transfer.medium import SENDER, Rendezvous
from shardwise.transfer.sync import load_verified
from shardwise.types import WeightReceiver

MARKER = "complete.json"
_PREFIX = "version-"


class DiskMedium:
    """Each bucket is a safetensors file in the folder of its version. The marker, written last, holds the files' xxh3
    hashes; a version without one does not exist for readers. Where a version is begun, all are removed but the newest
    whole one before it: later ones are of a run that has gone back to an earlier checkpoint."""

    def __init__(self, folder: Path, rendezvous: Rendezvous) -> None:
        self._folder, self._rendezvous = folder, rendezvous
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._hashes: dict[str, str] = {}
        self._unread: Iterator[tuple[str, Tensor]] | None = None

    @classmethod
    def join(
        cls, store: dist.Store, rank: int, size: int, *, folder: Path, timeout: timedelta = timedelta(minutes=10)
    ) -> Self:
        """Waits until all ends have joined.

        Args:
            store, rank, size: as ProcessGroupMedium.join.
            folder: the same one for all ends; made if there is none.
            timeout: of every single wait; a whole version has to be written within it.
        Raises:
            MediumError: an end did not come in time.
        """
        rendezvous = Rendezvous(store, rank, size, timeout=timeout)
        folder.mkdir(parents=True, exist_ok=True)
        rendezvous.meet("joining the folder of weights", "")
        return cls(folder, rendezvous)

    @property
    def device(self) -> torch.device:
        """See Medium."""
        return torch.device("cpu")

    def meet(self, phase: str, message: str) -> list[str]:
        """See Medium."""
        return self._rendezvous.meet(phase, message)

    def buffer(self, num_bytes: int) -> Tensor:
        """See Medium. A bucket is on the disk when `send` returns, so one buffer is enough."""
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer[:num_bytes]

    def send(self, header: str, data: Tensor) -> None:
        """See Medium. Receivers hear of the version when it is whole."""
        bucket = Header.decode(header)
        folder = self._folder_of(bucket.version)
        if not bucket.failure:
            if bucket.index == 0:
                self._begin(bucket.version)
            name = f"bucket-{bucket.index:05}.safetensors"
            self._hashes[name] = _write_bucket(folder / name, header, bucket.segments, data)
        if bucket.is_last and not bucket.failure:
            _sync_folder(folder)
            write_json_atomic(folder / MARKER, {"version": bucket.version, "xxh3": self._hashes})
            _sync_folder(folder)
            _sync_folder(self._folder)
        if bucket.is_last:
            self._rendezvous.meet("writing weights", header)

    def receive(self) -> tuple[str, Tensor]:
        """See Medium."""
        if self._unread is None:
            last = self._rendezvous.meet("waiting for weights to be written", "")[SENDER]
            written = Header.decode(last)
            if written.failure:
                return last, self._buffer
            # A file that cannot be read ends the generator: then the last header is what is left to receive.
            self._unread = chain(_read_buckets(self._folder_of(written.version)), [(last, self._buffer)])
        header, data = next(self._unread)
        if Header.decode(header).is_last:
            self._unread = None
        return header, data

    def break_off(self, message: str) -> list[str | None]:
        """See Medium."""
        return self._rendezvous.break_off(message)

    def close(self) -> None:
        """See Medium. The newest whole version stays, for engines that start later."""

    def _folder_of(self, version: int) -> Path:
        return self._folder / f"{_PREFIX}{version}"

    def _begin(self, version: int) -> None:
        before = [whole for whole in _whole_versions(self._folder) if whole < version]
        keep = self._folder_of(max(before)) if before else None
        for folder in self._folder.glob(f"{_PREFIX}*"):
            if folder != keep:
                shutil.rmtree(folder)
        self._folder_of(version).mkdir()
        self._hashes = {}


def load_version(receiver: WeightReceiver, folder: Path, *, version: int | None = None) -> SyncReceipt:
    """Loads the newest whole version in a folder into an engine and commits it: for one that starts when its sender has
    long written, or is gone.

    Args:
        version: the one that is due; None takes the newest.
    Raises:
        WeightSyncError: there is no whole version, files were damaged, or as `pull_weights`.
    """
    started = time.perf_counter()
    reader = BucketReader(partial(next, _read_buckets(_newest(folder))))
    receipt = load_verified(reader, receiver, version=version)
    receiver.commit_weights(receipt.version)
    return replace(receipt, seconds=time.perf_counter() - started)


def _whole_versions(folder: Path) -> dict[int, Path]:
    """By version."""
    return {
        int(marker.parent.name.removeprefix(_PREFIX)): marker.parent for marker in folder.glob(f"{_PREFIX}*/{MARKER}")
    }


def _newest(folder: Path) -> Path:
    whole = _whole_versions(folder)
    if not whole:
        raise WeightSyncError(f"{folder} holds no whole version of the weights: no {_PREFIX}N/{MARKER} is in it")
    return whole[max(whole)]


def _write_bucket(path: Path, header: str, segments: list[Segment], data: Tensor) -> str:
    """Returns the xxh3 hash of the file, which is on the disk then."""
    tensors = {}
    for segment in segments:
        part = data[segment.offset : segment.offset + segment.num_bytes]
        tensors[_key(segment)] = segment.entry.tensor(part) if _is_whole(segment) else part
    save_file(tensors, path, metadata={"bucket": header})
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return xxhash.xxh3_64_hexdigest(np.fromfile(path, dtype=np.uint8).data)


def _read_buckets(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Headers and data as they were sent, but for the places in a file: safetensors puts tensors in an order of its
    own."""
    try:
        marker = json.loads((folder / MARKER).read_text())
    except OSError as error:
        raise WeightSyncError(f"{folder} holds no whole version of the weights: {error}") from error
    for name, expected in sorted(marker["xxh3"].items()):
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
        yield replace(bucket, segments=moved).encode(), torch.from_numpy(raw[8 + length :])


def _key(segment: Segment) -> str:
    return segment.entry.name if _is_whole(segment) else f"{segment.entry.name}#{segment.start}"


def _is_whole(segment: Segment) -> bool:
    """Whether it is a tensor that others can read under its name; else it is a part of one, or its changes."""
    return segment.entry.encoding == "whole" and segment.num_bytes == segment.entry.num_bytes


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

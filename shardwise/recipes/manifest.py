"""manifest.json: every file of a checkpoint with its size and hash. It is written last, so a checkpoint that has one is
whole."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.config import ModelError
from shardwise.engine import raised_on_every_rank
from shardwise.engine.state_files import shard_files
from shardwise.engine.verified_files import FileRecord, read_sealed_json, write_sealed_json

MANIFEST = "manifest.json"


def hash_share(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """By the path in the checkpoint, of this rank's share of the files, so that the ranks together read each once.

    Shards of a training state are left out: the index beside them holds the hashes of their tensors.
    """
    return {name: asdict(FileRecord.of(checkpoint / name)) for name in _share(_files(checkpoint))}


def write_manifest(checkpoint: Path, shares: Sequence[dict[str, dict[str, Any]]], *, step: int) -> None:
    """From what `hash_share` gave on every rank. Raises OSError."""
    files = {name: record for share in shares for name, record in share.items()}
    write_sealed_json(checkpoint / MANIFEST, {"step": step, "num_ranks": len(shares), "files": files})


def verify_share(checkpoint: Path) -> None:
    """Collective. Reads this rank's share of the files.

    Raises:
        ModelError: on every rank: a file is missing or is not what was written; names the first.
    """
    with raised_on_every_rank(ModelError):
        files = read_sealed_json(checkpoint / MANIFEST)["files"]
        for name in _share(files):
            FileRecord(**files[name]).check(checkpoint / name)


def _files(checkpoint: Path) -> list[str]:
    left_out = set(shard_files(checkpoint))
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path not in left_out]
    return [path.relative_to(checkpoint).as_posix() for path in files]


def _share(names: Iterable[str]) -> list[str]:
    return sorted(names)[dist.get_rank() :: dist.get_world_size()]

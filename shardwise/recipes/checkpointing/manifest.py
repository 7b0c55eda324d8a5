"""manifest.json: lists every file of a checkpoint with its size and hash, and for weights the dtype, shape and hash of
each tensor. It is written last, so a checkpoint that has one is whole."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import torch.distributed as dist

from shardwise.config import ModelError
from shardwise.engine import raised_on_every_rank
from shardwise.engine.files.safetensors_file import SafetensorsReader
from shardwise.engine.files.state_files import INDEX, ShardFile, StateIndex, deal, described, own_share, shard_files
from shardwise.engine.files.verified_files import FileRecord, read_sealed_json, write_sealed_json
from shardwise.recipes.checkpointing.checkpoints import WEIGHTS, checkpoint_of, is_checkpoint

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest.json says beside sizes and hashes."""

    files: frozenset[str]
    """Paths in the checkpoint, without shards of training states."""
    metrics: dict[str, float]
    """Finite metrics of the step after which it was saved."""
    all_finite: bool
    """Whether weights and states were checked for NaN and infinities, and had none."""
    save_id: str | None
    """Id of the save, which only copies of the checkpoint share; None in early ones."""

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Reads a checkpoint's manifest. Raises ModelError: there is none, or it is damaged."""
        content = read_sealed_json(checkpoint / MANIFEST)
        return cls(frozenset(content["files"]), content["metrics"], content["all_finite"], content.get("save_id"))

    @classmethod
    def find(cls, checkpoint: Path) -> Self | None:
        """Reads a checkpoint's manifest; None if there is none, or a damaged one."""
        try:
            return cls.read(checkpoint)
        except ModelError:
            return None


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """The record of a safetensors file of weights: dtype and shape of its tensors, and the hashes of a ShardFile.

    Example: `WeightsFile(72, "5d41402abc4b2a76", {"norm.weight": "b9719d911017c592"}, {"norm.weight": "bfloat16 [4]"})`
    """

    num_bytes: int
    header_xxh3: str
    tensor_xxh3: dict[str, str]
    tensors: dict[str, str]
    """Name -> dtype and shape."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Reads a whole file. Raises ModelError: it cannot be read, or is no safetensors file."""
        with closing(SafetensorsReader(path)) as file:
            tensors = described(file)
        return cls(**asdict(ShardFile.of(path)), tensors=tensors)

    def check(self, path: Path) -> None:
        """Verifies the file. Raises ModelError: missing, cut or changed, or with other tensors; names the tensor."""
        ShardFile(self.num_bytes, self.header_xxh3, self.tensor_xxh3).check(path, tensors=self.tensors)


def deal_files(checkpoint: Path, num_ranks: int) -> list[list[str]]:
    """Returns, by rank, the paths in the checkpoint of the files that a rank hashes for the manifest, each file once.

    Shards of a training state are left out: the index beside them holds dtypes, shapes and hashes of their tensors.
    Asks the file system about every file, so one rank should do it for all. Raises OSError.
    """
    left_out = set(shard_files(checkpoint))
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path not in left_out]
    return deal([path.relative_to(checkpoint).as_posix() for path in files], num_ranks)


def hash_files(names: Iterable[str], checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Returns path in the checkpoint -> record of each of these files. Raises OSError, ModelError: a file cannot be
    read."""
    return {name: asdict(_record_of(checkpoint / name)) for name in names}


def hash_share(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Returns what `hash_files` does, for this rank's share of the files, where every rank looks for all."""
    return hash_files(deal_files(checkpoint, dist.get_world_size())[dist.get_rank()], checkpoint)


def write_manifest(
    checkpoint: Path,
    shares: Sequence[dict[str, dict[str, Any]]],
    *,
    step: int,
    meshes: Mapping[str, Mapping[str, int]] | None = None,
    metrics: Mapping[str, float] | None = None,
    all_finite: bool = False,
) -> None:
    """Writes the manifest, which comes last, with an id that no other save has. Raises OSError.

    Args:
        shares: what `hash_files` returned on every rank.
        meshes: engine -> axis of its mesh -> ranks.
        metrics: metrics of the step; finite.
        all_finite: whether weights and states were checked for NaN and infinities, and have none.
    """
    files = {name: record for share in shares for name, record in share.items()}
    content = {
        "save_id": uuid4().hex,
        "step": step,
        "num_ranks": len(shares),
        "meshes": {name: dict(mesh) for name, mesh in (meshes or {}).items()},
        "all_finite": all_finite,
        "metrics": dict(metrics or {}),
        "files": files,
    }
    write_sealed_json(checkpoint / MANIFEST, content)


def verify_share(checkpoint: Path, *, with_shards: bool = True) -> None:
    """Collective. Verifies this rank's share of the files.

    Args:
        with_shards: whether shards of training states are among them, which loading verifies too.
    Raises:
        ModelError: on every rank: a file is missing or is not what was written; names the first, and the tensor.
    """
    with raised_on_every_rank(ModelError):
        checks = _checks(checkpoint, with_shards=with_shards)
        for name in own_share(checks):
            checks[name](checkpoint / name)


def verify_weights(folder: Path) -> None:
    """Verifies the weight files of a folder in a checkpoint, such as hf/, adapter/ or critic/hf/. A folder outside of
    checkpoints is not checked, nor is one that was copied out of one: people may change it as they like.

    Raises:
        ModelError: the manifest is damaged, or missing in a run's folder, or a file is not what was written; names it,
            and the tensor.
    """
    within = folder.resolve()
    checkpoint = next((one for one in within.parents if is_checkpoint(one) and (one / MANIFEST).is_file()), None)
    if checkpoint is None:
        if (partial := checkpoint_of(folder)) is not None:
            raise ModelError(
                f"{partial} has no {MANIFEST}, which is written last: it is not whole, or not a whole copy; take "
                f"another checkpoint, or a copy of {folder} in another place, which is taken as it is"
            )
        return
    try:
        for name, record in read_sealed_json(checkpoint / MANIFEST)["files"].items():
            if (checkpoint / name).parent == within and Path(name).suffix == ".safetensors":
                _record_from(record).check(checkpoint / name)
    except ModelError as error:
        raise ModelError(
            f"{error}; take another checkpoint, or a copy of {folder} in another place, which is taken as it is"
        ) from None


def has_whole_weights(checkpoint: Path) -> bool:
    """Returns whether its hf/ is what was written, whatever became of the training state. Reads all files of hf/."""
    try:
        files = read_sealed_json(checkpoint / MANIFEST)["files"]
        weights = {name: record for name, record in files.items() if Path(name).parts[0] == WEIGHTS}
        for name, record in weights.items():
            _record_from(record).check(checkpoint / name)
    except ModelError:
        return False
    return bool(weights)


def _checks(checkpoint: Path, *, with_shards: bool) -> dict[str, Callable[[Path], None]]:
    """Returns path in the checkpoint -> function that compares the file with what was written."""
    files = read_sealed_json(checkpoint / MANIFEST)["files"]
    checks: dict[str, Callable[[Path], None]] = {name: _record_from(tree).check for name, tree in files.items()}
    for folder in [Path(name).parent for name in files if with_shards and Path(name).name == INDEX]:
        index = StateIndex.read(checkpoint / folder)
        checks |= {(folder / shard).as_posix(): index.check for shard in index.files}
    return checks


def _record_of(path: Path) -> FileRecord | WeightsFile:
    return WeightsFile.of(path) if path.suffix == ".safetensors" else FileRecord.of(path)


def _record_from(tree: dict[str, Any]) -> FileRecord | ShardFile | WeightsFile:
    """Makes the record. Manifests of earlier versions have a ShardFile for weights, or a FileRecord for every file."""
    if "tensors" in tree:
        return WeightsFile(**tree)
    return ShardFile(**tree) if "tensor_xxh3" in tree else FileRecord(**tree)

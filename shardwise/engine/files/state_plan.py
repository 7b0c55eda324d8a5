"""Which rank writes which rows of a training state. Every rank works out the whole plan from names, shapes and layouts,
so nothing is exchanged."""

from collections.abc import Iterable, Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.engine.files.state_files import Cut, Part, shard_name
from shardwise.engine.shards import rows_by_replica


def planned_cuts(tensors: Mapping[str, Tensor]) -> dict[str, Cut]:
    """Returns the parts that each tensor is written in, by the ranks of one of the replicas that hold it. Replicas take
    turns, so that they write about as many bytes; the first one writes all numbers (step counters), so that a rank,
    which needs every one, has one more file to open and not one of every rank.

    Args:
        tensors: whole on every rank, or sharded along dim 0; the same names and layouts in the same order on all ranks.
    """
    cuts_of_layouts: dict[object, list[Cut]] = {}
    bytes_of_replicas: dict[int, list[int]] = {}  # what each writes, by how many they are
    planned = {}
    for name, tensor in tensors.items():
        layout = tensor.shape[:1], (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        if layout not in cuts_of_layouts:
            cuts_of_layouts[layout] = [_cut(shards) for shards in rows_by_replica(tensor)]
        cuts = cuts_of_layouts[layout]
        num_bytes = bytes_of_replicas.setdefault(len(cuts), [0] * len(cuts))
        replica = num_bytes.index(min(num_bytes)) if tensor.dim() else 0
        num_bytes[replica] += tensor.nbytes
        planned[name] = cuts[replica]
    return planned


def _cut(shards: Iterable[tuple[range, int]]) -> Cut:
    return Cut(tuple(Part(rows.start, rows.stop, shard_name(rank)) for rows, rank in shards))

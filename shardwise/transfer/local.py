"""Weight sync inside one process: from the shards of all ranks into this rank's own rollout engine."""

import time
from collections.abc import Collection, Iterator
from dataclasses import replace

from torch import Tensor

from shardwise.transfer.receipt import Manifest, SyncReceipt, gathered_to_the_end
from shardwise.types import WeightReceiver


def sync_local(
    weights: Iterator[tuple[str, Tensor]],
    receiver: WeightReceiver,
    *,
    version: int,
    may_be_infinite: Collection[str] = (),
) -> SyncReceipt:
    """Collective over the ranks that `weights` are gathered from. Streams them, checks what is served, commits
    `version`.

    Args:
        weights: Hugging Face names and tensors, in the same order on every rank, as TrainEngine.named_weights yields
            them.
        may_be_infinite: names of tensors that may hold infinities: buffers.
    Raises:
        WeightSyncError: the engine does not serve what was sent; the version is not committed.
    """
    started = time.perf_counter()
    manifest = Manifest(version, receiver.served_weights(), may_be_infinite=may_be_infinite)
    with gathered_to_the_end(weights):
        receiver.load_weights(manifest.record(weights))
    num_proven = manifest.verify(receiver.served_checksums())
    receiver.commit_weights(version)
    receipt = manifest.receipt(seconds=time.perf_counter() - started, num_proven=num_proven)
    return replace(receipt, num_bytes_moved=receipt.num_bytes)

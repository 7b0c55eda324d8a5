"""Weight sync inside one process: from the shards of all ranks into this rank's own rollout engine."""

import time
from collections.abc import Collection
from dataclasses import replace

import torch

from shardwise.transfer.base import Manifest, SyncReceipt, gathered_to_the_end
from shardwise.types import WeightReceiver, WeightSender


def sync_local(
    sender: WeightSender,
    receiver: WeightReceiver,
    *,
    version: int,
    dtype: torch.dtype,
    may_be_infinite: Collection[str] = (),
) -> SyncReceipt:
    """Collective over the sender's ranks. Streams the weights in `dtype`, checks what is served, commits `version`.

    Args:
        may_be_infinite: names of tensors that may hold infinities: buffers.
    Raises:
        WeightSyncError: the engine does not serve what was sent; the version is not committed.
    """
    started = time.perf_counter()
    manifest = Manifest(version, receiver.served_weights(), may_be_infinite=may_be_infinite)
    weights = iter(sender.named_weights(dtype))
    with gathered_to_the_end(weights):
        receiver.load_weights(manifest.record(weights))
    num_proven = manifest.verify(receiver.served_checksums())
    receiver.commit_weights(version)
    receipt = manifest.receipt(seconds=time.perf_counter() - started, num_proven=num_proven)
    return replace(receipt, num_bytes_moved=receipt.num_bytes)

"""Measures only what carries weights: how fast a weight sync could be here if it did nothing else."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.ops import all_gather_flat
from shardwise.transfer.buckets import DEFAULT_BUCKET_BYTES, BucketReader, BucketWriter, Entry
from shardwise.transfer.medium import MEASUREMENT, Medium

_EXPOSED = "exposed"
"""What a receiver says whose engine's memory the sender can write to."""
_PIECE_BYTES = 1 << 25
_NUM_PIECES = 4
"""Pieces per measurement. The fastest counts, because the first ones open connections and touch memory."""


def seconds_per_byte_inside(device: torch.device) -> float:
    """Collective. Seconds for each byte of weights on this rank: gathered from the shards of all ranks, then copied."""
    num_ranks = dist.get_world_size()
    shard = torch.zeros(_PIECE_BYTES // num_ranks, dtype=torch.uint8, device=device)
    whole, served = (torch.zeros(len(shard) * num_ranks, dtype=torch.uint8, device=device) for _ in range(2))

    def sync() -> None:
        if num_ranks > 1:
            all_gather_flat(whole, shard)
        served.copy_(whole)
        _wait_for(served)

    return _fastest(sync) / len(whole)


def seconds_per_byte_sent(medium: Medium) -> float:
    """Seconds for each byte until all receivers have taken it; called at the sending end. Raises MediumError."""
    piece = torch.zeros(_PIECE_BYTES, dtype=torch.uint8, device=medium.device)
    _, *others = medium.meet("measuring: beginning", "")
    is_exposed = others == [_EXPOSED]
    place = torch.zeros_like(piece) if is_exposed else piece

    def send() -> None:
        if is_exposed:  # a sync writes to exposed memory, which costs the same
            place.copy_(piece)
            medium.meet("measuring: piece", "")
            return
        writer = BucketWriter(medium, version=MEASUREMENT, bucket_bytes=DEFAULT_BUCKET_BYTES)
        writer.write(Entry.of("piece", piece, "whole", piece.nbytes), piece)
        writer.prove(0)
        writer.finish()
        medium.meet("measuring: piece", "")

    return _fastest(send) / _PIECE_BYTES


def take_pieces(medium: Medium, *, is_exposed: bool = False) -> None:
    """Takes the sender's pieces while it measures; called at the receiving ends. Raises MediumError.

    Args:
        is_exposed: whether the sender will write straight to where the engine of this end has its weights.
    """
    medium.meet("measuring: beginning", _EXPOSED if is_exposed else "")
    for _ in range(_NUM_PIECES):
        if is_exposed:
            medium.meet("measuring: piece", "")
            continue
        reader = BucketReader(medium.receive)
        reader.begin(MEASUREMENT)
        for _, payload in reader.entries():
            _wait_for(payload)
        medium.meet("measuring: piece", "")


def _fastest(work: Callable[[], None]) -> float:
    seconds = []
    for _ in range(_NUM_PIECES):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _wait_for(data: Tensor) -> None:
    if data.device.type != "cpu":
        torch.accelerator.synchronize(data.device)

"""Weights between processes on GPUs: CUDA IPC handles on one, NCCL broadcasts between two."""

import gc
import time
from datetime import timedelta
from functools import partial

import pytest
import torch

pytest.importorskip("xxhash")  # which proves weights
from ends import DictReceiver, DictSender, Died, kill_self, on, random_weights, run_ends, same

from shardwise.transfer import (
    DeltaDecoder,
    DeltaEncoder,
    MediumError,
    ProcessGroupMedium,
    SharedMemoryMedium,
    pull_weights,
    push_weights,
)

DEVICE_TYPE = "cuda"
NUM_SYNCS = 4
BUCKET_BYTES = 4096
"""Smaller than some tensors and larger than others."""


def weights_on(device: torch.device, version: int) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in random_weights(version).items()}


def over_cuda_ipc(join, *, timeout_seconds=30):
    """All ends use one GPU, each in a CUDA context of its own."""
    device = torch.device(DEVICE_TYPE, 0)
    return device, join(SharedMemoryMedium, device=device, timeout=timedelta(seconds=timeout_seconds))


def over_nccl(join, *, timeout_seconds=30):
    """Each end has a GPU of its own: NCCL wants that."""

    class Joined:
        @staticmethod
        def join(store, rank, size, **options):
            device = torch.device(DEVICE_TYPE, rank)
            torch.accelerator.set_device_index(rank)
            return device, ProcessGroupMedium.join(store, rank, size, backend="nccl", device=device, **options)

    return join(Joined, timeout=timedelta(seconds=timeout_seconds))


def push(open_medium, delta, join):
    device, medium = open_medium(join)
    encoder, receipts = DeltaEncoder() if delta else None, []
    for version in range(1, NUM_SYNCS + 1):
        sender = DictSender(weights_on(device, version))
        receipts.append(
            push_weights(
                sender.named_weights(torch.bfloat16), medium, version=version, bucket_bytes=BUCKET_BYTES, delta=encoder
            )
        )
    medium.close()
    return receipts


def pull(open_medium, delta, join, *, closes_after_seconds=0.0):
    device, medium = open_medium(join)
    receiver, decoder, receipts = DictReceiver(weights_on(device, 0)), DeltaDecoder() if delta else None, []
    for version in range(1, NUM_SYNCS + 1):
        receipts.append(pull_weights(receiver, medium, version=version, delta=decoder))
        assert same(receiver.weights, weights_on(device, version)), "other weights arrived"
        assert receiver.version == version
    time.sleep(closes_after_seconds)
    medium.close()
    return receipts


def held_after(act, open_medium, join):
    """Bytes that this process holds on the GPU when it is done."""
    act(open_medium, False, join)
    gc.collect()
    return torch.cuda.memory_allocated()


def push_in_vain(open_medium, join):
    device, medium = open_medium(join, timeout_seconds=6)
    with pytest.raises(MediumError) as caught:
        push_weights(DictSender(weights_on(device, 1)).named_weights(torch.bfloat16), medium, version=1)
    return str(caught.value)


def die_in_the_middle(open_medium, join):
    device, medium = open_medium(join, timeout_seconds=6)
    pull_weights(DictReceiver(weights_on(device, 0), on("experts", kill_self)), medium)


@pytest.fixture(params=["one GPU, cuda ipc", "two GPUs, nccl"])
def open_medium(request, device):
    if request.param == "one GPU, cuda ipc":
        return over_cuda_ipc
    if torch.cuda.device_count() < 2:
        pytest.skip(f"NCCL needs a GPU for each end, and this machine has {torch.cuda.device_count()}")
    return over_nccl


@pytest.mark.parametrize("delta", [False, True], ids=["whole", "delta"])
def test_what_arrives_on_the_gpu_is_what_was_sent(open_medium, tmp_path, delta):
    """Bit by bit, in buckets smaller and larger than tensors, whose memory every end takes anew for each sync."""
    sent, received = run_ends([partial(push, open_medium, delta), partial(pull, open_medium, delta)], tmp_path)
    assert received == sent
    assert [receipt.version for receipt in sent] == [1, 2, 3, 4]
    assert all(receipt.num_proven == receipt.num_tensors for receipt in received)


def test_three_processes_share_the_buckets_of_one_gpu(device, tmp_path):
    pulls = [partial(pull, over_cuda_ipc, False)] * 2
    sent, *received = run_ends([partial(push, over_cuda_ipc, False), *pulls], tmp_path)
    assert received == [sent, sent]


def test_a_receiver_that_dies_in_the_middle_is_named(open_medium, tmp_path):
    said, died = run_ends([partial(push_in_vain, open_medium), partial(die_in_the_middle, open_medium)], tmp_path)
    assert isinstance(died, Died)
    assert "receiver 1" in said


@pytest.mark.parametrize("closes_after_seconds", [0.0, 1.0], ids=["at once", "after the sender"])
def test_buckets_leave_the_gpu_when_the_medium_is_closed(device, tmp_path, closes_after_seconds):
    """Of the receivers too, which have them mapped, whoever closes first."""
    receive = partial(pull, closes_after_seconds=closes_after_seconds)
    acts = [push, pull, receive]
    held = run_ends([partial(held_after, act, over_cuda_ipc) for act in acts], tmp_path)
    assert held == [0, 0, 0]

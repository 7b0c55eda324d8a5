"""Two GPUs over NCCL give the loss and the gradient of one."""

import pytest
import torch
import torch.distributed as dist
from small_gpu_model import (
    LOSSES,
    build,
    flat,
    gradients_of,
    loss_and_gradient,
    loss_of,
    packed,
    relative_error,
    samples_for,
    save_model,
)

from shardwise.controller.process_group import Rank, process_group
from shardwise.engine import take_device

LAYOUTS = {"fsdp": ("fsdp_size=2",), "replicas": ("fsdp_size=1",), "ulysses": ("ulysses_size=2",)}
DTYPES = ("float32", "bfloat16")


def train_on_rank(rank, folder, samples, scratch):
    """Leaves this rank's share of the loss and the whole gradient, by layout, dtype and loss."""
    device, found = take_device(rank), {}
    store = dist.FileStore(str(scratch / "store"), 2)
    with process_group(Rank(rank, 2, rank), device_type=device.type, timeout_seconds=120, store=store):
        for layout, options in LAYOUTS.items():
            num_shards = 1 if layout == "ulysses" else 2
            for dtype in DTYPES:
                for loss in LOSSES:
                    engine = build(folder, device, f"param_dtype={dtype}", *options, loss=loss)
                    step = packed(samples[loss], num_shards=num_shards)
                    part = loss_of(engine, step, loss, shard=rank % num_shards)
                    found[layout, dtype, loss] = part, flat(gradients_of(engine))
    torch.save(found, scratch / f"{rank}.pt")


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ranks(device, small_model, tmp_path_factory):
    """What each of two ranks found."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, and this machine has {torch.cuda.device_count()}")
    scratch = tmp_path_factory.mktemp("ranks")
    samples = {loss: samples_for(loss, small_model, device) for loss in LOSSES}
    torch.multiprocessing.spawn(train_on_rank, (small_model, samples, scratch), nprocs=2)
    return [torch.load(scratch / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_gpus_give_the_loss_and_gradient_of_one(ranks, small_model, device, layout, dtype, loss):
    """In float32 but for the order of sums; in bfloat16 as close to float32 as one GPU is."""
    parts, gradients = zip(*(rank[layout, dtype, loss] for rank in ranks), strict=True)
    assert torch.equal(*gradients), "both ranks hold the same whole"
    exact_loss, exact = loss_and_gradient(small_model, device, loss=loss)
    total = parts[0] if layout == "ulysses" else sum(parts)
    if dtype == "float32":
        assert total == pytest.approx(exact_loss, rel=1e-5)
        assert relative_error(gradients[0], exact) < 1e-4
    else:
        _, one = loss_and_gradient(small_model, device, "param_dtype=bfloat16", loss=loss)
        assert total == pytest.approx(exact_loss, rel=2e-3)
        assert relative_error(gradients[0], exact) < max(1.5 * relative_error(one, exact), 0.01)

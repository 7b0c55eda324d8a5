"""The training state leaves the GPU for files and comes back as it was."""

import pytest
import torch
from small_gpu_model import packed

from shardwise.config import EngineConfig, OptimizerConfig
from shardwise.engine import TrainEngine
from shardwise.engine.shards import local_shard
from shardwise.recipes.losses import sft_loss

pytest.importorskip("xxhash")
KINDS = {
    "adamw": ([], {}),
    "adamw_cpu": ([], {"optimizer": "adamw_cpu"}),
    "muon": ([], {"optimizer": "muon"}),
    "on host": (["offload_policy=true"], {}),
    "bf16 masters": (["param_dtype=bfloat16", "master_dtype=bfloat16"], {}),
}


def steps(engine, count):
    """Loss and gradient norm of every step."""
    step, found = packed(), []
    for _ in range(count):
        metrics = engine.forward_backward(step.shards[0], sft_loss, step.denominators)
        metrics |= engine.optim_step()
        found.append((metrics["train/loss"].result(), metrics["train/grad_norm"].result()))
    return found


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_state_comes_back_from_files_as_it_was(folder, device, tmp_path, kind):
    options, optimizer = KINDS[kind]

    def build():
        config = OptimizerConfig(**{"learning_rate": 1e-3, **optimizer})
        return TrainEngine.build(folder, EngineConfig.load(None, options), device=device, optimizer=config)

    first, second = build(), build()
    steps(first, 2)
    first.state.save(tmp_path / "state")
    second.state.load(tmp_path / "state")
    others = second._optimizer.named_tensors()
    for name, tensor in first._optimizer.named_tensors().items():
        one, other = local_shard(tensor), local_shard(others[name])  # a world of 1: a shard is the whole
        assert one.device == other.device, name
        assert torch.equal(one, other), name
    # FlashAttention adds up its gradients in another order every time.
    assert steps(second, 1)[0] == pytest.approx(steps(first, 1)[0], rel=1e-3)


@pytest.mark.parametrize("kind", ["adamw", "adamw_cpu", "bf16 masters"])
def test_what_is_staged_is_the_state_at_that_moment_whatever_the_device_does_next(folder, device, tmp_path, kind):
    """The host waits for nothing: the copies run beside the next forward and backward pass, and the update after it."""
    options, optimizer = KINDS[kind]
    config = OptimizerConfig(**{"learning_rate": 1e-3, **optimizer})
    engine = TrainEngine.build(folder, EngineConfig.load(None, options), device=device, optimizer=config)
    for number in range(2):  # the second time into buffers that are there
        steps(engine, 1)
        engine.state.save(tmp_path / f"live_{number}")
        staged = engine.state.stage()
        steps(engine, 2)
        engine.offload("params", "optimizer")
        engine.onload("params", "optimizer")
        written = tmp_path / f"staged_{number}"
        written.mkdir()
        staged.finish(written, [staged.write(written)])
        names = {path.name for path in written.iterdir()}
        assert names == {path.name for path in (tmp_path / f"live_{number}").iterdir()}
        for name in names:
            assert (written / name).read_bytes() == (tmp_path / f"live_{number}" / name).read_bytes(), name


def test_threads_write_and_read_behind_what_was_asked_of_the_device_before(folder, device, tmp_path):
    """On a stream that is not the one that a thread begins with."""
    cycles = 300_000_000  # about 0.2 s: longer than a thread takes to begin
    config = OptimizerConfig(learning_rate=1e-3)
    first, second = (TrainEngine.build(folder, EngineConfig(), device=device, optimizer=config) for _ in range(2))
    torch.accelerator.synchronize(device)
    with torch.Stream(device):
        steps(first, 1)
        torch.cuda._sleep(cycles)
        for tensor in first._optimizer.named_tensors().values():
            local_shard(tensor).detach().add_(1)
        first.state.save(tmp_path / "state")
        torch.cuda._sleep(cycles)
        for tensor in second._optimizer.named_tensors().values():
            local_shard(tensor).detach().zero_()
        second.state.load(tmp_path / "state")
        others = second._optimizer.named_tensors()
        for name, tensor in first._optimizer.named_tensors().items():
            assert torch.equal(local_shard(tensor), local_shard(others[name])), name

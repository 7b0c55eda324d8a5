"""Parts of an engine leave the device and come back: the memory is really free in between, and training is the same."""

import pytest
from small_gpu_model import allocated, build, loss_of, packed, train

PARTS = ("params", "grads", "optimizer")


def num_bytes(engine, part) -> int:
    storages = {}
    for tensor in engine._tensors(part):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def with_gradients(folder, device):
    """An engine after one optimizer step and the backward pass of the next."""
    engine = build(folder, device)
    train(engine, 1)
    loss_of(engine, packed())
    return engine


@pytest.mark.parametrize("part", PARTS)
def test_a_part_frees_its_memory_and_comes_back_to_its_device(folder, device, part):
    engine = with_gradients(folder, device)
    size, before = num_bytes(engine, part), allocated()
    assert size >= 4 * engine.num_parameters
    engine.offload(part)
    assert before - allocated() >= 0.95 * size
    engine.onload(part)
    assert allocated() == pytest.approx(before, rel=0.01)
    assert {tensor.device for tensor in engine._tensors(part)} == {device}


@pytest.mark.parametrize("parts", [*[(part,) for part in PARTS], PARTS], ids=[*PARTS, "all"])
def test_training_goes_on_as_if_nothing_had_left(folder, device, parts):
    resident = with_gradients(folder, device)
    resident.optim_step()
    expected = train(resident, 3)
    engine = with_gradients(folder, device)
    engine.offload(*parts)
    engine.onload(*parts)
    engine.optim_step()
    assert train(engine, 3) == pytest.approx(expected, rel=1e-4)


def test_everything_away_leaves_next_to_nothing(folder, device):
    with_gradients(folder, device)  # the workspaces of cuBLAS, larger than this model, come with the first product
    before = allocated()
    engine = with_gradients(folder, device)
    engine.offload(*PARTS)
    assert allocated() - before < 0.05 * 16 * engine.num_parameters

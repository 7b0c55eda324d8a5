"""adamw_8bit by the kernels of bitsandbytes."""

import pytest
import torch
from small_gpu_model import allocated, build, loss_of, packed, relative_error

from shardwise.engine.optim import adamw_8bit

NUM_STEPS = 10


def weights(engine):
    return torch.cat([parameter.full_tensor().detach().flatten() for parameter in engine._model.parameters()])


def test_bitsandbytes_follows_float32_adamw_in_a_quarter_of_its_memory(folder, device, monkeypatch):
    """From the same gradients. Two moments of a byte each with a float32 scale for every 256, float32 those of norms;
    torch's AdamW keeps 8 bytes for a weight."""
    package = pytest.importorskip("bitsandbytes.optim")
    monkeypatch.setattr(adamw_8bit, "_import", {"torchao.optim": None, "bitsandbytes.optim": package}.get)
    engines = [build(folder, device, optimizer=name) for name in ("adamw", "adamw_8bit")]
    exact, in_8bit = engines
    start, sizes = weights(exact), []
    for step in range(NUM_STEPS):
        loss_of(exact, packed())
        for whole, own in zip(exact._model.parameters(), in_8bit._model.parameters(), strict=True):
            own.grad = whole.grad.clone()
        for engine in engines:
            before = allocated()
            engine.optim_step()
            if step == 0:  # states come, and the 4 bytes of a gradient go
                sizes.append((allocated() - before) / engine.num_parameters + 4)
    exact_bytes, bytes_in_8bit = sizes
    assert exact_bytes == pytest.approx(8, rel=0.01)
    assert bytes_in_8bit == pytest.approx(2 + 2 * 4 / 256, rel=0.01)
    movement, exact_movement = weights(in_8bit) - start, weights(exact) - start
    assert 0 < relative_error(movement, exact_movement) < 0.03

import pytest
import torch

from shardwise.engine.optim.loss_scale import LossScaler


def scales_of_torch(outcomes):
    """torch.amp.GradScaler fed with the same overflows."""
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))  # creates its state
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = []
    for finite in outcomes:
        weight.grad = torch.tensor([1.0 if finite else torch.inf])
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_scale_follows_torchs_grad_scaler():
    outcomes = [True] * 3 + [False] + [True] * 2000 + [False, False] + [True] * 4001
    scaler, scales = LossScaler(), []
    for finite in outcomes:
        scaler.update(finite=finite)
        scales.append(scaler.scale)
    assert scales == scales_of_torch(outcomes)
    assert (scales[3], scales[2003], scales[2005], scales[-1]) == (2.0**15, 2.0**16, 2.0**14, 2.0**16)


def test_scale_stops_at_one():
    scaler = LossScaler()
    assert scaler.scale == 65536.0
    for remaining in range(16, 0, -1):
        assert (scaler.scale, scaler.is_at_minimum) == (2.0**remaining, False)
        scaler.update(finite=False)
    assert (scaler.scale, scaler.is_at_minimum) == (1.0, True)
    scaler.update(finite=False)
    assert scaler.scale == 1.0


@pytest.mark.parametrize("num_steps", [1, 1999])
def test_state_carries_the_scale_and_the_steps_towards_growth(num_steps):
    scaler, resumed = LossScaler(), LossScaler()
    scaler.update(finite=False)
    for _ in range(num_steps):
        scaler.update(finite=True)
    resumed.load_state_dict(scaler.state_dict())
    assert scaler.state_dict() == {"scale": 2.0**15, "num_finite_in_a_row": num_steps}
    for _ in range(1999 - num_steps):
        resumed.update(finite=True)
    assert resumed.scale == 2.0**15
    resumed.update(finite=True)
    assert resumed.scale == 2.0**16

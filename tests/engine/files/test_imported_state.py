from pathlib import Path

import pytest
import torch
from sharded_lora import wholes
from tiny_models import tiny_folder, tiny_model

from shardwise.config import EngineConfig, ModelError, OptimizerConfig
from shardwise.engine import TrainEngine
from shardwise.engine.files.foreign import ShardedTensor
from shardwise.engine.files.foreign.tensors import Piece
from shardwise.engine.files.imported_state import AdamWStates
from shardwise.engine.files.safetensors_file import TensorSpec

NUM_UPDATES = 3


def trained():
    model = tiny_model("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(NUM_UPDATES):
        for parameter in model.parameters():
            parameter.grad = (parameter.detach() * 0.5).cos()
        optimizer.step()
    states = {
        f"{key}/{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    return model, states


def sharded(name, tensor):
    pieces = [Piece((0,) * tensor.dim(), tuple(tensor.shape), lambda: tensor.detach())]
    return ShardedTensor.of(name, TensorSpec.of(tensor), pieces, origin=Path("source"))


def shapes(model):
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def load(folder, state):
    engine = TrainEngine.build(
        Path(folder),
        EngineConfig(),
        device=torch.device("cpu"),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        total_steps=10,
    )
    engine.state.load(Path(state))
    tensors = {name: tensor.numpy() for name, tensor in wholes(engine._optimizer.named_tensors()).items()}
    return tensors, engine._optimizer.numbers()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_goes_on_with_the_weights_states_and_updates(run_ranks, tmp_path, dtype):
    """States in bfloat16 become float32, which changes none."""
    model, states = trained()
    found = {name: sharded(name, value.to(dtype)) for name, value in states.items()}
    imported = AdamWStates.of(shapes(model), found)
    assert imported.num_updates == NUM_UPDATES
    imported.write(tmp_path / "state", {name: value.to(dtype) for name, value in model.named_parameters()})
    source = tiny_folder("qwen3", tmp_path / "source")
    for tensors, numbers in run_ranks(load, 2, str(source), str(tmp_path / "state")):
        expected = states | {f"master/{name}": parameter.detach() for name, parameter in model.named_parameters()}
        assert tensors.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(torch.from_numpy(tensors[name]), value.to(dtype).float()), name
        assert numbers["num_steps"] == NUM_UPDATES


def test_states_of_parameters_that_are_not_trained_are_left_out():
    model, states = trained()
    found = {name: sharded(name, value) for name, value in states.items()}
    chosen = {name: shape for name, shape in shapes(model).items() if "layers.1." in name}
    assert set(AdamWStates.of(chosen, found).tensors) == {
        f"{k}/{n}" for n in chosen for k in ("exp_avg", "exp_avg_sq", "step")
    }


def test_states_that_are_not_adamws_are_refused():
    model, states = trained()
    found = {name: sharded(name, value) for name, value in states.items()}
    found["exp_avg/model.norm.weight"] = sharded("x", torch.ones(31))
    found["momentum/model.norm.weight"] = found.pop("exp_avg_sq/model.norm.weight")
    with pytest.raises(ModelError) as error:
        AdamWStates.of(shapes(model), found)
    assert str(error.value) == (
        "the optimizer's states are not AdamW's for the parameters that the run trains: 1 missing: "
        "exp_avg_sq/model.norm.weight; 1 not part of the model: momentum/model.norm.weight; 1 of the wrong shape or "
        "dtype: exp_avg/model.norm.weight is (31,), expected (32,); train the same parameters, or import the weights "
        "alone (without --config)"
    )
    with pytest.raises(ModelError, match=r"72 missing: "):
        AdamWStates.of(shapes(model), {})

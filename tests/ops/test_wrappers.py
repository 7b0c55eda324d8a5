import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardwise.engine.tiled_mlp import TiledMLP
from shardwise.ops import plain_name


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, lambda module: TiledMLP(module, 2)])
def test_plain_names_are_those_before_anything_was_wrapped(wrap):
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "layer": nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.GELU())})
    parameters, modules = (
        [name for name, _ in of(model)] for of in (nn.Module.named_parameters, nn.Module.named_modules)
    )
    model["layer"][0] = wrap(model["layer"][0])
    model["layer"] = checkpoint_wrapper(model["layer"])
    wrapped = [name for name, _ in model.named_modules()]
    assert "layer._checkpoint_wrapped_module.0._checkpoint_wrapped_module.0" in wrapped
    assert list(dict.fromkeys(map(plain_name, wrapped))) == modules
    # The wrappers leave themselves out of the names of parameters in a state dict, but not of named_parameters.
    assert [plain_name(name) for name, _ in model.named_parameters()] == parameters

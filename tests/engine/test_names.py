import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardwise.engine.names import closest_classes, closest_modules, outermost


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp, self.norm = (
            nn.Linear(2, 2),
            nn.Sequential(nn.Linear(2, 2), nn.GELU()),
            nn.LayerNorm(2),
        )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.layers = nn.ModuleList([Block(), Block()])


def test_the_outermost_of_nested_adapters_is_at_the_path_of_what_it_adapts():
    assert outermost("layers.0.experts.base_layer.base_layer") == "layers.0.experts"
    assert outermost("layers.0.experts") == "layers.0.experts"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("layers.0.norms", "layers.0.norm, layers.1.norm, layers.0.mlp, layers.0, layers.0.mlp.0"),
        ("xyz", "embed, layers.0, layers.0.attention, layers.0.mlp, layers.0.mlp.0"),
    ],
)
def test_closest_modules_are_similar_names_or_the_first_ones(given, shown):
    assert closest_modules(Model(), given) == f"its modules have names such as {shown}"


def test_closest_modules_have_plain_names():
    model = Model()
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    message = closest_modules(model, "layers.1.norm")
    assert message.startswith("its modules have names such as layers.1.norm, ")
    assert "_checkpoint" not in message


def test_closest_classes_are_all_that_have_parameters_the_most_similar_first():
    first, *others = closest_classes(Model(), "Blok").removeprefix("its modules are of ").split(", ")
    assert first == "Block"
    assert sorted(others) == ["Embedding", "LayerNorm", "Linear", "Model", "Sequential"]

import pytest
import torch
from pydantic import ValidationError
from tiny_models import tiny_folder

from shardwise.config import ConfigError, EngineConfig, FrozenEngineConfig, ModelConfig, OptimizerConfig
from shardwise.recipes.engine_source import EngineSource

CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", [EngineConfig(ulysses_size=2), EngineConfig(ulysses_size=2).frozen()])
def test_a_source_that_was_sent_is_the_same_trained_or_frozen(layout):
    source = EngineSource(model=ModelConfig(path="there"), layout=layout, head="token_values", seed=3, temperature=0.7)
    arrived = EngineSource.model_validate_json(source.model_dump_json())
    assert arrived == source
    assert type(arrived.layout) is type(layout)


def test_a_key_that_a_source_does_not_have_is_refused():
    with pytest.raises(ValidationError, match="padding"):
        EngineSource.model_validate({"model": {"path": "there"}, "layout": {}, "padding": 0})


def test_trained_engines_need_an_optimizer_and_frozen_ones_take_none(run_ranks, tmp_path):
    for is_trained, num_trained, error in run_ranks(built, 1, str(tiny_folder("llama", tmp_path))):
        assert (is_trained, num_trained) == (True, 0)
        assert (
            error == "strategy=fsdp2_train needs an optimizer; trained engines are fsdp2_train, frozen ones fsdp2_infer"
        )


def built(folder):
    model = ModelConfig(path=folder)
    trained = EngineSource(model=model, layout=EngineConfig())
    engine = trained.build(CPU, optimizer=OptimizerConfig(), total_steps=3)
    frozen = EngineSource(model=model, layout=FrozenEngineConfig()).build(CPU)
    with pytest.raises(ConfigError) as error:
        trained.build(CPU)
    return engine.num_trained_parameters == engine.num_parameters, frozen.num_trained_parameters, str(error.value)

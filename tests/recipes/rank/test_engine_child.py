"""The main of an engine's process: it builds what the config says."""

import importlib.util

import pytest
import torch

from shardwise.config import ConfigError, ModelConfig, SamplingConfig
from shardwise.recipes.rank.rollout_engines import build_rollout
from shardwise.rollout import SupervisedEngine
from shardwise.types import GenerateRequest

CPU = torch.device("cpu")
REQUEST = GenerateRequest(uid="a", prompt_ids=[5, 9], num_completions=3, max_tokens=12, temperature=1.0, seed=3)


def test_it_samples_as_the_config_says(model_folder):
    model = ModelConfig(path=str(model_folder))
    here = build_rollout(model, SamplingConfig(), dtype=torch.float64, device=CPU)
    first = here.generate([REQUEST])[0][0].token_ids[0]
    keys = {"bad_token_ids": [first], "max_concurrent_sequences": 2}
    expected = build_rollout(model, SamplingConfig(**keys), dtype=torch.float64, device=CPU).generate([REQUEST])
    engine = build_rollout(model, SamplingConfig(engine={"process": {}}, **keys), dtype=torch.float64, device=CPU)
    assert isinstance(engine, SupervisedEngine)
    try:
        assert {tensor.dtype for _, tensor in engine.served_weights()} == {torch.float64}
        assert engine.generate([REQUEST]) == expected != here.generate([REQUEST])
    finally:
        engine.close()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_mistake_that_the_process_finds_is_raised_by_its_rank_as_it_is(model_folder):
    config = SamplingConfig(engine={"type": "vllm", "process": {"max_restarts": 0}})
    with pytest.raises(ConfigError, match=r"^rollout\.engine=vllm: vLLM cannot be imported"):
        build_rollout(ModelConfig(path=str(model_folder)), config, dtype=torch.float32, device=CPU)

import importlib.util

import pytest
import torch

from shardwise.config import ConfigError, ModelConfig, SamplingConfig
from shardwise.data import load_tokenizer
from shardwise.recipes.rank.rollout_engines import build_rollout
from shardwise.rollout import EmbeddedEngine
from shardwise.types import GenerateRequest

CPU = torch.device("cpu")


def test_an_embedded_engine_samples_as_its_config_says(model_folder):
    model = ModelConfig(path=str(model_folder))
    request = GenerateRequest(uid="a", prompt_ids=[5, 9], num_completions=3, max_tokens=12, temperature=1.0, seed=3)

    def sample(**keys):
        engine = build_rollout(model, SamplingConfig(**keys), dtype=torch.float64, device=CPU)
        assert isinstance(engine, EmbeddedEngine)
        assert {tensor.dtype for _, tensor in engine.served_weights()} == {torch.float64}
        return engine, engine.generate([request])[0]

    engine, free = sample(max_concurrent_sequences=2)
    assert engine._cached.max_rows == 2
    first = free[0].token_ids
    _, banned = sample(bad_token_ids=[first[0]])
    assert banned[0].token_ids[0] != first[0]
    _, ended = sample(stop_token_ids=[first[1]])
    assert ended[0].token_ids == first[:2]
    assert ended[0].finish_reason == "stop"
    text = load_tokenizer(model).decode(first[2:3])
    stopping = SamplingConfig(stop=[text])
    (found,) = build_rollout(model, stopping, dtype=torch.float64, device=CPU).generate(
        [GenerateRequest(uid="a", prompt_ids=[5, 9], max_tokens=12, temperature=1.0, seed=3, stop=[text])]
    )[0]
    assert found.token_ids == first[: len(found.token_ids)]
    assert found.finish_reason == "stop"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_not_installed_is_refused(model_folder):
    with pytest.raises(ConfigError, match=r"rollout\.engine=vllm: vLLM cannot be imported"):
        build_rollout(
            ModelConfig(path=str(model_folder)), SamplingConfig(engine="vllm"), dtype=torch.float32, device=CPU
        )


def test_sglang_is_refused_where_there_is_no_accelerator(model_folder):
    with pytest.raises(ConfigError, match=r"rollout\.engine=sglang needs an accelerator"):
        build_rollout(
            ModelConfig(path=str(model_folder)), SamplingConfig(engine="sglang"), dtype=torch.float32, device=CPU
        )

"""vLLM over a tiny model, for the tests of its files."""

import importlib.util

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from shardwise.config import VllmRollout
from shardwise.rollout import VllmEngine
from shardwise.types import GenerateRequest

CPU = torch.device("cpu")
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
ARGS = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 25}


@pytest.fixture(scope="session")
def vllm_folder(tmp_path_factory):
    config = Qwen3Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.2,
        eos_token_id=3,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    path = tmp_path_factory.mktemp("vllm") / "model"
    model.save_pretrained(path)
    return path


def open_engine(folder, *, temperature=1.0, dtype=torch.float32, **keys) -> VllmEngine:
    args = ARGS | keys.pop("args", {})
    return VllmEngine.from_folder(
        folder, VllmRollout(args=args, **keys), dtype=dtype, max_rows=4, device=CPU, temperature=temperature
    )


def request(**options) -> GenerateRequest:
    return GenerateRequest(**{"uid": "a", "prompt_ids": [5, 6], "max_tokens": 4, "temperature": 1.0, **options})

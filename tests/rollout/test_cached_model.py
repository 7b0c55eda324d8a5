"""What generation computes with: hidden states behind a cache, and what ends a completion."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwise.config import ConfigError, ModelError
from shardwise.families import attention_of
from shardwise.rollout.cached_model import CachedModel
from shardwise.rollout.kv_cache import CACHED_ATTENTION, KVCache, register_cached_attention

CPU = torch.device("cpu")
TOKENS = torch.tensor([[5, 9, 11, 3, 8, 20, 7]])


@pytest.fixture
def open_model(model_folders):
    def open_folder(name, *, attention=CACHED_ATTENTION, stop=(), banned=(), decode=None):
        register_cached_attention()
        model = AutoModelForCausalLM.from_pretrained(model_folders[name], dtype=torch.float64)
        model.set_attn_implementation(attention_of(model.config, attention))
        return CachedModel(
            model.eval(),
            max_rows=4,
            device=CPU,
            stop_token_ids=stop,
            bad_token_ids=banned,
            decode=decode,
            compile_decode=False,
        )

    return open_folder


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
@torch.inference_mode()
def test_tokens_one_by_one_have_the_hidden_states_of_the_whole_sequence(open_model, model_folders, name):
    cached = open_model(name)
    expected = AutoModelForCausalLM.from_pretrained(model_folders[name], dtype=torch.float64).eval()(TOKENS).logits
    whole = cached.read(TOKENS[0])[None]
    cache = KVCache(num_rows=1, capacity_tokens=TOKENS.shape[1], device=CPU)
    cache.begin_prefill(torch.tensor([0]), [3])
    parts = [cached.hidden_states(TOKENS[:, :3], torch.arange(3)[None], cache)]
    for place in range(3, TOKENS.shape[1]):
        cache.begin_decode(torch.tensor([place]), span=place + 1)
        parts.append(cached.hidden_states(TOKENS[:, place, None], torch.tensor([[place]]), cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-12, rtol=1e-12)
    found = cached.logits(whole[0], cached.projection())
    torch.testing.assert_close(found.double(), expected[0], atol=2e-6, rtol=2e-6)  # logits are float32


def test_attention_that_goes_around_the_cache_is_refused(open_model):
    with pytest.raises(ModelError, match=r"its 2 layers called the cached attention 0 times instead of once each"):
        open_model("llama", attention="eager")


def test_completions_end_at_stop_tokens_and_with_stop_strings(open_model):
    cached = open_model("llama", stop=[17], decode=lambda ids: "".join(chr(96 + one) for one in ids))
    assert cached.is_stopped([4, 17], [])
    assert not cached.is_stopped([17, 4], [])
    assert cached.is_stopped([1, 4, 5], ["de"])
    assert not cached.is_stopped([4, 1, 5], ["de"])


def test_tokens_outside_the_vocabulary_are_refused(open_model):
    with pytest.raises(ConfigError, match="100000"):
        open_model("llama", banned=[100_000])
    cached = open_model("llama", banned=[6, 4])
    assert cached.banned.tolist() == [6, 4]

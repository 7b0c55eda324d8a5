import re

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from shardwise.config import ConfigError
from shardwise.recipes import parity as parity_module
from shardwise.recipes.parity import parity
from shardwise.rollout.kv_cache import KVCache

CPU = torch.device("cpu")
OPTIONS = {"engine": "embedded", "dtype": "float32", "prompts": ["47+85=", "1+1="], "max_tokens": 6}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_with_the_same_weights_agree(model_folder, group_of_one, capsys, dtype):
    assert parity(str(model_folder), CPU, **OPTIONS | {"dtype": dtype})
    printed = capsys.readouterr().out
    compared, computed = map(int, re.search(r"modules compared: (\d+) of (\d+)", printed).groups())
    assert compared == computed > 20
    for name in ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "logprobs, in nats"):
        assert re.search(rf"^{re.escape(name)}( +[0-9.e+-]+ \([0-9.e+-]+\)){{2}}", printed, re.M), name
    assert printed.endswith(
        f"the same: all of this is within the bound of {dtype}, {0.001 if dtype == 'float32' else 0.05} on average\n"
    )


def other_weight(engine, _):
    with torch.no_grad():
        engine._model.model.layers[1].mlp.up_proj.weight.mul_(1.1)


def other_attention(engine, _):
    engine._model.model.layers[1].self_attn.scaling *= 2


def other_norm(engine, _):
    norm = engine._model.model.layers[0].post_attention_layernorm
    assert isinstance(norm, Qwen3RMSNorm)
    norm.variance_epsilon = 1.0


def other_logits(engine, monkeypatch):
    monkeypatch.setattr(engine, "_transform", lambda: None)
    monkeypatch.setattr(engine, "logits", lambda hidden, projection: 2 * (hidden.float() @ projection[:261].float().T))


def forgetful_cache(_, monkeypatch):
    right = KVCache.begin_decode

    def begin_decode(self, positions, *, span):
        right(self, positions - 1, span=span)

    monkeypatch.setattr(KVCache, "begin_decode", begin_decode)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            other_weight,
            "model.layers.1.mlp.up_proj is the first module that differs: the output of model.layers.1.mlp.up_proj, in "
            "prefill, by 0.1 of its size on average (bound 0.001), most (",
        ),
        (
            other_attention,
            "model.layers.1.self_attn is the first module that differs: the input of model.layers.1.self_attn.o_proj, "
            "in prefill, by ",
        ),
        (
            other_norm,
            "model.layers.0.post_attention_layernorm is the first module that differs: the output of "
            "model.layers.0.post_attention_layernorm, in prefill, by ",
        ),
        (
            forgetful_cache,
            "model.layers.0.self_attn is the first module that differs: the input of model.layers.0.self_attn.o_proj, "
            "in decode, by ",
        ),
        (other_logits, "the logprobs differ in prefill, by "),
    ],
)
def test_the_first_module_that_computes_something_else_is_named(
    model_folder, group_of_one, capsys, monkeypatch, fault, told
):
    right = parity_module.build_rollout

    def build_wrong(*args, **options):
        engine = right(*args, **options)
        fault(engine, monkeypatch)
        return engine

    monkeypatch.setattr(parity_module, "build_rollout", build_wrong)
    assert not parity(str(model_folder), CPU, **OPTIONS)
    assert capsys.readouterr().out.splitlines()[-1].startswith(told)


def test_what_does_not_fit_is_refused(model_folder):
    with pytest.raises(ConfigError, match=r"--max-tokens 0 is not at least 1"):
        parity(str(model_folder), CPU, **OPTIONS | {"max_tokens": 0})
    with pytest.raises(ConfigError, match=r"the prompt \+ --max-tokens = \d+ tokens, more than the 96 of the model's"):
        parity(str(model_folder), CPU, **OPTIONS | {"max_tokens": 96})

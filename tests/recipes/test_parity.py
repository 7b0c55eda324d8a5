import re

import pytest
import torch
from tiny_models import tiny_vision_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from shardwise.config import ConfigError, DataError, ModelError
from shardwise.engine import TrainEngine
from shardwise.recipes import parity as parity_module
from shardwise.recipes.opened_model import OpenedModel
from shardwise.recipes.parity import parity
from shardwise.rollout.kv_cache import KVCache

CPU = torch.device("cpu")
OPTIONS = {"engine": "embedded", "dtype": "float32", "prompts": ["47+85=", "1+1="], "max_tokens": 6}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_with_the_same_weights_agree(model_folder, group_of_one, capsys, dtype):
    assert parity(str(model_folder), CPU, **OPTIONS | {"dtype": dtype})
    printed = capsys.readouterr().out
    numbers = re.search(r"modules compared: (\d+) in prefill, (\d+) in decode of the trainer's (\d+)\n", printed)
    assert len(set(numbers.groups())) == 1
    assert int(numbers[1]) > 20
    for name in ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "logprobs, in nats"):
        assert re.search(rf"^{re.escape(name)}( +[0-9.e+-]+ \([0-9.e+-]+\)){{2}}", printed, re.M), name
    assert printed.endswith(
        f"the same: within the bounds of {dtype}, "
        f"{'0.001 on average and 0.01' if dtype == 'float32' else '0.05 on average and 0.5'} for a token\n"
    )


@pytest.mark.parametrize("side", ["build_rollout", "build"])
def test_a_checkpoint_that_a_run_removes_before_it_is_compared_is_told_as_that(whole_run, prune, group_of_one, side):
    prune(TrainEngine if side == "build" else parity_module, side)
    with pytest.raises(ModelError, match=rf"step_3/hf was removed while .*; start again with {whole_run}, of which"):
        parity(str(whole_run), CPU, **OPTIONS)


HEADS_FIRST = {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gemma3_text", HEADS_FIRST),  # calls its rotary embedding twice
        ("exaone4", HEADS_FIRST),  # has norms whose outputs have heads before positions
        (
            "qwen3_5_text",
            {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
            | dict.fromkeys(["linear_num_value_heads", "linear_num_key_heads"], 2)
            | dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 8),
        ),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}),
    ],
)
def test_other_families_agree(model_folder, group_of_one, tmp_path, capsys, family, keys):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 96, "vocab_size": len(tokenizer)}
    special = {"bos_token_id": None, "eos_token_id": 3, "pad_token_id": 0, "initializer_range": 0.2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **special, **keys))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert parity(str(tmp_path), CPU, **OPTIONS), capsys.readouterr().out


def test_a_vision_tower_that_no_prompt_shows_an_image_is_not_called_the_same(
    model_folder, group_of_one, tmp_path, capsys
):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tiny_vision_model("qwen3_vl", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    said = "the vision tower was not compared: no prompt has an image\n"
    assert parity(str(tmp_path), CPU, **OPTIONS)
    assert re.search(rf"modules compared: .*\n{said}the same: ", capsys.readouterr().out)
    assert parity(str(model_folder), CPU, **OPTIONS)
    assert said not in capsys.readouterr().out


def other_weight(engine, _):
    with torch.no_grad():
        engine._model.model.layers[1].mlp.up_proj.weight.mul_(1.1)


def other_token(engine, _):
    """One of all has half more behind the first layer."""

    def hook(_, __, output):
        if output.shape[1] > 5:
            output[:, 5] *= 1.5
        return output

    engine._model.model.layers[0].register_forward_hook(hook)


def other_embedding(engine, _):
    """Before the first layer. What this names has no module that computes it but the layer's caller."""
    engine._model.model.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: ((1.1 * args[0], *args[1:]), kwargs), with_kwargs=True
    )


def other_attention(engine, _):
    engine._model.model.layers[1].self_attn.scaling *= 2


def other_norm(engine, _):
    norm = engine._model.model.layers[0].post_attention_layernorm
    assert isinstance(norm, Qwen3RMSNorm)
    norm.variance_epsilon = 1.0


def other_logits(engine, monkeypatch):
    monkeypatch.setattr(engine._cached, "_transform", lambda: None)
    monkeypatch.setattr(
        engine._cached, "logits", lambda hidden, projection: 2 * (hidden.float() @ projection[:261].float().T)
    )


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
            "prefill, by ",
        ),
        (
            other_token,
            "model.layers.0 is the first module that differs: the output of model.layers.0, in prefill, by ",
        ),
        (
            other_embedding,
            "model is the first module that differs: the input of model.layers.0, in prefill, by ",
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


def test_what_is_computed_elsewhere_and_agrees_again_is_no_difference(model_folder, group_of_one, capsys, monkeypatch):
    right = parity_module.build_rollout

    def build(*args, **options):
        engine = right(*args, **options)
        embedding = engine._model.model.embed_tokens
        with torch.no_grad():
            embedding.weight.mul_(2)
        engine._model.model.layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: ((args[0] / 2, *args[1:]), kwargs), with_kwargs=True
        )
        monkeypatch.setattr(engine._cached, "projection", right(*args, **options)._cached.projection)
        return engine

    monkeypatch.setattr(parity_module, "build_rollout", build)
    assert parity(str(model_folder), CPU, **OPTIONS)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("model.embed_tokens"))
    assert float(row.split()[1]) == pytest.approx(1, rel=0.05)


def test_what_could_not_be_compared_is_no_agreement(model_folder, group_of_one, capsys, monkeypatch):
    right = parity_module.build_rollout

    def build(*args, **options):
        engine = right(*args, **options)
        generate = engine.generate

        def twice(requests):
            generate(requests)
            return generate(requests)

        monkeypatch.setattr(engine, "generate", twice)
        return engine

    monkeypatch.setattr(parity_module, "build_rollout", build)
    assert not parity(str(model_folder), CPU, **OPTIONS)
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("2 layers could not be compared in decode, model.layers.0 the first: ")


def test_what_does_not_fit_is_refused(model_folder):
    with pytest.raises(ConfigError, match=r"--max-tokens 0 is not at least 1"):
        parity(str(model_folder), CPU, **OPTIONS | {"max_tokens": 0})
    with pytest.raises(ConfigError, match=r"the prompt \+ --max-tokens = \d+ tokens, more than the 96 of the model's"):
        parity(str(model_folder), CPU, **OPTIONS | {"max_tokens": 96})


def test_prompts_may_not_spell_what_stands_for_images(model_folder, monkeypatch):
    media = AutoTokenizer.from_pretrained(model_folder).convert_tokens_to_ids("7")
    monkeypatch.setattr(OpenedModel, "media_token_ids", [media])
    with pytest.raises(
        DataError, match=r"^the prompt: the text spells '7', by which the model knows a part of an image"
    ):
        parity(str(model_folder), CPU, **OPTIONS)

"""Model families, one by one: those that are computed right, in training and in generation, and those that are refused.

The families differ in what the two attentions must honour (grouped heads, windows, soft caps, scales, learned or
partial positions) and in what lies around them (head scales, norms after the layer, renamed weights).
"""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, Gemma3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from shardwise.config import FrozenEngineConfig, ModelError
from shardwise.data.packing import pack, unpack
from shardwise.engine import TrainEngine
from shardwise.ops import decoder_layers, unsupported_reason
from shardwise.rollout import EmbeddedEngine
from shardwise.types import GenerateRequest, Sample

CPU = torch.device("cpu")
COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **NO_DROPOUT}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MIXED_WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

GOOD = {
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 4},
    "llama": {},
    "phi3": {},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0, **MIXED_WINDOWS},
    "gemma3_text": {"head_dim": 8, **MIXED_WINDOWS},
    "olmo2": {},
    "olmo3": MIXED_WINDOWS,
    "cohere": {},
    "cohere2": MIXED_WINDOWS,
    "granite": {
        "logits_scaling": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
    },
    "smollm3": {},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": {},
    "opt": {"dropout": 0.0, "attention_dropout": 0.0, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "exaone4": MIXED_WINDOWS,
    "arcee": {},
    "helium": {"head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8},
}

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
ROUTED = EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
"""Multi-head latent attention: the value's head dim is not the query's."""
GOOD |= {
    "deepseek_v2": ROUTED | LATENT,
    "deepseek_v3": ROUTED | LATENT,
    "gpt_oss": EXPERTS | {"num_local_experts": 4, "head_dim": 8, **MIXED_WINDOWS},
    "qwen2_moe": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS | {"num_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "phimoe": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4},
    "granitemoeshared": {"num_local_experts": 4, "shared_intermediate_size": 16},
    "glm4_moe": ROUTED,
    "dots1": ROUTED,
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_intermediate_size": 16, "moe_k": 2},
    "exaone_moe": ROUTED | {"num_experts": 4, "num_shared_experts": 1},
    "solar_open": ROUTED,
    "afmoe": EXPERTS | {"num_experts": 4, "num_dense_layers": 1},
    "cohere2_moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "hy_v3": EXPERTS | {"num_experts": 4, "num_shared_experts": 1},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "mellum": EXPERTS | {"num_experts": 4},
}

LENGTHS = (9, 5, 13, 5)
LONGEST = 19
"""Tokens of the longest of `sequences` and its completion."""
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.9],
    "long_factor": [2.0, 2.5, 4.0, 8.0],
    "original_max_position_embeddings": LONGEST,
}
BATCH_DEPENDENT = {
    "phi3 longrope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": LONGEST},
    "phimoe longrope": GOOD["phimoe"] | {"rope_parameters": LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.5}},
    "llama dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        "max_position_embeddings": LONGEST,
    },
}
"""The model type, and of longer sequences the rotary frequencies would depend on the batch."""
GOOD |= BATCH_DEPENDENT

RECURRENT = "carries a recurrent state"
UNREGISTERED = "does not support attention implementations that are registered with transformers"
BAD = {
    "mamba": ({"state_size": 4}, RECURRENT),
    "mamba2": ({"head_dim": 8, "num_heads": 8, "n_groups": 1}, RECURRENT),
    "rwkv": ({}, RECURRENT),
    "recurrent_gemma": ({"lru_width": 32, "block_types": ["recurrent", "attention"]}, RECURRENT),
    "falcon_h1": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4}, RECURRENT),
    "bamba": ({"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4}, RECURRENT),
    "jamba": (
        {"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
        RECURRENT,
    ),
    "qwen3_5_text": (LINEAR, RECURRENT),
    "qwen3_next": (
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            **LINEAR,
        },
        RECURRENT,
    ),
    "llama4_text": (
        {"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 48},
        "layers of type chunked_attention",
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "has layers of type conv; supported are full_attention, sl"),
    "bloom": ({"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}, UNREGISTERED),
    "xglm": ({"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}, UNREGISTERED),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, UNREGISTERED),
    "codegen": ({"n_ctx": 64, "rotary_dim": 4, **GPT}, UNREGISTERED),
    "stablelm": ({}, UNREGISTERED),
    "falcon": ({"alibi": False, "new_decoder_architecture": False}, UNREGISTERED),
    "gptj": ({"rotary_dim": 4, **GPT}, UNREGISTERED),
    "gpt_neo": ({"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}, UNREGISTERED),
    "bert": ({}, "has a bias on its output projection"),
    "phi": ({}, "has a bias on its output projection"),
    "nemotron": ({}, "NemotronAttention .* does not pass keyword arguments on to its attention"),
    "diffllama": ({}, r"its 2 layers called the (packed|cached) attention 4 times instead of once each"),
    "doge": ({}, "brings an attention mask of its own"),
}


def save_model(family: str, options: dict, folder: Path, model_class=AutoModelForCausalLM):
    """A random model with no two parameters alike, saved; returned as transformers computes it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.split()[0], **COMMON | options)
    model = model_class.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3 if parameter.dim() > 1 else 0.1)
    model.save_pretrained(folder)
    return model


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def eager_logprobs(model, tokens: torch.Tensor) -> torch.Tensor:
    """[L - 1]: of every token but the first, its sequence alone."""
    logprobs = model(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(dim=-1)
    return logprobs[:-1].gather(1, tokens[1:, None])[:, 0]


def train_logprobs(folder: str, lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor] | str:
    """By the engine on a rank, all sequences in one pack; or why it refused."""
    tokens = sequences(lengths)
    samples = [Sample(uid=str(i), token_ids=t, loss_mask=torch.arange(len(t)) > 0) for i, t in enumerate(tokens)]
    step = pack(samples, num_shards=1, max_tokens=64)
    try:
        engine = TrainEngine.build(Path(folder), FrozenEngineConfig(), device=CPU)
        return unpack(step, [[output.logprobs for output in engine.forward(step.shards[0])]])
    except ModelError as error:
        return str(error)


def generate(folder: Path, max_tokens: int = 6):
    engine = EmbeddedEngine.from_folder(folder, dtype=torch.float32, max_rows=3, device=CPU)
    requests = [
        GenerateRequest(uid=str(i), prompt_ids=t.tolist(), num_completions=2, max_tokens=max_tokens, temperature=1.0)
        for i, t in enumerate(sequences())
    ]
    return engine.generate(requests)


@pytest.mark.parametrize("family", GOOD)
def test_family_is_trained_and_generated_as_transformers_computes_it(run_ranks, tmp_path, family):
    model = save_model(family, GOOD[family], tmp_path)
    assert len(decoder_layers(model)) == 2
    (found,) = run_ranks(train_logprobs, 1, str(tmp_path))
    assert not isinstance(found, str), found
    for tokens, logprobs in zip(sequences(), found, strict=True):
        torch.testing.assert_close(logprobs[1:], eager_logprobs(model, tokens), atol=2e-5, rtol=0)
    for tokens, group in zip(sequences(), generate(tmp_path), strict=True):
        for completion in group:
            whole = torch.cat([tokens, torch.tensor(completion.token_ids)])
            expected = eager_logprobs(model, whole)[len(tokens) - 1 :]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", BATCH_DEPENDENT)
def test_a_sequence_that_would_change_the_frequencies_of_others_is_refused(run_ranks, tmp_path, family):
    """transformers gives a sequence other logprobs where it is in one batch with a longer one."""
    model = save_model(family, BATCH_DEPENDENT[family], tmp_path)
    (tokens,) = sequences((LONGEST,))
    alone = eager_logprobs(model, tokens)
    longer = torch.cat([tokens, tokens[:1]])
    with torch.no_grad():
        logits = model(input_ids=torch.stack([longer, longer.flip(0)]), use_cache=False).logits[0, : LONGEST - 1]
    beside_longer = logits.log_softmax(dim=-1).gather(1, tokens[1:, None])[:, 0]
    assert (beside_longer - alone).abs().max() > 0.01

    (found,) = run_ranks(train_logprobs, 1, str(tmp_path), (5, LONGEST + 1))
    with pytest.raises(ModelError) as error:
        generate(tmp_path, max_tokens=7)
    for text in (found, str(error.value)):
        assert f"a sequence of {LONGEST + 1} tokens is longer than the {LONGEST} of " in text
        assert text.endswith(
            f"max_position_embeddings in config.json, and with rope_type {family.split()[1]} the rotary frequencies of "
            "longer sequences depend on the longest one of a batch; use shorter ones"
        )


def scores(folder: str) -> list[torch.Tensor]:
    """Of each sequence, by a frozen reward model on a rank, all in one pack."""
    samples = [Sample(uid=str(i), token_ids=t, loss_mask=torch.arange(len(t)) > 0) for i, t in enumerate(sequences())]
    step = pack(samples, num_shards=1, max_tokens=64)
    engine = TrainEngine.build(Path(folder), FrozenEngineConfig(), device=CPU, head="sequence_scores")
    return [values[-1] for values in unpack(step, [[output.values for output in engine.forward(step.shards[0])]])]


@pytest.mark.parametrize("family", [name for name in GOOD if name in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES])
def test_a_saved_sequence_classifier_of_the_family_is_a_reward_model(run_ranks, tmp_path, family):
    model = save_model(family, GOOD[family] | {"num_labels": 1}, tmp_path, AutoModelForSequenceClassification)
    (found,) = run_ranks(scores, 1, str(tmp_path))
    with torch.no_grad():
        expected = [model(input_ids=tokens[None], use_cache=False).logits[0, 0] for tokens in sequences()]
    assert len(set(torch.stack(expected).tolist())) == len(expected)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", BAD)
def test_family_that_would_be_computed_wrong_is_refused(run_ranks, tmp_path, family):
    options, message = BAD[family]
    save_model(family, options, tmp_path)
    (found,) = run_ranks(train_logprobs, 1, str(tmp_path))
    assert isinstance(found, str), "the engine gave numbers"
    with pytest.raises(ModelError, match=message) as error:
        generate(tmp_path)
    with pytest.raises(ModelError, match=message):
        raise ModelError(found)
    for text in (found, str(error.value)):
        assert "is not supported: it" in text
        assert family.replace("_text", "").replace("_", "") in text.lower().replace("_", "")


def tiny(family="llama", **options):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **COMMON | options))


def test_a_decoder_without_causal_attention_is_refused():
    model = tiny()
    assert unsupported_reason(model) is None
    model.model.layers[1].self_attn.is_causal = False
    assert unsupported_reason(model) == (
        "LlamaForCausalLM (model_type llama) is not supported: it has attention that is not causal"
    )


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda input_ids, **kwargs: None, "takes no position_ids"),
        (lambda input_ids, position_ids: None, "does not pass keyword arguments on to its attention"),
    ],
)
def test_a_forward_that_takes_too_little_is_refused(forward, reason):
    """Without a check the positions of a pack would be swallowed, each sequence begin where the last ended."""
    model = tiny()
    model.model.forward = forward
    assert unsupported_reason(model).endswith(f"it {reason}")


def test_a_model_without_its_list_of_layers_is_refused():
    model = tiny()
    model.config.num_hidden_layers = 3
    assert decoder_layers(model) == []
    assert unsupported_reason(model).endswith("it has no list of num_hidden_layers=3 decoder layers")


def test_decoder_layers_are_neither_experts_nor_those_of_an_image_encoder():
    model = tiny()
    layers = list(model.model.layers)
    for layer in layers:
        layer.mlp.experts = nn.ModuleList([nn.Identity(), nn.Identity()])
    assert decoder_layers(model) == layers
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma3Config(text_config=COMMON | {"head_dim": 8}, vision_config=vision)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert decoder_layers(model) == list(model.model.language_model.layers)
    assert unsupported_reason(model) is None

"""Tiny random models of the families that transformers has: those that are proven, and those that are refused.

The families differ in what the two attentions must honour (grouped heads, windows, soft caps, scales, learned or
partial positions) and in what lies around them (head scales, norms after the layer, renamed weights).
"""

from pathlib import Path

import torch
from tiny_models import TOWER_OF_QWEN2_VL
from transformers import AutoConfig

from shardwise.engine.model_classes import model_from_config

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
WINDOW = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4}
MIXED_WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
SOFT_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
GRANITE = {
    "logits_scaling": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 2.0,
}
SHARED_KEYS = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
    "head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
}
"""The last two layers take keys and values of those before."""
WIDER_HEADS = {"per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 16}}}

FAMILIES = {
    "qwen2": WINDOW,
    "qwen3": WINDOW | {"head_dim": 8},
    "mistral": {"sliding_window": 4},
    "llama": {},
    "phi3": {"sliding_window": 4, "partial_rotary_factor": 0.5},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 12, **SOFT_CAPS, **MIXED_WINDOWS},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 12, **SOFT_CAPS, **MIXED_WINDOWS},
    "olmo2": {},
    "olmo3": MIXED_WINDOWS,
    "cohere": {"use_qk_norm": True, "logit_scale": 0.4},
    "cohere2": MIXED_WINDOWS | {"logit_scale": 0.4},
    "granite": GRANITE,
    "smollm3": {"use_sliding_window": True, **MIXED_WINDOWS},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "starcoder2": {"sliding_window": 4, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    "nemotron": {},
    "gpt2": GPT | {"scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode": GPT,
    "gpt_neox": {"use_parallel_residual": False},
    "opt": {"dropout": 0.0, "attention_dropout": 0.0, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "exaone4": MIXED_WINDOWS,
    "arcee": {},
    "helium": {"head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "ministral": MIXED_WINDOWS | {"head_dim": 8},
    "ministral3": {"head_dim": 8, "sliding_window": 4},
    "seed_oss": {"head_dim": 8, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "olmo": {"clip_qkv": 2.0},
    "apertus": {},
    "hunyuan_v1_dense": {"head_dim": 8},
    "vaultgemma": {"head_dim": 8, "query_pre_attn_scalar": 12, **SOFT_CAPS, **MIXED_WINDOWS},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8},
    "apertus1p5_text": {},
    "bitnet": {},
    "cwm": {"head_dim": 8, **MIXED_WINDOWS},
    "exaone": {"head_dim": 8},
    "gemma3n_text": SHARED_KEYS | {"laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], **SOFT_CAPS},
    "gemma4_unified_text": SHARED_KEYS | WIDER_HEADS,
    "granite_swa": GRANITE | MIXED_WINDOWS | {"layer_rope_theta": [1e4, 1e3]},
    "hyperclovax": GRANITE | {"head_dim": 8},
    "internlm3": {"head_dim": 8},
    "iquestcoder": {"head_dim": 8},
    "jais2": {"head_dim": 8},
    "nanochat": {},
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
CHOSEN_KEYS = {"index_head_dim": 16, "index_n_heads": 16, "index_topk": 3}
"""Fewer than the sequences have."""
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse"]}
SHARED_EXPERT = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16}
FAMILIES |= {
    "deepseek_v2": ROUTED | LATENT | {"routed_scaling_factor": 1.7, "norm_topk_prob": True},
    "deepseek_v3": ROUTED | LATENT,
    "deepseek_v32": ROUTED | LATENT | CHOSEN_KEYS,
    "glm_moe_dsa": ROUTED | LATENT | CHOSEN_KEYS | {"indexer_types": ["full", "shared"]},
    "axk2": ROUTED | LATENT | CHOSEN_KEYS | DENSE_FIRST,
    "dots3_note_text": ROUTED | LATENT | CHOSEN_KEYS | DENSE_FIRST | {"shared_experts_intermediate_size": 16},
    "biogpt": dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop"), 0.0),
    "hy_v4": ROUTED | LATENT | CHOSEN_KEYS | DENSE_FIRST | {"indexer_types": ["full", "shared"]},
    "gpt_oss": EXPERTS | {"num_local_experts": 4, "head_dim": 8, "swiglu_limit": 0.5, **MIXED_WINDOWS},
    "qwen2_moe": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16} | WINDOW,
    "qwen3_moe": EXPERTS | WINDOW | {"num_experts": 4, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "sliding_window": 4},
    "phimoe": {"num_local_experts": 4, "sliding_window": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "clip_qkv": 2.0},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "granitemoe": GRANITE | {"num_local_experts": 4},
    "granitemoeshared": GRANITE | {"num_local_experts": 4, "shared_intermediate_size": 16},
    "glm4_moe": ROUTED | {"routed_scaling_factor": 1.7, "use_qk_norm": True},
    "dots1": ROUTED | {"routed_scaling_factor": 1.7, "norm_topk_prob": True, **MIXED_WINDOWS},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_intermediate_size": 16, "moe_k": 2},
    "exaone_moe": ROUTED | {"num_experts": 4, "num_shared_experts": 1, **MIXED_WINDOWS},
    "solar_open": ROUTED | {"routed_scaling_factor": 1.7},
    "afmoe": EXPERTS
    | {"num_experts": 4, "num_dense_layers": 1, "route_scale": 1.7, "mup_enabled": True, **MIXED_WINDOWS},
    "cohere2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "logit_scale": 0.4, **MIXED_WINDOWS},
    "hy_v3": EXPERTS | {"num_experts": 4, "num_shared_experts": 1},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "mellum": EXPERTS | {"num_experts": 4, **MIXED_WINDOWS},
    "axk1": ROUTED | LATENT | DENSE_FIRST,
    "beam": EXPERTS | MIXED_WINDOWS | DENSE_FIRST | {"num_experts": 4, "n_group": 1, "topk_group": 1},
    "flint": SHARED_EXPERT | MIXED_WINDOWS | {"mlp_only_layers": [0]},
    "gemma4_text": SHARED_KEYS
    | WIDER_HEADS
    | {"use_double_wide_mlp": True, "final_logit_softcapping": 3.0}
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "glm4_moe_lite": ROUTED | LATENT | DENSE_FIRST,
    "granitemoe_swa": GRANITE
    | MIXED_WINDOWS
    | {"num_local_experts": 4, "shared_intermediate_size": 16, "layer_rope_theta": [1e4, 1e3]},
    "kolibri1": SHARED_EXPERT | MIXED_WINDOWS | {"num_local_experts": 4},
    "mimo_v2_flash": ROUTED | MIXED_WINDOWS | DENSE_FIRST | {"v_head_dim": 12},
    "minicpm3": LATENT | {"head_dim": 8, "scale_emb": 2, "dim_model_base": 16},
    "minimax_m3_vl_text": DENSE_FIRST
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 48}
    | {"shared_intermediate_size": 16, "head_dim": 8, "rotary_dim": 4, "index_head_dim": 8},
    "sarvam_mla": ROUTED | LATENT,
    "sarvam_moe": ROUTED,
    # transformers reads the row of a padding token as zeros, whatever the file holds, and embeddings are tied.
    "youtu": LATENT | {"pad_token_id": None},
}

DELTA = (
    LATENT
    | DENSE_FIRST
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "topk_group": 1,
    }
)
STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4}
FAMILIES |= {
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 4,
        "lm_head_multiplier": 0.3,
        "embedding_multiplier": 2.0,
        "mlp_multipliers": [0.7, 1.3],
        "key_multiplier": 0.6,
        "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 1.2,
        "ssm_multipliers": [0.5, 0.7, 1.1, 1.3, 0.9],
        "ssm_in_multiplier": 0.9,
        "ssm_out_multiplier": 1.1,
        "mamba_rms_norm": True,
    },
    "bamba": STATES | {"attn_layer_indices": [1]},
    "granitemoehybrid": STATES
    | GRANITE
    | {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"shared_intermediate_size": 16},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_next": LINEAR | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "llama4_text": {"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 48}
    | {"no_rope_layers": [1, 0], "attention_chunk_size": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"], "head_dim": 8, "sliding_window": 4},
    "lara_mini": SHARED_EXPERT | LINEAR | {"linear_num_value_heads": 4},
    "bailing_hybrid": DELTA | {"num_expert_group": 1},
    "kimi_linear": DELTA | {"num_expert_group": 1},
    "olmo_hybrid": {name: value for name, value in LINEAR.items() if name != "head_dim"},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1], "num_mem_blocks": 1}
    | {"mamba_d_state": 4, "n_mamba_heads": 4, "mamba_headdim": 16}
    | {"attention_head_dim": 16, "attention_hidden_size": 64},
    "nemotron_h": {name: value for name, value in COMMON.items() if name != "num_hidden_layers"}
    | {"layer_types": ["linear_attention", "moe", "full_attention", "mlp"], "head_dim": 8, "moe_latent_size": 16}
    | {"ssm_state_size": 4, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 4}
    | {"n_routed_experts": 4, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention"], "num_experts": 4, "num_dense_layers": 1},
}
"""Linear attention, state spaces and short convolutions, attention between or beside them; chunked attention."""

TEXT = COMMON | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
PICTURES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2} | {
    "patch_size": 4,
    "image_size": 16,
}
SOUNDS = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2} | {
    "subsampling_conv_channels": [8, 4],
    "output_proj_dims": 32,
}
ROTATED = TEXT | {"rope_parameters": TEXT["rope_parameters"] | {"partial_rotary_factor": 1.0}}
DEEP = TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
FAMILIES |= {
    "qwen2_vl": {"text_config": TEXT, "vision_config": TOWER_OF_QWEN2_VL, "image_token_id": 2},
    "qwen2_5_vl": {
        "text_config": TEXT,
        "vision_config": TOWER | {"window_size": 16, "fullatt_block_indexes": [1]},
        "image_token_id": 2,
    },
    "qwen3_vl": {"text_config": TEXT | {"head_dim": 8}, "vision_config": DEEP, "image_token_id": 2},
    "qwen3_5": {
        "text_config": TEXT | LINEAR,
        "vision_config": TOWER | {"num_position_embeddings": 16},
        "image_token_id": 2,
        "architectures": ["Qwen3_5ForConditionalGeneration"],
    },
    "qwen3_5_moe": {
        "text_config": TEXT | LINEAR | SHARED_EXPERT,
        "vision_config": TOWER | {"num_position_embeddings": 16},
        "image_token_id": 2,
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    },
    "qwen3_vl_moe": {
        "text_config": TEXT | EXPERTS | {"num_experts": 4},
        "vision_config": DEEP,
        "image_token_id": 2,
    },
    "gemma3": {
        "text_config": COMMON | MIXED_WINDOWS | {"head_dim": 8},
        "vision_config": PICTURES,
        "image_token_index": 3,
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": COMMON
        | SHARED_KEYS
        | WIDER_HEADS
        | {"use_bidirectional_attention": "vision"}
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
        "vision_config": PICTURES | {"head_dim": 16, "num_key_value_heads": 2},
        "audio_config": SOUNDS,
        "image_token_id": 3,
        "audio_token_id": 2,
    },
    "glm4v": {"text_config": ROTATED, "vision_config": TOWER | {"image_size": 16}, "image_token_id": 2},
    "glm46v": {"text_config": ROTATED, "vision_config": TOWER | {"image_size": 16}, "image_token_id": 2},
    "glm4v_moe": {"text_config": ROTATED | ROUTED, "vision_config": TOWER | {"image_size": 16}, "image_token_id": 2},
}
"""With a vision tower: here they read text, tests/distributed/test_vision.py shows them images."""


def language_model(model_type: str, **options) -> dict:
    """The text_config of a family that takes the language model of another."""
    return COMMON | {"model_type": model_type} | options


CLIP = PICTURES | {"model_type": "clip_vision_model", "num_hidden_layers": 2}
SIGLIP = PICTURES | {"model_type": "siglip_vision_model"}
PIXTRAL = PICTURES | {"model_type": "pixtral", "head_dim": 16}
SQUARE = PICTURES | {"image_size": [16, 16], "patch_size": [4, 4]}
LISTENER = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "output_dim": 32,
} | {"max_source_positions": 50}
# Queries grow with their place in the sequence from the 8th token on.
SCALED_QUERIES = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8} | {
    "llama_4_scaling_beta": 0.3,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LATENT_EXPERTS = {name: value for name, value in (ROUTED | LATENT).items() if name != "head_dim"}
FAMILIES |= {
    "mistral4": LATENT_EXPERTS | {"rope_parameters": SCALED_QUERIES | {"partial_rotary_factor": 0.5}},
    "mistral3": {
        "text_config": language_model("ministral3", head_dim=8, sliding_window=4, rope_parameters=SCALED_QUERIES),
        "vision_config": PIXTRAL,
        "image_token_index": 2,
        "tie_word_embeddings": False,
    },
    "internvl": {"text_config": language_model("qwen2"), "vision_config": SQUARE, "image_token_id": 2},
    "llava": {"text_config": language_model("llama"), "vision_config": CLIP, "image_token_index": 2},
    "llava_next": {
        "text_config": language_model("mistral", sliding_window=4),
        "vision_config": CLIP,
        "image_token_index": 2,
    },
    "llava_onevision": {"text_config": language_model("qwen2"), "vision_config": SIGLIP, "image_token_index": 2},
    "kimi_k25": {
        "text_config": language_model("deepseek_v3", **ROUTED, **LATENT),
        "vision_config": PICTURES | {"pos_emb_height": 4, "pos_emb_width": 4},
        "projection_hidden_size": 32,
        "image_token_id": 2,
    },
    "ernie4_5_vl_moe": {
        "text_config": TEXT
        | DENSE_FIRST
        | {"moe_num_experts": 4, "moe_intermediate_size": [16, 16], "moe_k": 2}
        | {"rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [1, 1, 2]}},
        "vision_config": TOWER,
        "image_token_id": 2,
    },
    "smolvlm": {"text_config": language_model("llama"), "vision_config": PICTURES, "image_token_id": 2},
    "idefics3": {"text_config": language_model("llama"), "vision_config": PICTURES, "image_token_id": 2},
    "lfm2_vl": {
        "text_config": language_model("lfm2", layer_types=["conv", "full_attention"]),
        "vision_config": {name: value for name, value in PICTURES.items() if name != "image_size"}
        | {"model_type": "siglip2_vision_model", "num_patches": 16},
        "projector_hidden_size": 32,
        "image_token_id": 2,
    },
    "granite4_vision": {
        "text_config": COMMON | GRANITE,
        "vision_config": CLIP | {"hidden_size": 64},
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[1, 0]],
        "image_token_index": 2,
    },
    "ovis2": {
        "text_config": language_model("qwen2"),
        "vision_config": PICTURES | {"vocab_size": 24},
        "hidden_size": 32,
        "vocab_size": 97,
        "image_token_id": 2,
    },
    "hunyuan_vl": {
        "text_config": COMMON
        | {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "xdrope_section": [1] * 4}},
        "vision_config": PICTURES
        | {"num_key_value_heads": 2, "max_image_size": 16, "out_hidden_size": 32, "text_hidden_size": 32},
        "image_token_id": 2,
    },
    "exaone4_5": {
        "text_config": language_model("exaone4", **MIXED_WINDOWS),
        "vision_config": TOWER | {"window_size": 16, "fullatt_block_indexes": [1], "num_key_value_heads": 2},
        "image_token_id": 2,
    },
    "glm_ocr": {
        "text_config": ROTATED | {"head_dim": 8},
        "vision_config": TOWER | {"image_size": 16},
        "image_token_id": 2,
    },
    "step3p7": {
        "text_config": COMMON
        | EXPERTS
        | MIXED_WINDOWS
        | DENSE_FIRST
        | {"num_local_experts": 4, "n_routed_experts": 4, "share_expert_dim": 16},
        "vision_config": PICTURES | {"max_position_embeddings": 16},
        "image_token_id": 2,
    },
    "minimax_m3_vl": {
        "text_config": COMMON | FAMILIES["minimax_m3_vl_text"],
        "vision_config": PICTURES,
        "projector_hidden_size": 32,
        "image_token_index": 2,
    },
    "aria": {
        "text_config": COMMON | FAMILIES["aria_text"],
        "vision_config": PICTURES | {"model_type": "idefics3_vision"},
        "projector_patch_to_query_dict": {16: 4},
        "image_token_index": 2,
    },
    "qwen2_5_omni_thinker": {
        "text_config": TEXT,
        "vision_config": TOWER | {"window_size": 16, "fullatt_block_indexes": [1]},
        "audio_config": LISTENER,
        "vision_start_token_id": 3,
        "image_token_id": 2,
    },
    "qwen3_omni_moe_thinker": {
        "text_config": TEXT | EXPERTS | {"num_experts": 4},
        "vision_config": DEEP,
        "audio_config": LISTENER | {"downsample_hidden_size": 8},
        "vision_start_token_id": 3,
        "image_token_id": 2,
    },
}
"""Language models with other models around them, which are kept as they are."""

INDEXED = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4} | {
    "indexer_compress_ratio": 2,
    "hc_count": 2,
    "hc_lowrank": 8,
}
RECURRENT = "carries a recurrent state"
KEYWORDS = "does not pass keyword arguments on to its attention"
UNREGISTERED = "does not support attention implementations that are registered with transformers"
REFUSED = {
    "mamba": ({"state_size": 4}, f"{RECURRENT}|takes no position_ids"),
    "mamba2": ({"head_dim": 8, "num_heads": 8, "n_groups": 1}, f"{RECURRENT}|takes no position_ids"),
    "rwkv": ({}, RECURRENT),
    "recurrent_gemma": ({"lru_width": 32, "block_types": ["recurrent", "attention"]}, RECURRENT),
    "bloom": ({"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}, "takes no position_ids"),
    "xglm": (
        {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "attention_dropout": 0.0, "dropout": 0.0},
        r"its 2 layers called the (packed|cached) attention 0 times",
    ),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, "takes no position_ids"),
    "codegen": ({"n_ctx": 64, "rotary_dim": 4, **GPT}, "has a bias on its output projection"),
    "jamba": (
        {"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
        f"JambaMambaMixer .* {KEYWORDS}|{RECURRENT}",
    ),
    "falcon": ({"alibi": False, "new_decoder_architecture": False}, UNREGISTERED),
    "gptj": ({"rotary_dim": 4, **GPT}, f"has a bias on its output projection|{UNREGISTERED}"),
    "gpt_neo": ({"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}, UNREGISTERED),
    "bert": ({}, "has a bias on its output projection"),
    "phi": ({}, "has a bias on its output projection"),
    "modernbert-decoder": ({}, "has a bias on its output projection"),
    "dory": (
        {"head_dim": 8, "n_input_layers": 2, "n_recurrent_layers": 0, "n_output_layers": 0} | MIXED_WINDOWS,
        "has an output projection of a class of its own",
    ),
    "gpt_neox_japanese": ({"attention_dropout": 0.0}, r"its 2 layers called the (packed|cached) attention 0 times"),
    "deepseek_v4": (ROUTED | {"num_hash_layers": 0}, RECURRENT),
    "minimax": ({"head_dim": 8}, "has layers of type linear_attention"),
    "zaya": ({"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "router_hidden_size": 16}, RECURRENT),
    "inkling_text": ({"head_dim": 8}, "has layers of type hybrid_sliding"),
    "hrm_text": ({"head_dim": 8, "prefix_lm": False, "num_hidden_layers": 4}, "has no list of num_hidden_layers=32"),
    "diffllama": ({}, r"its 2 layers called the (packed|cached) attention 4 times instead of once each"),
    "doge": ({}, "brings an attention mask of its own"),
    "qwen4_exp_text": (LINEAR | SHARED_EXPERT | INDEXED, "whose indexer is of another kind than"),
    "qwen4_exp": (
        {
            "text_config": TEXT | LINEAR | SHARED_EXPERT | INDEXED,
            "vision_config": TOWER | {"num_position_embeddings": 16},
            "image_token_id": 2,
            "architectures": ["Qwen4ExpForConditionalGeneration"],
        },
        "whose indexer is of another kind than",
    ),
    "mllama": (
        {
            "text_config": COMMON
            | {"cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "vision_config": {"attention_heads": 2, "num_global_layers": 1, "intermediate_layers_indices": [0]}
            | {"max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]], "vision_output_dim": 64}
            | PICTURES,
            "image_token_index": 2,
            "architectures": ["MllamaForConditionalGeneration"],
        },
        "has layers that see nothing but images",
    ),
    "cohere2_vision": (
        {
            "text_config": language_model("cohere2", logit_scale=0.4, **MIXED_WINDOWS),
            "vision_config": SIGLIP,
            "alignment_intermediate_size": 32,
            "image_token_id": 2,
        },
        "sets text_config.logit_scale, which its class does not apply",
    ),
    "aya_vision": (
        {
            "text_config": language_model("cohere2", logit_scale=0.4, **MIXED_WINDOWS),
            "vision_config": SIGLIP,
            "image_token_index": 2,
        },
        "sets text_config.logit_scale, which its class does not apply",
    ),
    "nemotron_h_omni": (
        {
            "text_config": FAMILIES["nemotron_h"] | {"model_type": "nemotron_h"},
            "vision_config": PICTURES | {"model_type": "radio", "video_temporal_patch_size": 2, "max_img_size": 16},
            "projector_hidden_size": 32,
            "audio_config": {"model_type": "parakeet_encoder", "hidden_size": 32, "num_hidden_layers": 1}
            | {"projection_hidden_size": 32, "projection_bias": False}
            | {"num_attention_heads": 2, "intermediate_size": 48},
            "image_token_id": 2,
        },
        "has no output projection",
    ),
}


def random_model(family: str, options: dict, head="logprobs"):
    """No two parameters alike."""
    torch.manual_seed(0)
    common = {} if "text_config" in options else COMMON
    config = AutoConfig.for_model(family.split()[0], **common | options)
    model = model_from_config(config, head, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3 if parameter.dim() > 1 else 0.1)
        for buffer in model.buffers():
            if buffer.isinf().all():  # bounds, which a checkpoint brings
                buffer.copy_(buffer.sign() * (2 + torch.rand_like(buffer)))
    return model


def save_model(family: str, options: dict, folder: Path, head="logprobs"):
    """A random model, saved; returned as transformers computes it."""
    model = random_model(family, options, head)
    model.save_pretrained(folder)
    return model

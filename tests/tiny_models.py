"""Small random models of several families, and samples for them, for the tests of engine, rollout and transfer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.types import Sample

FAMILIES = ("qwen3", "llama", "gemma2")
MOE_FAMILIES = ("qwen3_moe", "mixtral")


def families(*quick: str, of: Sequence[str] = FAMILIES) -> list[Any]:
    """All of them as parameters of a test, of which `make test` runs those named."""
    return [*quick, *(pytest.param(name, marks=pytest.mark.full) for name in of if name not in quick)]


def tiny_model(family: str, *, seed: int = 0, **overrides):
    """A random float32 model with eager attention.

    qwen3: tied, grouped queries, query and key norms. llama: untied, and no dimension divides by 4 (k and v even have
    fewer rows than 4 ranks). gemma2: tied, sliding window of 4, both softcaps low enough to bend scores and logits.
    granite: tied; transformers has no class with a value head for it.
    gpt2: tied, its layers are Conv1D, whose weights [in, out] have rows that 4 ranks do not share evenly.
    qwen3_moe and mixtral: untied, 6 fused experts in each layer, which 4 ranks do not share evenly; mixtral has other
    names in its hub checkpoints.
    """
    from transformers import (
        AutoModelForCausalLM,
        Gemma2Config,
        GPT2Config,
        GraniteConfig,
        LlamaConfig,
        MixtralConfig,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    common = {
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = {
        "qwen3": lambda: Qwen3Config(
            **common
            | {
                "vocab_size": 131,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "tie_word_embeddings": True,
            }
            | overrides
        ),
        "llama": lambda: LlamaConfig(
            **common
            | {
                "vocab_size": 101,
                "hidden_size": 30,
                "intermediate_size": 50,
                "num_attention_heads": 3,
                "num_key_value_heads": 1,
                "head_dim": 2,
                "tie_word_embeddings": False,
            }
            | overrides
        ),
        "gemma2": lambda: Gemma2Config(
            **common
            | {
                "vocab_size": 130,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "query_pre_attn_scalar": 12,
                "sliding_window": 4,
                "attn_logit_softcapping": 1.5,
                "final_logit_softcapping": 2.0,
                "tie_word_embeddings": True,
            }
            | overrides
        ),
        "granite": lambda: GraniteConfig(
            **common
            | {
                "vocab_size": 127,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "residual_multiplier": 0.5,
                "embedding_multiplier": 2.0,
                "tie_word_embeddings": True,
            }
            | overrides
        ),
        "gpt2": lambda: GPT2Config(
            **common
            | {"vocab_size": 113, "hidden_size": 30, "n_inner": 50, "num_attention_heads": 3}
            | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
            | overrides
        ),
        "qwen3_moe": lambda: Qwen3MoeConfig(
            **common
            | {
                "vocab_size": 107,
                "hidden_size": 16,
                "intermediate_size": 24,
                "moe_intermediate_size": 12,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 8,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "tie_word_embeddings": False,
            }
            | overrides
        ),
        "mixtral": lambda: MixtralConfig(
            **common
            | {
                "vocab_size": 103,
                "hidden_size": 16,
                "intermediate_size": 10,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 8,
                "num_local_experts": 6,
                "num_experts_per_tok": 2,
                "tie_word_embeddings": False,
            }
            | overrides
        ),
    }[family]()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start at a constant, which would hide one that is never loaded
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


PLACED_FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4v",
    "glm46v",
    "glm4v_moe",
    "glm_ocr",
)
"""Those that see images and find the positions of their tokens themselves."""
GRID_FAMILIES = (*PLACED_FAMILIES, "exaone4_5")
"""Those whose tower is given the grid of an image."""
VISION_FAMILIES = (
    *GRID_FAMILIES,
    "mistral3",
    "internvl",
    "llava",
    "pixtral",
    "llava_next",
    "llava_onevision",
    "idefics3",
    "smolvlm",
    "lfm2_vl",
    "gemma3",
    "gemma4",
)
IMAGE, VIDEO, VISION_START, VISION_END = 5, 6, 7, 8
ROW_END = 9
"""Token ids of the tiny models that see images."""


TOWER_OF_QWEN2_VL = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "mlp_ratio": 2,
}
"""Its config has other names than the towers after it."""


CONSTANTS = ("mm_input_projection_weight", "position_embedding_table")
"""Matrices of Gemma 3 and 4 that start at a constant."""


def tiny_vision_model(family: str, *, seed: int = 0, **overrides):
    """A random float32 model with a vision tower, as `tiny_model`: patches of 4 x 4 pixels, 2 x 2 of them a token.

    qwen2_5_vl: attention in windows of 2 x 2 tokens in the first block, over whole images in the second; untied.
    qwen3_vl: features of both blocks also go into the decoder's layers (deep-stack); tied. qwen3_vl_moe: likewise, 4
    fused experts in each decoder layer; untied. qwen3_5: linear attention in the first decoder layer; untied.
    qwen3_5_moe: likewise, with 4 fused experts and a shared one. qwen2_vl: a tower without windows and without learned
    positions; untied. glm4v, glm46v: learned positions are interpolated to the size of each image, heads are rotated in
    part; untied. glm4v_moe: likewise, with 4 fused experts and a shared one in the second decoder layer. glm_ocr: heads
    are rotated whole, and the tower normalises queries and keys; untied. exaone4_5: a tower like qwen2_5_vl's with
    fewer heads of keys and values; positions are counted; a window in the first decoder layer; untied. mistral3:
    Pixtral, whose patches a projector merges; a window in both decoder layers; untied. internvl: tiles of 16 x 16
    pixels and 4 tokens, with Qwen 2 behind; untied. llava: CLIP, of whose three layers two are read, in pictures of
    8 x 8 pixels and 4 tokens, with Llama behind; untied. pixtral: LLaVA with Pixtral for a tower, a token for each
    patch; untied. llava_next: the tower of llava, on tiles of 8 x 8 pixels; untied. gemma3: SigLIP, of whose 16 patches
    4 tokens are made, which see each other both ways; a window of 3 in the first decoder layer; untied.
    gemma4: tokens of an image see each other both ways in the first decoder layer alone, in its window of 3; every
    layer has embeddings of its own; an audio tower beside the other; untied. idefics3: tiles of 16 x 16 pixels and 4
    tokens, with Llama behind; untied. smolvlm: likewise, tied. llava_onevision: SigLIP on tiles of 8 x 8 pixels and 4
    tokens, more than two of which are scaled down, with Qwen 2 behind; untied. lfm2_vl: SigLIP 2, whose learned
    positions are scaled to the size of each tile; a short convolution in the first decoder layer; tied.
    """
    from transformers import (
        AutoModelForImageTextToText,
        Exaone4_5_Config,
        Gemma3Config,
        Gemma4Config,
        Glm4vConfig,
        Glm4vMoeConfig,
        Glm46VConfig,
        GlmOcrConfig,
        Idefics3Config,
        InternVLConfig,
        Lfm2VlConfig,
        LlavaConfig,
        LlavaNextConfig,
        LlavaOnevisionConfig,
        Mistral3Config,
        Qwen2_5_VLConfig,
        Qwen2VLConfig,
        Qwen3_5Config,
        Qwen3_5MoeConfig,
        Qwen3VLConfig,
        Qwen3VLMoeConfig,
        SmolVLMConfig,
    )

    text = {
        "vocab_size": 131,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    counted = text | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
        "initializer_range": 0.2,
    }
    picture = {name: vision[name] for name in ("hidden_size", "intermediate_size", "patch_size", "initializer_range")}
    picture |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16}
    deep = vision | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    words = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }
    marks = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    marks |= {"image_start_token_id": VISION_START, "image_end_token_id": VISION_END}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    linear = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
    linear |= {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
    linear |= {f"linear_{kind}_head_dim": 8 for kind in ("key", "value")}
    linear |= {"rope_parameters": text["rope_parameters"] | {"partial_rotary_factor": 1.0}}
    embedded = vision | {"num_position_embeddings": 16}
    rope = text["rope_parameters"] | {"partial_rotary_factor": 0.5}
    rotated_in_part = {"hidden_size": 64, "initializer_range": 0.1, "rope_parameters": rope}
    routed = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    glm = vision | {"image_size": 16, "out_hidden_size": 64, "initializer_range": 0.1}
    config = {
        "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
            text_config=text | overrides,
            vision_config=vision | {"window_size": 16, "fullatt_block_indexes": [1]},
            tie_word_embeddings=False,
            **words,
        ),
        "qwen3_vl": lambda: Qwen3VLConfig(
            text_config=text | {"head_dim": 8} | overrides, vision_config=deep, tie_word_embeddings=True, **words
        ),
        "qwen3_5": lambda: Qwen3_5Config(
            text_config=text | linear | overrides, vision_config=embedded, tie_word_embeddings=False, **words
        ),
        "qwen3_5_moe": lambda: Qwen3_5MoeConfig(
            text_config=text | linear | experts | {"shared_expert_intermediate_size": 16} | overrides,
            vision_config=embedded,
            tie_word_embeddings=False,
            **words,
        ),
        "exaone4_5": lambda: Exaone4_5_Config(
            text_config=counted
            | {"model_type": "exaone4", "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
            | overrides,
            vision_config=vision | {"window_size": 16, "fullatt_block_indexes": [1], "num_key_value_heads": 1},
            tie_word_embeddings=False,
            **marks,
        ),
        "mistral3": lambda: Mistral3Config(
            text_config=counted | {"model_type": "mistral", "head_dim": 8, "sliding_window": 8} | overrides,
            vision_config=picture | {"model_type": "pixtral", "head_dim": 16, "image_size": 64},
            tie_word_embeddings=False,
            image_token_id=IMAGE,
        ),
        "internvl": lambda: InternVLConfig(
            text_config=counted | {"model_type": "qwen2"} | overrides,
            vision_config=picture | {"layer_scale_init_value": 0.5},
            tie_word_embeddings=False,
            image_token_id=IMAGE,
        ),
        "llava": lambda: LlavaConfig(
            text_config=counted | {"model_type": "llama"} | overrides,
            vision_config=picture | {"model_type": "clip_vision_model", "num_hidden_layers": 3, "image_size": 8},
            image_token_id=IMAGE,
        ),
        "pixtral": lambda: LlavaConfig(
            text_config=counted | {"model_type": "mistral", "head_dim": 8, "sliding_window": None} | overrides,
            vision_config=picture | {"model_type": "pixtral", "head_dim": 16, "image_size": 64},
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            image_token_id=IMAGE,
        ),
        "llava_next": lambda: LlavaNextConfig(
            text_config=counted | {"model_type": "llama"} | overrides,
            vision_config=picture | {"model_type": "clip_vision_model", "num_hidden_layers": 3, "image_size": 8},
            image_grid_pinpoints=[[8, 16], [16, 8], [16, 16], [8, 24]],
            image_token_id=IMAGE,
        ),
        "gemma3": lambda: Gemma3Config(
            text_config={name: value for name, value in text.items() if name != "rope_parameters"}
            | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 3}
            | {"layer_types": ["sliding_attention", "full_attention"]}
            | overrides,
            vision_config=picture | {"model_type": "siglip_vision_model"},
            mm_tokens_per_image=4,
            tie_word_embeddings=False,
            boi_token_index=VISION_START,
            eoi_token_index=VISION_END,
            image_token_index=IMAGE,
        ),
        "gemma4": lambda: Gemma4Config(
            text_config={name: value for name, value in text.items() if name != "rope_parameters"}
            | {"head_dim": 8, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
            | {"per_layer_config": {"1": {"head_dim": 16}}, "use_bidirectional_attention": "vision"}
            | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": (text | overrides)["vocab_size"]}
            | overrides,
            vision_config=picture
            | {"head_dim": 16, "num_key_value_heads": 2, "pooling_kernel_size": 2}
            | {"position_embedding_size": 160},
            initializer_range=0.2,
            audio_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
            | {"subsampling_conv_channels": [8, 4], "output_proj_dims": 32},
            tie_word_embeddings=False,
            boi_token_id=VISION_START,
            eoi_token_id=VISION_END,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
        ),
        "llava_onevision": lambda: LlavaOnevisionConfig(
            text_config=counted | {"model_type": "qwen2"} | overrides,
            vision_config=picture | {"model_type": "siglip_vision_model", "image_size": 8, "vision_use_head": False},
            image_grid_pinpoints=[[8, 16], [16, 8], [16, 16], [8, 24]],
            vision_aspect_ratio="anyres_max_2",
            image_token_index=IMAGE,
            video_token_index=VIDEO,
        ),
        "lfm2_vl": lambda: Lfm2VlConfig(
            text_config=counted | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]} | overrides,
            vision_config={name: value for name, value in picture.items() if name != "image_size"}
            | {"model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False},
            projector_hidden_size=32,
            image_token_id=IMAGE,
        ),
        "idefics3": lambda: Idefics3Config(
            text_config=counted | {"model_type": "llama"} | overrides,
            vision_config=picture,
            tie_word_embeddings=False,
            image_token_id=IMAGE,
        ),
        "smolvlm": lambda: SmolVLMConfig(
            text_config=counted | {"model_type": "llama"} | overrides,
            vision_config=picture,
            tie_word_embeddings=True,
            image_token_id=IMAGE,
        ),
        "qwen2_vl": lambda: Qwen2VLConfig(
            text_config=text | overrides,
            vision_config=TOWER_OF_QWEN2_VL | {"initializer_range": 0.2},
            tie_word_embeddings=False,
            **words,
        ),
        "glm4v": lambda: Glm4vConfig(text_config=text | rotated_in_part | overrides, vision_config=glm, **marks),
        "glm46v": lambda: Glm46VConfig(text_config=text | rotated_in_part | overrides, vision_config=glm, **marks),
        "glm_ocr": lambda: GlmOcrConfig(
            text_config=text | {"head_dim": 8} | overrides, vision_config=vision | {"image_size": 16}, **marks
        ),
        "glm4v_moe": lambda: Glm4vMoeConfig(
            text_config=text | rotated_in_part | routed | overrides, vision_config=glm, **marks
        ),
        "qwen3_vl_moe": lambda: Qwen3VLMoeConfig(
            text_config=text | {"head_dim": 8} | experts | overrides,
            vision_config=deep,
            tie_word_embeddings=False,
            **words,
        ),
    }[family]()
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith(CONSTANTS):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tiny_folder(family: str, folder: Path, **overrides) -> Path:
    """Saves a tiny model in the Hugging Face layout."""
    tiny_model(family, **overrides).save_pretrained(folder)
    return folder


def empty_model(folder: Path, *, dtype: torch.dtype = torch.float32, dim: int | None = None, mesh=None):
    """The model of a folder with its weights never written: whole, or with every parameter sharded along `dim` (along 0
    where it has no such dimension), each decoder layer an FSDP unit."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from transformers import AutoModelForCausalLM

    from shardwise.model_config import read_model_config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_model_config(folder), dtype=dtype)
    if dim is not None:
        root = torch.nn.Sequential(model)  # fully_shard renames the class of what it shards
        for unit in (*model.base_model.layers, root):
            fully_shard(unit, mesh=mesh, shard_placement_fn=lambda p: Shard(min(dim, p.dim() - 1)))
    model.to_empty(device="cpu")
    if dim is None:
        model.tie_weights()  # without sharding, to_empty gives the tied projection memory of its own
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 0)
    return model


def random_samples(lengths, *, vocab: int = 100, seed: int = 0, prompt_tokens: int = 2) -> list[Sample]:
    """Random tokens; the loss mask has holes, and position 0 and the prompt are never trained."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index, length in enumerate(lengths):
        mask = (torch.arange(length) >= prompt_tokens) & (torch.rand(length, generator=generator) < 0.8)
        mask[-1] = length > 1
        tokens = torch.randint(3, vocab, (length,), generator=generator)
        samples.append(Sample(uid=str(index), token_ids=tokens, loss_mask=mask))
    return samples


def reference_logprobs(model, token_ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """[L] logprobs of one sequence alone by Hugging Face's own forward; 0 at position 0, which has no prediction."""
    logits = model(input_ids=token_ids[None], use_cache=False).logits[0].float() / temperature
    scores = logits[:-1].log_softmax(dim=-1).gather(1, token_ids[1:, None])[:, 0]
    return torch.cat([scores.new_zeros(1), scores])

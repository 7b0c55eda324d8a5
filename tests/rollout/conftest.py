import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

EOS = 3
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # large enough that the likeliest token changes from step to step
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
FAMILIES = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    # A window shorter than the sequences, on every second layer, and both soft caps low enough to matter.
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **SIZES,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=8,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            tie_word_embeddings=False,  # tied and random, it would repeat its last token for ever
        )
    ),
}


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory):
    """A saved random model of each family."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("families")
    for seed, (name, build) in enumerate(FAMILIES.items()):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            build().save_pretrained(root / name)
    return {name: root / name for name in FAMILIES}


@pytest.fixture(scope="session")
def references(model_folders):
    """The same models as transformers runs them."""
    return {
        name: AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        for name, folder in model_folders.items()
    }

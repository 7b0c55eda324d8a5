import json
import os
from pathlib import Path

import pytest
import torch
from stubbed_sglang import open_engine
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


@pytest.fixture(scope="module")
def sglang_stub():
    """Servers that are started are stubs."""
    tests = Path(__file__).parents[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tests / "sglang_stub"), str(tests.parent)]))
        patch.setenv("TORCHELASTIC_RUN_ID", "of the trainer")
        yield


@pytest.fixture(scope="module")
def sglang_journal(sglang_stub, tmp_path_factory):
    """What the stubs were started with and asked, one after the other."""
    path = tmp_path_factory.mktemp("sglang") / "journal"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_STUB_JOURNAL", str(path))
        yield lambda: [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def weights_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def sglang_engine(model_folders, sglang_journal, weights_folder):
    keys = {"weights_folder": str(weights_folder), "sleep_level": 2, "enable_prefix_caching": False}
    args = {"context-length": 40, "log_level": "error"}
    engine = open_engine(model_folders["llama"], stop_token_ids=[7], args=args, **keys)
    yield engine
    engine.close()

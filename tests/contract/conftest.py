"""Small models whose heads are wide enough for vLLM's CPU kernels, and every rollout engine on them.

sglang_stub is SglangEngine on a server that stands in for SGLang's and samples with the embedded engine
(tests/sglang_stub). sglang is the real one, in the environment of the interpreter that SHARDWISE_SGLANG_PYTHON names:
on a GPU, or without one with what SGLang's path for CPUs lacks (tests/cpu_sglang).
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sglang_engines
import torch
from sglang_engines import needs_sglang
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from shardwise.config import ModelConfig, SamplingConfig, SglangRollout, VllmRollout
from shardwise.data.synthetic import train_tokenizer
from shardwise.recipes.rank.rollout_engines import build_rollout
from shardwise.rollout import EmbeddedEngine, RolloutEngine, SglangEngine, VllmEngine

EOS = 3
CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 320,
    "initializer_range": 0.2,  # large enough that the likeliest token changes from step to step
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
FAMILIES = {
    "qwen3": lambda words: Qwen3ForCausalLM(Qwen3Config(**SIZES, vocab_size=words, tie_word_embeddings=True)),
    "llama": lambda words: LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=words, tie_word_embeddings=False)),
}
VLLM_ARGS = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 25}
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
KINDS = [
    "embedded",
    "embedded in a process",
    pytest.param("vllm", marks=needs_vllm),
    pytest.param("vllm in a process", marks=needs_vllm),
    "sglang_stub",
    pytest.param("sglang", marks=needs_sglang),
]
IN_PROCESSES = ("embedded in a process", "sglang_stub")
"""Kinds of which each engine starts a process, seconds of CPU time; what they compute with is that of `embedded`."""
OF_SAMPLING = {
    "test_first_tokens_are_distributed_as_the_softmax_of_the_logits",
    "test_greedy_logprobs_are_at_temperature_one_whatever_the_samples_have",
    "test_what_goes_on_behind_a_token_is_drawn_anew",
    "test_trap_09_sampled_logprobs_are_of_the_policy_at_the_temperature",
}
"""Tests of what is computed, and of nothing that travels to a process and back."""
OF_OPTIONS = {
    "test_own_stop_tokens_end_a_completion_and_stay_in_it",
    "test_bad_tokens_are_never_drawn",
    "test_trap_33_a_stop_or_bad_token_outside_the_vocabulary_is_refused",
}
"""An engine of its own for each; the config travels as a whole, with stop strings as with these."""
STUB = Path(__file__).parents[1] / "sglang_stub"
STUB_VARIABLES = {"PYTHONPATH": os.pathsep.join([str(STUB), str(STUB.parents[1])])}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of engines in processes `make test` has one family in float32, and what is theirs alone."""
    for item in items:
        drawn = getattr(item, "callspec", None)
        kind = None if drawn is None else drawn.params.get("kind")
        if kind not in IN_PROCESSES:
            continue
        is_repeated = item.originalname in OF_SAMPLING or (kind != "sglang_stub" and item.originalname in OF_OPTIONS)
        if (
            is_repeated
            or drawn.params.get("family") == "llama"
            or drawn.params.get("dtype") in ("bf16", torch.bfloat16)
        ):
            item.add_marker("full")


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A saved random model of each family, with a tokenizer of single bytes."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("contract")
    tokenizer = train_tokenizer(["2+3=5"], vocab_size=261)
    for seed, (name, build) in enumerate(FAMILIES.items()):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            build(len(tokenizer)).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in FAMILIES}


@pytest.fixture(scope="session")
def tokenizer(folders):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folders["llama"])


@pytest.fixture(scope="session")
def references(folders):
    """The same models as transformers runs them, in float32."""
    return {
        name: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        for name, folder in folders.items()
    }


@pytest.fixture(scope="session", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def not_in_a_server(kind) -> None:
    """Skips what SglangEngine refuses; tests/rollout/test_sglang.py has the refusals."""
    if kind.startswith("sglang"):
        pytest.skip("SGLang cannot, and SglangEngine refuses")


@pytest.fixture(scope="session")
def open_engine(kind, folders, tokenizer, tmp_path_factory) -> Iterator[Callable[..., RolloutEngine]]:
    """`open_engine("qwen3", dtype=..., temperature=...)`: an engine that is kept for later tests, which therefore put
    back what they load."""
    kept: dict[str, RolloutEngine] = {}

    def build(family: str, *, dtype=torch.float32, temperature=1.0, max_rows=8, has_stop_strings=False, **options):
        if kind.endswith("in a process"):
            return build_supervised(family, dtype, temperature, max_rows, has_stop_strings, **options)
        common = {"dtype": dtype, "max_rows": max_rows, "device": CPU, **options}
        if kind == "vllm":
            config, stops = VllmRollout(args=VLLM_ARGS), {"has_stop_strings": has_stop_strings}
            return VllmEngine.from_folder(folders[family], config, temperature=temperature, **stops, **common)
        common["decode"] = tokenizer.decode if has_stop_strings else None
        if kind == "embedded":
            return EmbeddedEngine.from_folder(folders[family], **common)
        common["device"] = sglang_engines.GPU  # the stub does not look at it
        python, args = (sys.executable, {}) if kind == "sglang_stub" else (sglang_engines.PYTHON, sglang_engines.ARGS)
        weights_folder = str(tmp_path_factory.mktemp("weights"))
        config = SglangRollout(python=python, args=args, weights_folder=weights_folder)
        variables = STUB_VARIABLES if kind == "sglang_stub" else sglang_engines.VARIABLES
        with pytest.MonkeyPatch.context() as patch:  # for the server alone: the engines live until the session ends
            for name, value in variables.items():
                patch.setenv(name, value)
            return SglangEngine.from_folder(folders[family], config, **common)

    def build_supervised(family, dtype, temperature, max_rows, has_stop_strings, **options):
        inside, *_ = kind.split()
        engine = {"type": inside, "process": {}} | ({"args": VLLM_ARGS} if inside == "vllm" else {})
        config = SamplingConfig(
            engine=engine,
            max_concurrent_sequences=max_rows,
            temperature=temperature,
            stop=["="] if has_stop_strings else [],
            **options,
        )
        return build_rollout(ModelConfig(path=str(folders[family])), config, dtype=dtype, device=CPU)

    def keep(family: str, *, temperature=1.0, **options):
        if kind.startswith("vllm"):  # the others give logprobs at the temperature of the request: processes less
            options["temperature"] = temperature
        key = f"{family} {options}"
        if key not in kept:
            kept[key] = build(family, **options)
        return kept[key]

    yield keep
    if kind not in ("embedded", "vllm"):  # which go with this process
        for engine in kept.values():
            engine.close()

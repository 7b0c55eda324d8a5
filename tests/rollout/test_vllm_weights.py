"""Adapters that vLLM is given by themselves. Whole models: test_vllm.py, and the contract of every engine."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from vllm_engines import ARGS, CPU, needs_vllm, request, vllm_folder

from shardwise.config import ConfigError, LoraConfig, ModelConfig, SamplingConfig, TrainingError
from shardwise.recipes.rank.rollout_engines import build_rollout
from shardwise.rollout import EmbeddedEngine, SupervisedEngine, VllmEngine
from shardwise.rollout.vllm_weights import in_names_of
from shardwise.transfer import WeightSyncError, sync_local

__all__ = ["vllm_folder"]  # a fixture

PREFIX = "base_model.model.model.layers.0."
SEQUENCES = [[5, 6, 7, 8, 40, 3], [9, 9, 11], [*range(20, 44), 11]]


def open_with_adapter(folder, lora, *, process=None) -> VllmEngine | SupervisedEngine:
    config = SamplingConfig(
        engine={"type": "vllm", "args": ARGS, "process": process}, max_concurrent_sequences=4, stop=[]
    )
    return build_rollout(ModelConfig(path=str(folder)), config, dtype=torch.float32, device=CPU, lora=lora)


class AdapterSender:
    """Random values of an adapter, as an adapter file names them."""

    def __init__(self, engine, *, seed) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = {
            name: 0.2 * torch.randn(form.shape, generator=generator) for name, form in engine.served_weights()
        }

    def named_weights(self, dtype):
        yield from self.weights.items()


def merged(folder, adapter, scale) -> EmbeddedEngine:
    """The embedded engine with the adapter's product added to the weights."""
    engine = EmbeddedEngine.from_folder(folder, dtype=torch.float32, max_rows=4, device=CPU)
    weights = dict(engine.served_weights())
    for name, b in adapter.items():
        if ".lora_B." in name:
            a = adapter[name.replace(".lora_B.", ".lora_A.")]
            weights[name.removeprefix("base_model.model.").replace(".lora_B.", ".")] += scale * b @ a
    return engine


def assert_same_logprobs(engine, expected, *, bound=2e-5):
    for found, other in zip(engine.logprobs(SEQUENCES), expected.logprobs(SEQUENCES), strict=True):
        assert found == pytest.approx(other, abs=bound)


def modules(*names):
    """A model of nothing but these."""
    model = torch.nn.Module()
    for name in names:
        inner = model
        for part in name.split("."):
            if not hasattr(inner, part):
                inner.add_module(part, torch.nn.Module())
            inner = getattr(inner, part)
    return model


def named(skeleton, model, begins):
    model.hf_to_vllm_mapper = SimpleNamespace(orig_to_new_prefix=begins)
    names = [name for name, _ in in_names_of(skeleton, model)]
    assert len(names) == len(list(model.modules()))
    return names


def test_modules_of_vllm_have_the_names_of_transformers_where_it_has_them():
    skeleton = modules("model.language_model.layers.0.mlp", "model.visual.blocks.0", "lm_head")
    model = modules("language_model.model.layers.0.fused", "language_model.lm_head", "visual.blocks.0", "visual.pos")
    begins = {"model.language_model.": "language_model.model.", "model.visual.": "visual."}
    begins |= {"lm_head.": "language_model.lm_head.", "model.": "language_model.model.", "mtp.": None}
    assert named(skeleton, model, begins) == [
        *["", "language_model", "model.language_model", "model.language_model.layers", "model.language_model.layers.0"],
        *["language_model.model.layers.0.fused", "lm_head"],
        *["model.visual", "model.visual.blocks", "model.visual.blocks.0", "visual.pos"],
    ]
    text = modules("model.layers.0.mlp", "lm_head")
    assert named(text, text, {"model.language_model.": "model."}) == [name for name, _ in text.named_modules()]


@pytest.fixture(scope="module")
def adapted(vllm_folder):
    """Rank 3 in buffers of 8 rows, a scale that rounds, fused and other layers."""
    return open_with_adapter(vllm_folder, LoraConfig(rank=3, alpha=1.0, use_rslora=True))


@needs_vllm
def test_trap_11_an_adapter_alone_changes_logprobs_as_its_merged_weights_do(vllm_folder, adapted):
    engine, plain, before = adapted, merged(vllm_folder, {}, 1.0), adapted.logprobs(SEQUENCES)
    assert_same_logprobs(engine, plain)
    wanted = [request(uid="a", temperature=0.0, max_tokens=20, num_completions=2)]
    for version in (4, 5):
        sender = AdapterSender(engine, seed=version)
        assert len(sender.weights) == 2 * 7
        receipt = sync_local(sender.named_weights(torch.float32), engine, version=version)
        assert receipt.num_proven == receipt.num_tensors == len(sender.weights)
        expected = merged(vllm_folder, sender.weights, 3**-0.5)
        assert_same_logprobs(engine, expected)
        ((found, _),), ((other, _),) = engine.generate(wanted), expected.generate(wanted)
        assert (found.token_ids, found.policy_version) == (other.token_ids, version)
        assert found.logprobs == pytest.approx(other.logprobs, abs=2e-5)
        assert len(engine._llm.llm_engine.list_loras()) == 1
    for weights in sender.weights.values():
        weights.zero_()
    sync_local(sender.named_weights(torch.float32), engine, version=6)
    for found, expected in zip(engine.logprobs(SEQUENCES), before, strict=True):
        assert found == pytest.approx(expected, abs=1e-6)


@needs_vllm
@pytest.mark.parametrize(
    ("tamper", "name"),
    [
        (lambda layer: layer.lora_b_stacked[1][0, 0, 2, 1].add_(1.0), "k_proj.lora_B"),
        (lambda layer: layer.lora_b_stacked[2].mul_(3**0.5), "v_proj.lora_B"),
        (lambda layer: layer.lora_a_stacked[0][0, 0, 7, 0].add_(1.0), "q_proj.lora_A"),
    ],
    ids=["a value", "the scale", "beyond its rank"],
)
def test_what_vllm_computes_with_is_compared_and_not_what_it_was_given(adapted, tamper, name):
    sync_local(AdapterSender(adapted, seed=7).named_weights(torch.float32), adapted, version=7)
    (model,) = adapted._llm.apply_model(lambda model: model)
    tamper(model.get_submodule("model.layers.0.self_attn.qkv_proj"))
    with pytest.raises(TrainingError, match=f"other values of {PREFIX}self_attn.{name}.weight than were loaded"):
        dict(adapted.served_checksums())


@needs_vllm
def test_an_adapter_that_is_not_whole_never_reaches_vllm(adapted):
    sync_local(AdapterSender(adapted, seed=8).named_weights(torch.float32), adapted, version=8)
    half = AdapterSender(adapted, seed=9)
    del half.weights[f"{PREFIX}mlp.up_proj.lora_A.weight"]
    served = dict(adapted.served_checksums())
    with pytest.raises(WeightSyncError, match="weight sync 9: the engine serves "):
        sync_local(half.named_weights(torch.float32), adapted, version=9)
    assert dict(adapted.served_checksums()) == served
    with pytest.raises(RuntimeError, match=r"the last weight sync did not bring .*up_proj\.lora_A\.weight"):
        adapted.generate([request()])


@needs_vllm
@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraConfig(rank=2, use_dora=True), "DoRA"),
        (LoraConfig(rank=2, target_modules=["q_proj"], modules_to_save=["norm"]), "modules_to_save"),
    ],
    ids=["dora", "modules"],
)
def test_an_adapter_that_vllm_cannot_serve_is_refused_at_the_start(vllm_folder, lora, message):
    with pytest.raises(ConfigError, match=rf"rollout\.sync_adapter_only=true: .*{message}.* set rollout"):
        open_with_adapter(vllm_folder, lora)


@needs_vllm
@pytest.mark.slow
def test_f06_trap_25_vllm_in_a_process_that_is_killed_is_replaced_with_its_adapter(vllm_folder):
    engine = open_with_adapter(vllm_folder, LoraConfig(rank=2, target_modules=["q_proj", "down_proj"]), process={})
    sender = AdapterSender(engine, seed=1)
    receipt = sync_local(sender.named_weights(torch.float32), engine, version=3)
    assert receipt.num_proven == receipt.num_tensors == 4
    expected = merged(vllm_folder, sender.weights, 16.0)
    assert_same_logprobs(engine, expected)
    os.kill(engine.pid, signal.SIGKILL)
    assert_same_logprobs(engine, expected)
    assert engine.take_restarts() == 1
    engine.close()

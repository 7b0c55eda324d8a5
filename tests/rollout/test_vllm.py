"""What is vLLM's own, beside the contract of every engine (tests/contract)."""

import importlib.util
import os
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch
from runs import MARK, marked
from tiny_models import tiny_folder
from transformers import Qwen3Config, Qwen3ForCausalLM

from shardwise.config import (
    ConfigError,
    DataError,
    LoraConfig,
    ModelConfig,
    ModelError,
    SamplingConfig,
    TrainingError,
    VllmRollout,
)
from shardwise.recipes.rank.rollout_engines import build_rollout
from shardwise.rollout import EmbeddedEngine, SupervisedEngine, VllmEngine
from shardwise.transfer import WeightSyncError, sync_local
from shardwise.types import GenerateRequest, Images

__all__ = ["marked"]  # a fixture

CPU = torch.device("cpu")
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
ARGS = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 25}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = Qwen3Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.2,
        eos_token_id=3,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    path = tmp_path_factory.mktemp("vllm") / "model"
    model.save_pretrained(path)
    return path


def open_engine(folder, *, temperature=1.0, **keys) -> VllmEngine:
    args = ARGS | keys.pop("args", {})
    return VllmEngine.from_folder(
        folder, VllmRollout(args=args, **keys), dtype=torch.float32, max_rows=4, device=CPU, temperature=temperature
    )


@pytest.fixture(scope="module")
def engine(folder):
    return open_engine(folder)


def request(**options) -> GenerateRequest:
    return GenerateRequest(**{"uid": "a", "prompt_ids": [5, 6], "max_tokens": 4, "temperature": 1.0, **options})


def test_without_vllm_the_error_says_how_to_install_it(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"vLLM cannot be imported .*pip install vllm"):
        open_engine(folder)


def test_sleeping_is_refused_on_a_cpu(folder):
    with pytest.raises(ConfigError, match=r"sleep_level=2 needs a CUDA device.*set it to 0"):
        open_engine(folder, sleep_level=2)


@needs_vllm
def test_ranks_that_would_be_left_over_are_refused(folder):
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 does not divide the job's 1 rank, .*process"):
        open_engine(folder, args={"tensor_parallel_size": 2})


def test_experts_that_a_weight_sync_would_not_reach_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"packs fused experts once .* use rollout\.engine=embedded"):
        open_engine(tiny_folder("qwen3_moe", tmp_path / "experts"))


@needs_vllm
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"enforce_eagr": True}, r"args.enforce_eagr: vLLM's EngineArgs have no such argument; did you mean enforce_e"),
        ({"xyzzy": 1}, "args.xyzzy: .* no such argument; see"),
        ({"model": "other"}, "args.model: Shardwise sets this itself, from model.path; set that, and"),
        ({"max_num_seqs": 2}, "args.max_num_seqs: .*, from rollout.max_concurrent_sequences; set"),
        ({"pipeline_parallel_size": 2}, "args.pipeline_parallel_size: .*, no key changes it; remove it"),
        ({"block_size": "large"}, "vLLM cannot start: .*block_size"),
        ({"max_model_len": 4096}, "vLLM cannot start: .*max_model_len"),
    ],
)
def test_arguments_are_checked_by_vllms_own_schema(folder, args, message):
    with pytest.raises(ConfigError, match=message):
        open_engine(folder, args=args)


@needs_vllm
def test_keys_and_arguments_reach_vllm(folder):
    keys = {"enable_chunked_prefill": True, "max_num_batched_tokens": 128, "enable_prefix_caching": False}
    engine = open_engine(folder, args={"max_model_len": 48}, **keys)
    config = engine._llm.llm_engine.vllm_config
    assert config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.max_num_batched_tokens == 128
    assert config.scheduler_config.max_num_seqs == 4
    assert not config.cache_config.enable_prefix_caching
    with pytest.raises(DataError, match=r"prompt of 2 tokens and its max_tokens=47 .* than the 48 .*max_model_len"):
        engine.generate([request(max_tokens=47)])


@needs_vllm
def test_requests_with_images_are_refused(engine):
    seen = Images(pixel_values=torch.zeros(4, 96), image_grid_thw=torch.tensor([[1, 2, 2]]))
    with pytest.raises(ConfigError, match="has images, which Shardwise does not pass on to vLLM"):
        engine.generate([request(images=seen)])


@needs_vllm
def test_logprobs_that_vllm_cannot_give_are_refused(folder, engine):
    with pytest.raises(ConfigError, match=r"temperature 0\.5 to a vLLM engine whose logprobs are at 1"):
        engine.generate([request(temperature=0.5)])
    warm = open_engine(folder, temperature=0.5)
    assert warm.generate([request(temperature=0.5), request(temperature=0.0, top_k=3)])
    with pytest.raises(ConfigError, match="top_k, top_p, min_p or bad_token_ids"):
        warm.generate([request(temperature=0.5, top_k=3)])


@needs_vllm
def test_logprobs_of_sequences_are_those_of_transformers_at_temperature_one(folder, engine):
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sequences = [[5, 6, 7, 8], [9, 9], [11, *range(20, 44), 11]]
    for sequence, found in zip(sequences, engine.logprobs(sequences), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([sequence])).logits[0, :-1].double()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found).double(), expected, atol=1e-5, rtol=0)


@needs_vllm
def test_served_weights_tell_what_can_be_loaded_and_cannot_be_read(folder, engine):
    model = Qwen3ForCausalLM.from_pretrained(folder)
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    served = dict(engine.served_weights())
    assert {name: (t.shape, t.dtype) for name, t in served.items()} == {
        name: (t.shape, t.dtype) for name, t in expected.items()
    }
    assert all(tensor.is_meta for tensor in served.values())


@needs_vllm
def test_nothing_is_generated_between_the_first_tensor_and_the_commit(folder, engine):
    weights = dict(Qwen3ForCausalLM.from_pretrained(folder).state_dict())
    del weights["lm_head.weight"]

    def breaking_off():
        yield from list(weights.items())[:3]
        raise OSError("the line is dead")

    before = engine.generate([request()])
    with pytest.raises(OSError, match="the line is dead"):
        engine.load_weights(breaking_off())
    with pytest.raises(RuntimeError, match="rank 0 cannot generate: the last weight sync broke off"):
        engine.generate([request()])
    engine.load_weights(item for item in weights.items() if item[0] != "model.norm.weight")
    with pytest.raises(RuntimeError, match=r"version 2 cannot be committed .* did not bring model.norm.weight"):
        engine.commit_weights(2)
    engine.load_weights(weights.items())
    with pytest.raises(RuntimeError, match="weights have arrived that are not committed"):
        engine.generate([request()])
    with pytest.raises(RuntimeError, match="weights have arrived that are not committed"):
        engine.logprobs([[5, 6, 7]])
    engine.commit_weights(0)
    assert engine.generate([request()]) == before


@needs_vllm
def test_a_failure_of_vllm_names_the_engine(engine, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("EngineCore died")

    monkeypatch.setattr(engine._llm, "enqueue", fail)
    with pytest.raises(TrainingError, match="vLLM engine of rank 0 failed while generating: RuntimeError: EngineCore"):
        engine.generate([request()])


@needs_vllm
def test_what_goes_on_is_drawn_from_another_seed_than_what_it_follows(folder, engine):
    """vLLM's generators begin with a request: with one seed the rest would be drawn as the beginning was. Behind one
    token and behind two that are the same the next has one distribution p, and a share of sum p^2 of independent draws
    is equal, within 5 standard deviations."""
    num_draws = 400
    whole = [request(uid=f"{i}", prompt_ids=[6], max_tokens=1) for i in range(num_draws)]
    rest = [replace(one, partial_token_ids=[6]) for one in whole]
    first, again, other = ([group[0].token_ids for group in engine.generate(wanted)] for wanted in (whole, whole, rest))
    assert first == again
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([[6, 6]])).logits[0, -1].softmax(-1).square().sum().item()
    share = sum(a == b for a, b in zip(first, other, strict=True)) / num_draws
    assert expected < 0.5
    assert abs(share - expected) < 5 * (expected * (1 - expected) / num_draws) ** 0.5


class Recorder:
    """Stands in for vllm.LLM on a machine without CUDA: notes what is called."""

    class model_config:
        max_model_len = 64

    resets = True

    def __init__(self) -> None:
        self.calls: list[object] = []

    def sleep(self, *, level) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags) -> None:
        self.calls.append(("wake_up", sorted(tags)))

    def collective_rpc(self, method, *, args) -> None:
        self.calls.append(method)
        list(args[0])

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return self.resets


def test_parts_wake_in_stages_and_dropped_weights_are_not_generated_with(folder):
    model = Qwen3ForCausalLM.from_pretrained(folder)
    llm = Recorder()
    engine = VllmEngine(llm, model, stop_token_ids=[3], sleep_level=2, has_raw_logprobs=True)
    for _ in range(2):
        engine.sleep()
    engine.wake("weights")
    with pytest.raises(TrainingError, match="sleep_level=2 dropped the weights, and no weight sync came since"):
        engine.generate([request()])
    engine.load_weights(list(engine.served_weights()))
    engine.commit_weights(1)
    engine.wake("weights", "kv_cache")
    engine.wake("weights", "kv_cache")
    assert llm.calls == [
        ("sleep", 2),
        ("wake_up", ["weights"]),
        "load_checkpoint_weights",
        "reset_prefix_cache",
        ("wake_up", ["kv_cache"]),
    ]


def test_a_prefix_cache_that_outlives_its_weights_stops_the_run(folder):
    model = Qwen3ForCausalLM.from_pretrained(folder)
    llm = Recorder()
    llm.resets = False
    engine = VllmEngine(llm, model, stop_token_ids=[3], has_raw_logprobs=True)
    with pytest.raises(TrainingError, match="rank 0 kept what it has computed with earlier weights"):
        engine.load_weights(list(engine.served_weights()))


def test_an_engine_that_does_not_sleep_stays_awake(folder):
    llm = Recorder()
    engine = VllmEngine(llm, Qwen3ForCausalLM.from_pretrained(folder), stop_token_ids=[3], has_raw_logprobs=True)
    engine.sleep()
    engine.wake("weights", "kv_cache")
    assert llm.calls == []


def open_supervised(folder, **args) -> SupervisedEngine:
    engine = {"type": "vllm", "process": {"max_restarts": 2}, "args": ARGS | args}
    config = SamplingConfig(engine=engine, max_concurrent_sequences=4)
    return build_rollout(ModelConfig(path=str(folder)), config, dtype=torch.float32, device=CPU)


class Sender:
    """The weights of the folder, one of them changed."""

    def __init__(self, folder) -> None:
        weights = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        weights["model.layers.0.mlp.up_proj.weight"] *= -2
        self.weights = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}

    def named_weights(self, dtype):
        yield from self.weights.items()


@needs_vllm
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["alone", "two workers"])
def test_f06_trap_25_vllm_that_is_killed_is_replaced_with_its_weights_and_leaves_nothing(
    folder, marked, monkeypatch, size
):
    """Two workers share a machine with one NUMA node only where they are told their cores."""
    monkeypatch.setenv(MARK, f"{folder}-{size}")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1" if size == 2 else "auto")
    wanted = [request(uid=f"row {i}", num_completions=3, max_tokens=12) for i in range(4)]
    supervised = open_supervised(folder, tensor_parallel_size=size)
    before = supervised.generate(wanted)
    receipt = sync_local(Sender(folder), supervised, version=5, dtype=torch.float32)
    assert (receipt.num_tensors, receipt.num_proven) == (len(Sender(folder).weights), 0)
    after = supervised.generate(wanted)
    assert len(marked(f"{folder}-{size}")) >= size
    os.kill(supervised.pid, signal.SIGKILL)
    assert supervised.generate(wanted) == after != before
    assert {completion.policy_version for group in after for completion in group} == {5}
    assert supervised.take_restarts() == 1
    supervised.close()
    deadline = time.monotonic() + 20
    while marked(f"{folder}-{size}") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not marked(f"{folder}-{size}")


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


@pytest.fixture(scope="module")
def adapted(folder):
    """Rank 3 in buffers of 8 rows, a scale that rounds, fused and other layers."""
    return open_with_adapter(folder, LoraConfig(rank=3, alpha=1.0, use_rslora=True))


@needs_vllm
def test_trap_11_an_adapter_alone_changes_logprobs_as_its_merged_weights_do(folder, adapted):
    engine, plain, before = adapted, merged(folder, {}, 1.0), adapted.logprobs(SEQUENCES)
    assert_same_logprobs(engine, plain)
    wanted = [request(uid="a", temperature=0.0, max_tokens=20, num_completions=2)]
    for version in (4, 5):
        sender = AdapterSender(engine, seed=version)
        assert len(sender.weights) == 2 * 7
        receipt = sync_local(sender, engine, version=version, dtype=torch.float32)
        assert receipt.num_proven == receipt.num_tensors == len(sender.weights)
        expected = merged(folder, sender.weights, 3**-0.5)
        assert_same_logprobs(engine, expected)
        ((found, _),), ((other, _),) = engine.generate(wanted), expected.generate(wanted)
        assert (found.token_ids, found.policy_version) == (other.token_ids, version)
        assert found.logprobs == pytest.approx(other.logprobs, abs=2e-5)
        assert len(engine._llm.llm_engine.list_loras()) == 1
    for weights in sender.weights.values():
        weights.zero_()
    sync_local(sender, engine, version=6, dtype=torch.float32)
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
    sync_local(AdapterSender(adapted, seed=7), adapted, version=7, dtype=torch.float32)
    (model,) = adapted._llm.apply_model(lambda model: model)
    tamper(model.get_submodule("model.layers.0.self_attn.qkv_proj"))
    with pytest.raises(TrainingError, match=f"other values of {PREFIX}self_attn.{name}.weight than were loaded"):
        dict(adapted.served_checksums())


@needs_vllm
def test_an_adapter_that_is_not_whole_never_reaches_vllm(adapted):
    sync_local(AdapterSender(adapted, seed=8), adapted, version=8, dtype=torch.float32)
    half = AdapterSender(adapted, seed=9)
    del half.weights[f"{PREFIX}mlp.up_proj.lora_A.weight"]
    served = dict(adapted.served_checksums())
    with pytest.raises(WeightSyncError, match="weight sync 9: the engine serves "):
        sync_local(half, adapted, version=9, dtype=torch.float32)
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
def test_an_adapter_that_vllm_cannot_serve_is_refused_at_the_start(folder, lora, message):
    with pytest.raises(ConfigError, match=rf"rollout\.sync_adapter_only=true: .*{message}.* set rollout"):
        open_with_adapter(folder, lora)


@needs_vllm
@pytest.mark.slow
def test_f06_trap_25_vllm_in_a_process_that_is_killed_is_replaced_with_its_adapter(folder):
    engine = open_with_adapter(folder, LoraConfig(rank=2, target_modules=["q_proj", "down_proj"]), process={})
    sender = AdapterSender(engine, seed=1)
    receipt = sync_local(sender, engine, version=3, dtype=torch.float32)
    assert receipt.num_proven == receipt.num_tensors == 4
    expected = merged(folder, sender.weights, 16.0)
    assert_same_logprobs(engine, expected)
    os.kill(engine.pid, signal.SIGKILL)
    assert_same_logprobs(engine, expected)
    assert engine.take_restarts() == 1
    engine.close()

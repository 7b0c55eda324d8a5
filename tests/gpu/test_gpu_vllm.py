"""vLLM on the GPU, in the process of a rank: the trainer's numbers, weights that arrive, memory that sleep gives back.

In an environment with vLLM's CUDA build; elsewhere these tests are skipped."""

import pytest
import torch
from gpu_sampling import differences, generated_by_transformers, requests, tokens
from small_gpu_model import VOCAB, build, save_model, train

from shardwise.config import TrainingError, VllmRollout

pytest.importorskip("vllm")
from shardwise.rollout import VllmEngine
from shardwise.transfer import sync_local

MIB = 1 << 20
CACHE_BYTES = 512 * MIB
ARGS = {"enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": CACHE_BYTES}
DTYPES = {"float32": 1e-3, "bfloat16": 0.05}
"""How far logprobs may be from the trainer's on average, in nats: the bounds of the probe of served weights."""


@pytest.fixture
def open_engine(device):
    opened = []

    def build_engine(folder, *, dtype="float32", **config):
        rollout = VllmRollout(args=ARGS | config.pop("args", {}), gpu_memory_utilization=0.3, **config)
        opened.append(VllmEngine.from_folder(folder, rollout, dtype=getattr(torch, dtype), max_rows=8, device=device))
        return opened[-1]

    yield build_engine
    for engine in opened:
        engine.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("args", [{}, {"enforce_eager": False}], ids=["eager", "cuda graphs"])
def test_logprobs_of_sampled_tokens_are_the_trainers(folder, device, open_engine, dtype, args):
    wanted = requests(temperature=1.0, num_completions=3)
    groups = open_engine(folder, dtype=dtype, args=args).generate(wanted)
    apart = differences(build(folder, device, f"param_dtype={dtype}"), wanted, groups)
    assert len(apart) > 200
    assert apart.mean() < DTYPES[dtype]


def test_greedy_completions_are_those_of_generate_token_for_token(folder, device, open_engine):
    expected = generated_by_transformers(folder, device)
    assert tokens(open_engine(folder).generate(requests())) == expected


@pytest.mark.parametrize("args", [{}, {"enforce_eager": False}], ids=["eager", "cuda graphs"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_weights_that_training_changed_are_served_after_a_sync(tmp_path, device, open_engine, tied, args):
    """A CUDA graph holds addresses: new weights have to land in the old memory."""
    folder = save_model(tmp_path / "model", tie_word_embeddings=tied)
    trainer, engine = build(folder, device, learning_rate=3e-3), open_engine(folder, args=args)
    wanted = requests(temperature=1.0, num_completions=3)
    before = engine.generate(wanted)
    train(trainer, 2)
    sync_local(trainer.named_weights(torch.float32), engine, version=1)
    after = engine.generate(wanted)
    assert {completion.policy_version for group in after for completion in group} == {1}
    assert differences(trainer, wanted, before).mean() > 1e-2
    assert differences(trainer, wanted, after).mean() < DTYPES["float32"]


def in_use() -> int:
    """Bytes of the GPU, whoever holds them."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.fixture
def large_folder(tmp_path):
    """Weights of 128 MiB in float32, which a measurement of the GPU's memory can see."""
    return save_model(tmp_path / "large", vocab_size=VOCAB * 100, hidden_size=256, num_hidden_layers=4)


def test_sleep_level_1_gives_the_memory_back_and_wakes_with_the_same_weights(large_folder, open_engine):
    """In two stages: the weights for a sync, then the cache."""
    engine = open_engine(large_folder, sleep_level=1)
    before, awake = engine.generate(requests()), in_use()
    for _ in range(2):
        engine.sleep()
        asleep = in_use()
        assert awake - asleep > CACHE_BYTES + 64 * MIB
        engine.wake("weights")
        with_weights = in_use()
        assert with_weights - asleep > 64 * MIB
        assert awake - with_weights > 0.9 * CACHE_BYTES
        engine.wake("weights", "kv_cache")
        assert in_use() - with_weights > 0.9 * CACHE_BYTES
        assert tokens(engine.generate(requests())) == tokens(before)


def test_sleep_level_2_drops_the_weights_and_a_sync_brings_them(large_folder, device, open_engine):
    """While it sleeps the trainer has the GPU; between a sync and the next sampling the engine stays awake."""
    trainer, engine = build(large_folder, device), open_engine(large_folder, sleep_level=2)
    sync_local(trainer.named_weights(torch.float32), engine, version=1)
    before, awake = engine.generate(requests()), in_use()
    engine.sleep()
    assert awake - in_use() > CACHE_BYTES + 64 * MIB
    engine.wake("weights", "kv_cache")
    with pytest.raises(TrainingError, match="sleep_level=2 dropped the weights, and no weight sync came since"):
        engine.generate(requests())
    engine.sleep()
    engine.wake("weights")
    sync_local(trainer.named_weights(torch.float32), engine, version=2)
    engine.wake("weights", "kv_cache")
    after = engine.generate(requests())
    assert tokens(after) == tokens(before)
    assert {completion.policy_version for group in after for completion in group} == {2}

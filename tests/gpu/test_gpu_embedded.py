"""The embedded engine on the GPU: tokens of model.generate, logprobs of the trainer, weights that a sync brings."""

import gc

import pytest
import torch
from gpu_sampling import differences, generated_by_transformers, requests, tokens
from small_gpu_model import allocated, build, train

pytest.importorskip("xxhash")  # which proves weights
from shardwise.ops import attend, release_cached_blocks
from shardwise.rollout import EmbeddedEngine
from shardwise.rollout.kv_cache import KVCache
from shardwise.transfer import WeightSyncError, sync_local

TEMPERATURE = 0.8
MODES = {"eager": False, "compiled": True}


def open_engine(folder, device, *, dtype=torch.float32, max_rows=4, **options) -> EmbeddedEngine:
    """Of fewer rows than there are completions, so that places are taken anew."""
    torch.compiler.reset()
    return EmbeddedEngine.from_folder(folder, dtype=dtype, max_rows=max_rows, device=device, **options)


@pytest.mark.parametrize("compile_decode", MODES.values(), ids=MODES.keys())
def test_greedy_completions_are_those_of_generate_token_for_token(folder, device, compile_decode):
    engine = open_engine(folder, device, compile_decode=compile_decode)
    expected = generated_by_transformers(folder, device)
    assert tokens(engine.generate(requests())) == expected
    assert tokens(engine.generate(requests())) == expected  # and once more, with what was compiled
    assert len({tuple(ids) for (ids,) in expected}) == len(expected)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.05)])
@pytest.mark.parametrize("compile_decode", MODES.values(), ids=MODES.keys())
def test_logprobs_of_sampled_tokens_are_the_trainers(folder, device, compile_decode, dtype, bound):
    """On average, with the bounds of the probe of served weights in bfloat16."""
    wanted = requests(temperature=TEMPERATURE, num_completions=3)
    engine = open_engine(folder, device, dtype=getattr(torch, dtype), compile_decode=compile_decode)
    groups = engine.generate(wanted)
    apart = differences(build(folder, device, f"param_dtype={dtype}"), wanted, groups)
    assert len(apart) > 200
    assert apart.mean() < bound


def test_draws_do_not_depend_on_how_many_rows_are_decoded_together(folder, device):
    """In float32, where rounding does not move a draw across the border between two tokens."""
    wanted = requests(temperature=TEMPERATURE, num_completions=3)
    few, many = (tokens(open_engine(folder, device, max_rows=rows).generate(wanted)) for rows in (2, 32))
    assert few == many


@pytest.mark.parametrize("compile_decode", MODES.values(), ids=MODES.keys())
def test_weights_that_training_changed_are_served_after_a_sync_and_proven(folder, device, compile_decode):
    """A compiled decode step reads the new weights too."""
    trainer = build(folder, device, learning_rate=3e-3)
    engine = open_engine(folder, device, compile_decode=compile_decode)
    wanted = requests(temperature=TEMPERATURE, num_completions=3)
    before = engine.generate(wanted)
    train(trainer, 2)
    receipt = sync_local(trainer.named_weights(torch.float32), engine, version=1)
    assert receipt.num_proven == receipt.num_tensors == len(dict(engine.served_weights()))
    after = engine.generate(wanted)
    assert {completion.policy_version for group in after for completion in group} == {1}
    assert tokens(after) != tokens(before)
    assert differences(trainer, wanted, before).mean() > 1e-2
    assert differences(trainer, wanted, after).mean() < 1e-4


@pytest.mark.parametrize("compile_decode", MODES.values(), ids=MODES.keys())
def test_a_sleeping_engine_gives_its_weights_memory_back_and_samples_the_same_afterwards(
    folder, device, compile_decode
):
    engine = open_engine(folder, device, compile_decode=compile_decode, sleep_level=1)
    wanted = requests(temperature=TEMPERATURE, num_completions=3)
    expected = tokens(engine.generate(wanted))
    size, before = sum(weight.nbytes for _, weight in engine.served_weights()), allocated()
    engine.sleep()
    assert before - allocated() >= 0.95 * size
    engine.wake("weights", "kv_cache")
    assert allocated() == pytest.approx(before, rel=0.01)
    assert tokens(engine.generate(wanted)) == expected


def test_what_a_sleeping_engine_gives_back_other_processes_can_have(folder, device):
    """torch's allocator keeps it until it is told."""
    gc.collect()
    release_cached_blocks()  # else weights may go into segments of what other tests have left
    engine = open_engine(folder, device, sleep_level=1)
    size = sum(weight.nbytes for _, weight in engine.served_weights())
    engine.generate(requests())
    release_cached_blocks()
    awake = torch.accelerator.memory_reserved(device)
    engine.sleep()
    assert torch.accelerator.memory_reserved(device) == awake
    release_cached_blocks()
    # The allocator's segments are whole: one that holds a buffer too stays.
    assert awake - torch.accelerator.memory_reserved(device) >= 0.5 * size


def test_a_tensor_that_was_altered_on_the_device_is_named(folder, device, monkeypatch):
    trainer, engine = build(folder, device), open_engine(folder, device)
    name = "model.layers.2.mlp.up_proj.weight"
    load = engine.load_weights

    def load_and_alter(weights):
        load(weights)
        dict(engine.served_weights())[name][3, 5] += 1

    monkeypatch.setattr(engine, "load_weights", load_and_alter)
    with pytest.raises(WeightSyncError, match=f"weight sync 1: the engine serves other values of {name} than were"):
        sync_local(trainer.named_weights(torch.float32), engine, version=1)
    with pytest.raises(RuntimeError, match="holds a part of new weights"):
        engine.generate(requests())


@pytest.mark.parametrize(("kv_heads", "dim"), [(8, 64), (2, 128)])
def test_prompts_longer_than_the_window_are_read_without_all_their_scores(device, kv_heads, dim):
    num_prompts, length, window = 2, 2048, 32
    torch.manual_seed(0)
    prompts = [torch.randn(num_prompts, length, heads, dim, device=device) for heads in (8, kv_heads, kv_heads)]
    query, key, value = (tensor.transpose(1, 2) for tensor in prompts)
    expected = attend(query, key, value, scaling=0.1, causal=True, window=window)
    half = [tensor.bfloat16() for tensor in (query, key, value)]
    cache = KVCache(num_rows=num_prompts, capacity_tokens=length, device=device)
    cache.begin_prefill(torch.arange(num_prompts, device=device), [length] * num_prompts)
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    found = cache.attend(0, *half, scaling=0.1, window=window, chunk=None, softcap=None)
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.02)
    scores_bytes = 2 * num_prompts * 8 * length * length
    assert torch.accelerator.max_memory_allocated(device) - before < scores_bytes / 2

"""What goes wrong elsewhere once ranks share a step, each test named for its trap.

Traps 3, 24 and 6 on one rank are in tests/engine, 24 and 26 in tests/faults too; trap 2 is in
tests/data/test_packing.py, 10 in test_vision.py, 33 in tests/data/test_chat.py.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensor_shapes import TensorShapes
from tiny_models import random_samples, tiny_folder, tiny_model

from shardwise.config import AlgorithmConfig, EngineConfig, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine, vocabulary
from shardwise.recipes.losses import policy_loss, sft_loss

CPU = torch.device("cpu")
LENGTHS = [9, 5, 12, 7, 3, 8]


def build(folder, head="logprobs", **keys):
    return TrainEngine.build(Path(folder), EngineConfig(**keys), device=CPU, optimizer=OptimizerConfig(), head=head)


def num_sharing(keys):
    return keys.get("ulysses_size", 1)


def losses_by_cap(folder, samples, caps):
    """Of every token cap: the number of micro-batches, and the loss of each aggregation."""
    engine = build(folder)
    results = {}
    for cap in caps:
        step = pack(samples, num_shards=1, max_tokens=cap)
        found = []
        for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum"):
            loss_fn = policy_loss(AlgorithmConfig(aggregation=mode), kl_coef=0.0)
            metrics = engine.forward_backward(step.shards[0], loss_fn, step.denominators, with_entropy=True)
            found.append(metrics["train/loss"].result())
        results[len(step.shards[0])] = found
    return results


def test_trap_01_loss_is_the_same_number_for_any_number_of_micro_batches(run_ranks, tmp_path):
    """Trap 1: elsewhere .160, .321 and .642 for 1, 2 and 4 micro-batches."""
    from dataclasses import replace

    samples = [
        replace(
            s, advantages=torch.full((n,), 1.0 + n), rollout_logprobs=torch.zeros(n), old_logprobs=torch.zeros(n) - 5
        )
        for s, n in zip(random_samples(LENGTHS), LENGTHS, strict=True)
    ]
    folder = tiny_folder("qwen3", tmp_path)
    [results] = run_ranks(losses_by_cap, 1, str(folder), samples, [44, 24, 12])
    assert sorted(results)[0] == 1
    assert len(results) == 3
    for losses in results.values():
        assert losses == pytest.approx(results[1], rel=1e-6)


def forward_versions(folder, versions, keys):
    engine = build(folder, **keys)
    results = []
    for samples in versions:
        step = pack(samples, num_shards=1, max_tokens=64)
        [out] = engine.forward(step.shards[0])
        results.append(out.logprobs)
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_trap_04_tokens_see_those_that_other_ranks_compute(run_ranks, tmp_path, world_size):
    """Trap 4: with attention inside each rank's slice, the first token could not reach the logprobs of later slices."""
    folder = tiny_folder("qwen3", tmp_path)
    [sample] = random_samples([16], prompt_tokens=1)
    tokens = sample.token_ids.clone()
    tokens[0] = 3 + (tokens[0] - 3 + 50) % 97
    versions = [[sample], [type(sample)(uid="changed", token_ids=tokens, loss_mask=sample.loss_mask)]]
    [alone] = run_ranks(forward_versions, 1, str(folder), versions, {})
    trained = sample.loss_mask.nonzero()[:, 0]
    later = trained[trained > 16 // world_size]
    assert len(later) >= 6
    for before, after in run_ranks(forward_versions, world_size, str(folder), versions, {"ulysses_size": world_size}):
        assert ((after - before)[later].abs() > 1e-3).float().mean() > 0.8
        torch.testing.assert_close(after - before, alone[1] - alone[0], rtol=0, atol=1e-5)


def value_loss(outputs, batch, denominators):
    errors = torch.where(batch.loss_mask, outputs.values - 1.0, 0.0)
    return 0.5 * errors.square().sum() / denominators.num_tokens, {}


def gradient_by_layout(folders, layouts):
    """Of every layout and loss the whole gradient, flat."""
    results = []
    for keys in layouts:
        for head, loss_fn in (("logprobs", sft_loss), ("token_values", value_loss)):
            engine = build(folders[head], head=head, **keys)
            step = pack(random_samples(LENGTHS), num_shards=dist.get_world_size() // num_sharing(keys), max_tokens=24)
            engine.forward_backward(step.shards[dist.get_rank() // num_sharing(keys)], loss_fn, step.denominators)
            results.append(torch.cat([p.grad.full_tensor().flatten() for p in engine._model.parameters()]))
    return results


def test_trap_05_gradients_have_no_factor_of_the_ranks(run_ranks, tmp_path):
    """Trap 5: elsewhere SFT gradients came out times 1/sp, and those of a critic times dp."""
    from transformers import AutoModelForTokenClassification, Qwen3Config

    causal_lm = tiny_model("qwen3")
    causal_lm.save_pretrained(tmp_path / "policy")
    config = Qwen3Config(**causal_lm.config.to_dict() | {"num_labels": 1})
    critic = AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    critic.base_model.load_state_dict(causal_lm.base_model.state_dict())
    critic.save_pretrained(tmp_path / "critic")
    folders = {"logprobs": str(tmp_path / "policy"), "token_values": str(tmp_path / "critic")}
    [expected] = run_ranks(gradient_by_layout, 1, folders, [{}])
    for world_size, layouts in {
        2: [{}, {"fsdp_size": 1}, {"ulysses_size": 2}],
        4: [{}, {"fsdp_size": 2}, {"ulysses_size": 2}, {"ulysses_size": 4}, {"fsdp_size": 2, "ulysses_size": 2}],
    }.items():
        found = run_ranks(gradient_by_layout, world_size, folders, layouts)[0]
        for place, gradient in enumerate(found):
            reference = expected[place % 2]
            factor = float(gradient.double() @ reference.double() / (reference.double() @ reference.double()))
            assert factor == pytest.approx(1.0, abs=1e-6), (layouts[place // 2], ["sft", "value"][place % 2])


def tied_engine(folder, keys):
    engine = build(folder, **keys)
    step = pack(random_samples(LENGTHS), num_shards=dist.get_world_size() // num_sharing(keys), max_tokens=24)
    engine.forward_backward(step.shards[dist.get_rank() // num_sharing(keys)], sft_loss, step.denominators)
    model = engine._model.hf_model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = [name for name, _ in engine.named_weights(torch.float32)]
    return (
        engine.num_bytes_read,
        names,
        model.lm_head.weight.grad.full_tensor(),
        model.lm_head.weight.to_local().numel(),
    )


@pytest.mark.parametrize("keys", [{}, {"fsdp_size": 2}, {"ulysses_size": 2}], ids=str)
def test_trap_12_tied_embeddings_are_read_once_exported_once_and_trained_from_both_ends(run_ranks, tmp_path, keys):
    """The gradient is the sum of those that the two ends would have as weights of their own."""
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path)
    untied = tiny_model("qwen3", tie_word_embeddings=False)
    untied.load_state_dict(model.state_dict())
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    samples = random_samples(LENGTHS)
    for sample in samples:
        logits = untied(input_ids=sample.token_ids[None]).logits[0, :-1]
        scores = logits.log_softmax(-1).gather(1, sample.token_ids[1:, None])[:, 0]
        (-scores[sample.loss_mask[1:]].sum() / sum(int(s.loss_mask.sum()) for s in samples)).backward()
    from_both = untied.lm_head.weight.grad + untied.model.embed_tokens.weight.grad
    assert untied.lm_head.weight.grad.abs().max() > 0 < untied.model.embed_tokens.weight.grad.abs().max()
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    ranks = run_ranks(tied_engine, 4, str(tmp_path), keys)
    num_copies = 4 // keys.get("fsdp_size", 4)
    assert sum(rank[0] for rank in ranks) == num_copies * num_bytes
    for _, names, gradient, num_local in ranks:
        assert "model.embed_tokens.weight" in names
        assert "lm_head.weight" not in names
        assert len(names) == len(set(names))
        assert num_local < 1.1 * from_both.numel() * num_copies / 4
        assert (gradient - from_both).abs().max() < 1e-5 * from_both.abs().max()


def share_of_the_weights(folder, fsdp_size):
    engine = build(folder, fsdp_size=fsdp_size)
    return sum(p.to_local().numel() for p in engine._model.parameters()) / engine.num_parameters


def test_trap_20_fsdp_size_is_a_number_of_ranks_and_null_is_all_of_them(run_ranks, tmp_path):
    """Trap 20: 1 never means "all"."""
    folder = str(tiny_folder("qwen3", tmp_path))
    assert run_ranks(share_of_the_weights, 4, folder, 1) == [1.0] * 4
    assert run_ranks(share_of_the_weights, 4, folder, 2) == pytest.approx([0.5] * 4, abs=0.01)
    assert run_ranks(share_of_the_weights, 4, folder, 4) == run_ranks(share_of_the_weights, 4, folder, None)
    assert sum(run_ranks(share_of_the_weights, 4, folder, None)) == pytest.approx(1.0)


def shapes_of_a_step(folder, sample, chunk_elements, keys):
    kept, vocabulary.CHUNK_ELEMENTS = vocabulary.CHUNK_ELEMENTS, chunk_elements
    try:
        engine = build(folder, **keys)
        step = pack([sample], num_shards=dist.get_world_size() // num_sharing(keys), max_tokens=len(sample.token_ids))
        batches = step.shards[dist.get_rank() // num_sharing(keys)]
        with TensorShapes() as made:
            engine.forward_backward(batches, sft_loss, step.denominators, with_entropy=True)
        return made.shapes
    finally:
        vocabulary.CHUNK_ELEMENTS = kept


@pytest.mark.parametrize("num_trained", [120, 3])
@pytest.mark.parametrize(("world_size", "keys"), [(1, {}), (2, {"ulysses_size": 2})], ids=["1", "2 sp2"])
def test_trap_28_step_never_holds_all_logits_and_has_none_for_prompt_tokens(
    run_ranks, tmp_path, num_trained, world_size, keys
):
    """Trap 28: 160 tokens, a vocabulary of 8192, and room for 65,536 logits, which three rows of them fit into."""
    num_tokens, vocab, hidden, chunk = 160, 8192, 16, 2**16
    folder = tiny_folder("llama", tmp_path, vocab_size=vocab, hidden_size=hidden, num_attention_heads=2)
    [sample] = random_samples([num_tokens], vocab=vocab)
    sample.loss_mask[:] = torch.arange(num_tokens) >= num_tokens - num_trained
    rows = []
    for shapes in run_ranks(shapes_of_a_step, world_size, str(folder), sample, chunk, keys):
        gathered = 2 * vocab * hidden + hidden  # the root unit: embedding, projection and last norm
        assert max(torch.Size(shape).numel() for shape in shapes) == gathered
        assert num_trained == 3 or gathered < num_trained * vocab / 3
        rows += [shape[0] for shape in shapes if len(shape) == 2 and shape[1] == vocab and shape[0] != hidden]
    assert sum(rows) == (3 if num_trained == 3 else 0), "whole rows of logits, over the ranks"

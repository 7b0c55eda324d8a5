"""A loss and its gradients are those of the samples, whatever the packing, split, order, ranks (traps 1, 5 and 6).

The reference is one padded batch through a Hugging Face model with an attention mask, and losses written out as loops.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_models import FAMILIES, random_samples, tiny_folder

from shardwise.config import AlgorithmConfig, EngineConfig, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.recipes.losses import policy_loss, sft_loss

TEMPERATURE = 0.7
DIVISOR = 16.0
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"]
LOSSES = ["sft", *MODES]
SHORT = [9, 5, 5]
"""Three samples: one of four ranks has only an empty micro-batch."""
LONG = [11, 4, 7, 7, 1, 16, 3]
"""One sequence of a single token, which trains nothing."""


def algorithm(mode):
    return AlgorithmConfig(
        aggregation=mode,
        aggregation_divisor=DIVISOR if mode == "seq-mean-token-sum-norm" else None,
        clip_low=0.1,
        clip_high=0.25,
        dual_clip=1.5,
        kl_coef=0.3,
        kl_estimator="k3",
        kl_in="loss",
    )


def padded_logprobs(model, samples):
    """[N, L]: right-padded, with an attention mask; 0 at position 0."""
    width = max(len(sample.token_ids) for sample in samples)
    ids, mask = torch.zeros(2, len(samples), width, dtype=torch.int64)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.token_ids)] = sample.token_ids
        mask[row, : len(sample.token_ids)] = 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits / TEMPERATURE
    scores = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return torch.cat([scores.new_zeros(len(samples), 1), scores], dim=1)


def with_policy_fields(model, samples):
    """Old and reference logprobs near the model's own, so that every clip and both signs of the KL term occur."""
    torch.manual_seed(1)
    with torch.no_grad():
        current = padded_logprobs(model, samples)
    filled = []
    for row, sample in enumerate(samples):
        length = len(sample.token_ids)
        old = current[row, :length] + 0.4 * torch.randn(length)
        ref = current[row, :length] + 0.4 * torch.randn(length)
        advantage = torch.full((length,), -1.3 if row % 2 else 0.9)
        filled.append(replace(sample, old_logprobs=old, rollout_logprobs=old, ref_logprobs=ref, advantages=advantage))
    return filled


def reference_loss(model, samples, name):
    """One scalar, token by token, from the definitions."""
    logprobs = padded_logprobs(model, samples)
    per_sample = []
    for row, sample in enumerate(samples):
        terms = []
        for t in range(len(sample.token_ids)):
            if not sample.loss_mask[t]:
                continue
            if name == "sft":
                terms.append(-logprobs[row, t])
                continue
            ratio = torch.exp(logprobs[row, t] - sample.old_logprobs[t])
            advantage = sample.advantages[t].item()
            surrogate = min(ratio * advantage, ratio.clamp(0.9, 1.25) * advantage)
            if advantage < 0:
                surrogate = max(surrogate, torch.tensor(1.5 * advantage))
            x = sample.ref_logprobs[t] - logprobs[row, t]
            terms.append(-surrogate + 0.3 * (torch.exp(x) - x - 1))
        if terms:
            per_sample.append(terms)
    num_tokens = sum(len(terms) for terms in per_sample)
    match name:
        case "sft" | "token-mean":
            return sum(sum(terms) for terms in per_sample) / num_tokens
        case "seq-mean-token-mean":
            return sum(sum(terms) / len(terms) for terms in per_sample) / len(per_sample)
        case "seq-mean-token-sum":
            return sum(sum(terms) for terms in per_sample) / len(per_sample)
        case "seq-mean-token-sum-norm":
            return sum(sum(terms) for terms in per_sample) / len(per_sample) / DIVISOR
        case "token-sum":
            return sum(sum(terms) for terms in per_sample)


def reference(folder, samples):
    """Of every loss: its value and its gradients. In float32: in float64 transformers' masks make padded rows NaN."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    results = {}
    for name in LOSSES:
        model.zero_grad()
        loss = reference_loss(model, samples, name)
        loss.backward()
        results[name] = loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}
    return results


def sharded_gradients(folder, engine_config, samples, orders, caps):
    """Of every loss, order of the samples and token cap: this rank's share of the loss, and the whole gradient."""
    torch.manual_seed(0)
    engine = TrainEngine.build(
        Path(folder), EngineConfig(**engine_config), device=torch.device("cpu"), optimizer=OptimizerConfig()
    )
    results = []
    for order in orders:
        for cap in caps:
            step = pack([samples[i] for i in order], num_shards=dist.get_world_size(), max_tokens=cap)
            batches = step.shards[dist.get_rank()]
            for name in LOSSES:
                metrics = engine.forward_backward(
                    batches,
                    sft_loss if name == "sft" else policy_loss(algorithm(name)),
                    step.denominators,
                    temperature=TEMPERATURE,
                    with_entropy=True,
                )
                named = engine._model.hf_model.named_parameters()
                gradients = {n: torch.as_tensor(p.grad.full_tensor()).clone() for n, p in named}
                engine._model.zero_grad()
                shape = len(batches), sum(len(batch.sample_index) for batch in batches)
                results.append((name, shape, metrics["train/loss"].result(), gradients))
    return results if dist.get_rank() == 0 else [(name, shape, loss, {}) for name, shape, loss, _ in results]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A folder, and of each list of lengths the samples and their reference."""
    from transformers import AutoModelForCausalLM

    folder = tiny_folder(request.param, tmp_path_factory.mktemp(request.param))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    cases = {}
    for key, lengths in {"short": SHORT, "long": LONG}.items():
        samples = with_policy_fields(model, random_samples(lengths, prompt_tokens=1, seed=len(lengths)))
        cases[key] = samples, reference(folder, samples)
    return folder, cases


LAYOUTS = {
    "1-rank": (1, {}, "long", [64, 16]),
    "2-ranks": (2, {}, "long", [64, 16]),
    "4-ranks": (4, {}, "long", [16]),
    "hsdp-2x2": (4, {"fsdp_size": 2}, "long", [16]),
    "4-ranks-one-empty": (4, {}, "short", [9]),
    "2-ranks-one-batch-empty": (2, {}, "short", [9]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradients_equal_the_padded_reference(run_ranks, family, layout):
    world_size, engine_config, case, caps = LAYOUTS[layout]
    folder, cases = family
    samples, expected = cases[case]
    natural = list(range(len(samples)))
    ranks = run_ranks(
        sharded_gradients, world_size, str(folder), engine_config, samples, [natural, natural[::-1]], caps
    )
    assert len(ranks[0]) == 2 * len(caps) * len(LOSSES)
    for parts in zip(*ranks, strict=True):
        name, _, _, gradients = parts[0]
        loss, reference_gradients = expected[name]
        assert sum(part[2] for part in parts) == pytest.approx(loss, rel=2e-6), name
        assert gradients.keys() == reference_gradients.keys()
        for parameter, gradient in gradients.items():
            error = (gradient - reference_gradients[parameter]).abs().max()
            largest = reference_gradients[parameter].abs().max()
            assert error < 1e-5 * largest, (name, parameter, float(error / largest))
    held = [[part[1] for part in rank] for rank in ranks]
    if layout == "4-ranks-one-empty":
        assert sorted(rank[0] for rank in held) == [(1, 0), (1, 1), (1, 1), (1, 1)]
    if layout == "1-rank":
        assert set(held[0]) == {(1, 7), (4, 7)}, "one pack, and four micro-batches"


def test_policy_reference_takes_every_branch(family):
    """Guards the tests above: each clip, and tokens that no clip cuts, occur in the samples."""
    from transformers import AutoModelForCausalLM

    folder, cases = family
    samples, _ = cases["long"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logprobs = padded_logprobs(model, samples)
    ratios = [
        (torch.exp(logprobs[row, t] - s.old_logprobs[t]).item(), s.advantages[t].item())
        for row, s in enumerate(samples)
        for t in s.loss_mask.nonzero()[:, 0].tolist()
    ]
    assert any(r > 1.25 and a > 0 for r, a in ratios)
    assert any(r < 0.9 and a < 0 for r, a in ratios)
    assert any(r > 1.5 and a < 0 for r, a in ratios)
    assert any(0.9 < r < 1.25 for r, _ in ratios)

"""Five AdamW steps on sharded ranks are the five steps of a plain transformers + torch loop in one process."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_models import families, random_samples, reference_logprobs, tiny_folder

from shardwise.config import EngineConfig, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.recipes.losses import sft_loss

LENGTHS = [[13, 2, 9, 7, 7, 11], [6, 17, 3, 12], [8, 8, 8, 8, 8, 8, 5], [20, 4, 4, 4], [9, 14, 10]]
"""Of each step; 8 is a run of equal lengths, and the last step leaves one of four ranks without a sample."""
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5, adam_eps=1e-6)
"""Not eps=1e-8: Adam then turns the rounding of gradients near 0 into whole steps, 1.1e-5 in one weight of gemma2."""


def steps():
    return [random_samples(lengths, seed=seed) for seed, lengths in enumerate(LENGTHS)]


def reference_run(family):
    """Eager attention, every sequence alone, loss and clipping and AdamW by torch itself."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(family, dtype=torch.float32, attn_implementation="eager")
    named = dict(model.named_parameters())
    is_decayed = {name: name.endswith("_proj.weight") or name == "lm_head.weight" for name in named}
    adamw = torch.optim.AdamW(
        [
            {"params": [named[n] for n in named if is_decayed[n]], "weight_decay": 0.1},
            {"params": [named[n] for n in named if not is_decayed[n]], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-6,
    )
    losses, norms = [], []
    for samples in steps():
        num_tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
        total = 0.0
        for sample in samples:
            loss = -reference_logprobs(model, sample.token_ids)[sample.loss_mask].sum() / num_tokens
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        adamw.step()
        adamw.zero_grad()
    return losses, norms, {name: parameter.detach() for name, parameter in named.items()}


def sharded_run(folder, engine_config, max_tokens):
    engine = TrainEngine.build(
        Path(folder),
        EngineConfig.model_validate_json(engine_config),
        device=torch.device("cpu"),
        optimizer=OPTIMIZER,
        total_steps=5,
    )
    losses, norms = [], []
    for samples in steps():
        step = pack(samples, num_shards=dist.get_world_size(), max_tokens=max_tokens)
        metrics = engine.forward_backward(step.shards[dist.get_rank()], sft_loss, step.denominators)
        metrics |= engine.optim_step()
        losses.append(metrics["train/loss"].result())
        norms.append(metrics["train/grad_norm"].result())
    return losses, norms, {name: tensor.clone() for name, tensor in engine.named_weights(torch.float32)}


@pytest.fixture(scope="module", params=families("llama", "gemma2"))
def family_run(request, tmp_path_factory):
    folder = tiny_folder(request.param, tmp_path_factory.mktemp(request.param))
    return folder, reference_run(folder)


@pytest.mark.parametrize(
    ("world_size", "engine_config", "max_tokens"),
    [
        pytest.param(1, {}, 64, marks=pytest.mark.full),
        (2, {}, 24),
        pytest.param(4, {}, 20, marks=pytest.mark.full),
        (4, {"fsdp_size": 2}, 20),
        pytest.param(2, {"reshard_after_forward": False}, 64, marks=pytest.mark.full),
    ],
    ids=["1-rank", "2-ranks", "4-ranks", "hsdp-2x2", "keep-gathered"],
)
def test_five_adamw_steps_equal_a_plain_torch_loop(run_ranks, family_run, world_size, engine_config, max_tokens):
    folder, (ref_losses, ref_norms, ref_weights) = family_run
    results = run_ranks(sharded_run, world_size, str(folder), json.dumps(engine_config), max_tokens)
    losses = [sum(parts) for parts in zip(*(losses for losses, _, _ in results), strict=True)]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(ref_losses), rtol=0, atol=1e-5)
    assert min(ref_norms) > 0.5, "clipping must bite for this test to cover it"
    for _, norms, weights in results:
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(ref_norms), rtol=1e-5, atol=0)
        assert weights.keys() == ref_weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, ref_weights[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")

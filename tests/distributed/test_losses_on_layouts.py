"""Trap 5: every loss that a recipe can train with has one value and one gradient, on every layout and every split."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_models import random_samples, tiny_folder

from shardwise.config import AlgorithmConfig, BradleyTerry, CriticConfig, EngineConfig, OptimizerConfig
from shardwise.config.preference import Dpo, Ipo, Kto, Orpo, Simpo
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.recipes.losses import LossSource

LENGTHS = [9, 4, 7, 6, 12, 5, 3, 8]
LAYOUTS = {
    "2 ranks": (2, {}),
    "2 ranks, one sequence": (2, {"ulysses_size": 2}),
    "4 ranks, replicas": (4, {"fsdp_size": 2}),
    "4 ranks, two a sequence": (4, {"ulysses_size": 2}),
}
POLICY = {
    "ppo_clip": {},
    "gspo": {"policy_loss": "gspo", "aggregation": "seq-mean-token-mean"},
    "gmpo": {"policy_loss": "gmpo", "aggregation": "seq-mean-token-sum"},
    "cispo": {"policy_loss": "cispo"},
    "sapo": {"policy_loss": "sapo"},
    "reinforce": {"policy_loss": "reinforce", "aggregation": {"name": "seq-mean-token-sum-norm", "divisor": 8}},
    "clip_cov": {"policy_loss": "clip_cov"},
    "kl_cov": {"policy_loss": "kl_cov"},
    "dppo_tv": {"policy_loss": "dppo_tv"},
    "dppo_kl": {"policy_loss": "dppo_kl"},
    "topr": {"policy_loss": "topr", "aggregation": "token-sum"},
    "kimi": {"policy_loss": "kimi"},
    "kl k3+": {"kl_coef": 0.1, "kl_estimator": "k3+"},
}
LOSSES = {
    **{name: ("policy", AlgorithmConfig.model_validate(tree), {"kl_coef": 0.1}) for name, tree in POLICY.items()},
    "value": ("value", CriticConfig(), {}),
    **{loss.name: ("preference", loss, {"kl": 0.0}) for loss in (Dpo(), Ipo(), Simpo(), Orpo())},
    "kto": ("preference", Kto(), {"kl": 0.2}),
    "reward_model": ("reward_model", BradleyTerry(center_coef=0.1), {}),
}
HEADS = {"value": "token_values", "reward_model": "sequence_scores"}


def filled(name, samples):
    """With every array that the loss may read."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for place, sample in enumerate(samples):

        def noise(scale, sample=sample):
            return scale * torch.randn(len(sample.token_ids), generator=generator)

        made.append(
            replace(
                sample,
                rollout_logprobs=noise(0.1) - 4,
                old_logprobs=noise(0.5) - 4,
                ref_logprobs=noise(0.5) - 4,
                advantages=noise(1.0),
                values=noise(0.2),
                returns=noise(0.5),
                importance_weights=1 + 0.1 * noise(1.0).abs(),
                selected=noise(1.0) > 1 if name in ("clip_cov", "kl_cov") else None,
                reward=0.5 - place % 2,
            )
        )
    return made


def gradients(folder, name, layout):
    """The loss of the step, and this rank's shards of the gradient by name."""
    kind, config, numbers = LOSSES[name]
    loss = LossSource.of(kind, config, **numbers).make()
    engine = TrainEngine.build(
        Path(folder),
        EngineConfig(**layout),
        device=torch.device("cpu"),
        optimizer=OptimizerConfig(),
        head=HEADS.get(name, "logprobs"),
    )
    num_sharing = layout.get("ulysses_size", 1)
    step = pack(
        filled(name, random_samples(LENGTHS)),
        num_shards=dist.get_world_size() // num_sharing,
        max_tokens=23,
        keep_together=1 if kind in ("policy", "value") or name == "kto" else 2,
    )
    metrics = engine.forward_backward(
        step.shards[dist.get_rank() // num_sharing],
        loss.function,
        step.denominators,
        with_entropy=loss.with_entropy,
    )
    total = torch.tensor(metrics["train/loss"].result(), dtype=torch.float64)
    dist.all_reduce(total)
    found = {
        key: parameter.grad.to_local().clone()  # whole tensors would need this call's groups in torch's caches
        for key, parameter in engine._model.hf_model.named_parameters()
        if parameter.grad is not None
    }
    return float(total) / num_sharing, found


def all_losses(folder, layout):
    return {name: gradients(folder, name, layout) for name in LOSSES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_folder("qwen3", tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(scope="module")
def alone(run_ranks, folder):
    (found,) = run_ranks(all_losses, 1, folder, {}, timeout_seconds=300)
    return found


@pytest.mark.parametrize(
    "layout", [name if "two a sequence" in name else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS]
)
def test_trap_05_every_loss_is_the_same_on_every_layout(run_ranks, folder, alone, layout):
    """Loss to 2e-6 and every gradient to 1e-5 of its largest element."""
    world_size, options = LAYOUTS[layout]
    found = run_ranks(all_losses, world_size, folder, options, timeout_seconds=300)
    sharing = found[: options.get("fsdp_size", world_size)]
    for name, (expected_loss, expected) in alone.items():
        loss = found[0][name][0]
        gradient = {key: torch.cat([rank[name][1][key] for rank in sharing]) for key in sharing[0][name][1]}
        assert loss == pytest.approx(expected_loss, rel=2e-6, abs=2e-6), name
        assert gradient.keys() == expected.keys()
        assert max(float(g.abs().max()) for g in expected.values()) > 1e-3, f"{name} has no gradient to compare"
        for key, value in expected.items():
            bound = 1e-5 * max(float(value.abs().max()), 1e-3)
            torch.testing.assert_close(gradient[key], value, atol=bound, rtol=0, msg=f"{name}: {key}")

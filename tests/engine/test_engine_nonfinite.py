"""Where a step goes bad is named, whatever stands around the layers."""

import math
from pathlib import Path

import pytest
import torch
from tiny_models import random_samples, tiny_folder
from torch import nn

from shardwise.config import EngineConfig, OptimizerConfig
from shardwise.controller.process_group import Rank, process_group
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.engine.nonfinite import LOSS
from shardwise.ops import plain_name
from shardwise.recipes.losses import sft_loss

CPU = torch.device("cpu")
STEP = pack(random_samples([9, 7, 5, 6]), num_shards=1, max_tokens=14)
"""Two micro-batches."""
LAYER = "model.layers.1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def group():
    with process_group(Rank(0, 1, 0), device_type="cpu", timeout_seconds=60):
        yield


def build(folder, **options) -> TrainEngine:
    return TrainEngine.build(Path(folder), EngineConfig(**options), device=CPU, optimizer=OptimizerConfig())


def module_of(engine, name) -> nn.Module:
    """The innermost of this name, below wrappers."""
    return [module for path, module in engine._model.hf_model.named_modules() if plain_name(path) == name][-1]


def poison(engine, name, value=math.nan):
    parameters = {plain_name(path): one for path, one in engine._model.hf_model.named_parameters()}
    parameters[name].data.to_local()[1, 2] = value


def diagnose(engine, loss_fn=sft_loss):
    [batches] = STEP.shards
    assert len(batches) == 2
    return engine.diagnose(batches, loss_fn, STEP.denominators)


def places(diagnosis):
    return [(fault.micro_batch, fault.phase, fault.module) for fault in diagnosis.faults]


class BadGradient(torch.autograd.Function):
    """The identity, with a NaN in the gradient of the last token."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[0, -1, 0] = math.nan
        return grad


OPTIONS = {
    "plain": {},
    "checkpointed": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "tiled": {"apply_tiled_mlp": True},
    "reduced last": {"reduce_gradients": "last_micro_batch"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("module", ["mlp.down_proj", "self_attn.k_proj"])
def test_a_bad_weight_is_named_by_the_module_that_first_computes_with_it(folder, options, module):
    engine = build(folder, **options)
    poison(engine, f"{LAYER}.{module}.weight")
    found = diagnose(engine)
    assert places(found) == [(k, "forward", f"{LAYER}.{module}") for k in (0, 1)]
    assert math.isnan(found.grad_norm)
    first = found.faults[0]
    num_tokens = len(STEP.shards[0][0].input_ids)
    if "apply_tiled_mlp" not in options or module != "mlp.down_proj":  # of a tile there is one part of the tokens
        assert first.shape[:2] == [1, num_tokens]
        assert (first.num_nan, first.num_inf, first.token) == (num_tokens, 0, 0)
    assert 0 < first.max_abs < 100


@pytest.mark.parametrize(
    ("weight", "value", "module"),
    [
        ("model.embed_tokens.weight", math.inf, "model.embed_tokens"),
        ("lm_head.weight", math.nan, "lm_head"),
    ],
)
def test_the_two_ends_of_a_model_are_named_too(folder, weight, value, module):
    """Token 1 is in no sample, so that only its embedding is bad: then the loss has nothing of it."""
    engine = build(folder)
    poison(engine, weight, value)
    bad = diagnose(engine)
    if module == "lm_head":
        assert places(bad) == [(k, "forward", "lm_head") for k in (0, 1)]
    else:
        assert places(bad) == []
        batch = STEP.shards[0][0]
        token = int(batch.input_ids[4])
        engine._model.hf_model.get_input_embeddings().weight.data.to_local()[token, 0] = math.inf
        (first, *_) = diagnose(engine).faults
        assert (first.phase, first.module, first.num_inf) == ("forward", module, int((batch.input_ids == token).sum()))
        assert first.token == batch.input_ids.tolist().index(token)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("named", ["mlp.gate_proj", "mlp"])
def test_a_backward_that_gives_back_nan_is_named(folder, options, named):
    """In a module's own forward, or between the modules that one calls."""
    engine = build(folder, **options)
    mlp, gate = module_of(engine, f"{LAYER}.mlp"), module_of(engine, f"{LAYER}.mlp.gate_proj")
    if named == "mlp.gate_proj":
        forward = gate.forward
        gate.forward = lambda hidden: forward(BadGradient.apply(hidden))
    else:
        mlp.forward = lambda hidden: mlp.down_proj(BadGradient.apply(mlp.act_fn(gate(hidden)) * mlp.up_proj(hidden)))
    found = diagnose(engine)
    assert all(map(math.isfinite, found.losses))
    assert math.isnan(found.grad_norm)
    (first, *_) = found.faults
    assert (first.micro_batch, first.phase, first.module) == (0, "backward", f"{LAYER}.{named}")
    if "apply_tiled_mlp" not in options:
        num_tokens = len(STEP.shards[0][0].input_ids)
        assert first.token == num_tokens - 1


def test_a_loss_that_is_not_finite_is_told_from_what_the_model_gave(folder):
    def nan_in_the_second(outputs, batch, denominators):
        loss, metrics = sft_loss(outputs, batch, denominators)
        return loss + (math.nan if batch is not None and 1 in batch.sample_index else 0.0), metrics

    found = diagnose(build(folder), nan_in_the_second)
    bad = [k for k, batch in enumerate(STEP.shards[0]) if 1 in batch.sample_index]
    assert places(found) == [(bad[0], "loss", LOSS)]
    assert [math.isnan(loss) for loss in found.losses] == [k in bad for k in (0, 1)]
    assert math.isnan(found.grad_norm)


def test_a_loss_with_a_bad_gradient_is_named(folder):
    def root_of_zero(outputs, batch, denominators):
        loss, metrics = sft_loss(outputs, batch, denominators)
        return loss + torch.sqrt(0 * outputs.logprobs.sum()), metrics

    found = diagnose(build(folder), root_of_zero)
    assert places(found) == [(k, "backward", LOSS) for k in (0, 1)]
    assert all(map(math.isfinite, found.losses))


def test_a_gradient_that_goes_bad_in_a_sum_is_named_by_its_weight(folder):
    engine = build(folder)
    weight = dict(engine._model.hf_model.named_parameters())[f"{LAYER}.mlp.up_proj.weight"]
    weight.register_post_accumulate_grad_hook(lambda one: one.grad.to_local()[0, 0].fill_(math.inf))
    found = diagnose(engine)
    assert [fault[1:] for fault in places(found)] == [("gradient", f"{LAYER}.mlp.up_proj.weight")]
    assert (found.faults[0].num_inf, found.faults[0].token) == (1, None)
    assert "gradient of model.layers.1.mlp.up_proj.weight, summed over ranks, has 0 NaN and 1 Inf" in str(
        found.faults[0]
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_was_looked_at_goes_on_as_if_nobody_had(folder, options):
    [batches] = STEP.shards
    looked_at, other = build(folder, **options), build(folder, **options)
    found = diagnose(looked_at)
    assert found.faults == []
    assert not any(parameter.grad is not None for parameter in looked_at._model.parameters())
    steps = []
    for engine in (looked_at, other):
        loss = engine.forward_backward(batches, sft_loss, STEP.denominators)["train/loss"].result()
        norm = engine.optim_step()["train/grad_norm"].result()
        steps.append((loss, norm, [weight.clone() for _, weight in engine.named_weights(torch.float32)]))
    assert steps[0][:2] == steps[1][:2]
    assert all(map(torch.equal, steps[0][2], steps[1][2]))
    assert sum(found.losses) == pytest.approx(steps[0][0], rel=1e-7)
    assert found.grad_norm == pytest.approx(steps[0][1], rel=1e-6)


def test_modules_of_compiled_layers_are_seen(folder):
    """Without a compilation: what is watched runs operation by operation."""
    engine = build(folder)
    for layer in engine._model.hf_model.model.layers:
        layer.compile()
    poison(engine, f"{LAYER}.mlp.down_proj.weight")
    assert places(diagnose(engine))[0] == (0, "forward", f"{LAYER}.mlp.down_proj")


def num_hooks(engine):
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in engine._model.modules())


def test_hooks_are_gone_after_a_loss_that_raises(folder):
    def raises(*_):
        assert num_hooks(engine) > before
        raise KeyError

    engine = build(folder)
    before = num_hooks(engine)
    with pytest.raises(KeyError):
        diagnose(engine, raises)
    assert num_hooks(engine) == before

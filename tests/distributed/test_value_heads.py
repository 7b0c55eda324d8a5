"""Critics and reward models over ranks: fresh heads are the same on every layout, saved ones give what transformers
gives, under sequence parallelism too."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_models import random_samples, tiny_folder

from shardwise.config import EngineConfig, FrozenEngineConfig, OptimizerConfig
from shardwise.data.packing import pack, unpack
from shardwise.engine import TrainEngine

CPU = torch.device("cpu")
LENGTHS = [9, 4, 7, 1, 12]
LAYOUTS = {"1": (1, {}), "2": (2, {}), "2 sp2": (2, {"ulysses_size": 2}), "4 sp2": (4, {"ulysses_size": 2})}


def scores(folder, head, layout, samples, trained=False):
    """Of every sample [L], by a frozen engine or by one before its first step."""
    kind = {"config": EngineConfig(**layout), "optimizer": OptimizerConfig()}
    kind = kind if trained else {"config": FrozenEngineConfig(**layout)}
    engine = TrainEngine.build(Path(folder), device=CPU, head=head, **kind)
    return values_of(engine, layout, samples)


def values_of(engine, layout, samples):
    num_sharing = layout.get("ulysses_size", 1)
    step = pack(samples, num_shards=dist.get_world_size() // num_sharing, max_tokens=16)
    own = [out.values for out in engine.forward(step.shards[dist.get_rank() // num_sharing])]
    shards = [None] * dist.get_world_size()
    dist.all_gather_object(shards, own)
    return unpack(step, shards[::num_sharing])


def classifier(name, backbone):
    """Transformers' model of the kind, its head away from zero."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    cls = {"token_values": AutoModelForTokenClassification, "sequence_scores": AutoModelForSequenceClassification}[name]
    torch.manual_seed(0)
    model = cls.from_pretrained(backbone, num_labels=1, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        model.score.weight.normal_(0, 0.3)
        if model.score.bias is not None:
            model.score.bias.fill_(0.2)
    return model.eval()


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return tiny_folder("qwen3", tmp_path_factory.mktemp("backbone"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head", ["token_values", "sequence_scores"])
def test_saved_heads_score_as_transformers_does(run_ranks, backbone, tmp_path, head, layout):
    model = classifier(head, backbone)
    model.save_pretrained(tmp_path)
    samples = random_samples(LENGTHS, prompt_tokens=2)
    world_size, options = LAYOUTS[layout]
    for found in run_ranks(scores, world_size, str(tmp_path), head, options, samples):
        for sample, values in zip(samples, found, strict=True):
            with torch.no_grad():
                hidden = model.base_model(input_ids=sample.token_ids[None], use_cache=False).last_hidden_state[0]
                at_states = model.score(hidden)[:, 0]
            expected = torch.zeros(len(values))
            if head == "token_values":
                expected[sample.loss_mask] = at_states[:-1][sample.loss_mask[1:]]  # from the state before the token
            else:
                expected[-1] = at_states[-1]
            torch.testing.assert_close(values, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("head", ["token_values", "sequence_scores"])
def test_a_language_model_gets_the_same_fresh_head_on_every_layout(run_ranks, backbone, head):
    samples = random_samples(LENGTHS, prompt_tokens=2)
    (expected,) = run_ranks(scores, 1, str(backbone), head, {}, samples, True)
    assert max(float(values.abs().max()) for values in expected) > 1e-3
    for world_size, options in list(LAYOUTS.values())[1:]:
        for found in run_ranks(scores, world_size, str(backbone), head, options, samples, True):
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def regression_losses(folder, layout):
    """A critic learns the constant 1 for every trained token."""

    def loss_fn(outputs, batch, denominators):
        errors = torch.where(batch.loss_mask, outputs.values - 1.0, 0.0)
        return errors.square().sum() / denominators.num_tokens, {}

    engine = TrainEngine.build(
        Path(folder),
        EngineConfig(**layout),
        device=CPU,
        optimizer=OptimizerConfig(learning_rate=3e-3),
        head="token_values",
        total_steps=15,
    )
    num_sharing = layout.get("ulysses_size", 1)
    step = pack(random_samples(LENGTHS), num_shards=dist.get_world_size() // num_sharing, max_tokens=16)
    losses = []
    for _ in range(15):
        metrics = engine.forward_backward(step.shards[dist.get_rank() // num_sharing], loss_fn, step.denominators)
        losses.append(metrics["train/loss"].result())
        engine.optim_step()
    return losses


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="full", marks=pytest.mark.full), pytest.param({"lora": {"rank": 4}}, id="lora")],
)
def test_a_critic_learns_the_same_on_shared_sequences(run_ranks, backbone, options):
    """With adapters too: its head, which starts at random, is trained whole."""
    (alone,) = run_ranks(regression_losses, 1, str(backbone), options)
    first, second = run_ranks(regression_losses, 2, str(backbone), {"ulysses_size": 2, **options})
    assert first == second, "both ranks know the whole loss"
    assert alone[-1] < 0.2 * alone[0]
    torch.testing.assert_close(torch.tensor(first), torch.tensor(alone), atol=1e-4, rtol=1e-3)

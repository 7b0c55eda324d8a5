"""Layers whose indexer chooses the keys that a token sees, over packs: whose choice is made when, and that nothing
trains them."""

from pathlib import Path

import pytest
import torch
from family_checks import eager_logprobs
from family_table import FAMILIES, save_model
from torch import nn

from shardwise.config import EngineConfig, OptimizerConfig
from shardwise.data.packing import pack, unpack
from shardwise.engine import TrainEngine
from shardwise.families.key_choice import DeferredIndexer
from shardwise.recipes.losses import sft_loss
from shardwise.types import Sample

CPU = torch.device("cpu")
FAMILY = "glm_moe_dsa"
CHOSEN = FAMILIES[FAMILY]["index_topk"]


def samples_of(lengths):
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(3, 97, (length,), generator=generator) for length in lengths]
    return [Sample(uid=str(i), token_ids=t, loss_mask=torch.arange(len(t)) > 0) for i, t in enumerate(tokens)]


def build(folder, **keys):
    optimizer = OptimizerConfig(learning_rate=1e-2, weight_decay=0.5)
    return TrainEngine.build(Path(folder), EngineConfig(**keys), device=CPU, optimizer=optimizer)


class Calls:
    """Counts how often the indexers of a model are asked."""

    def __init__(self, engine):
        self.count = 0
        for part in engine._model.modules():
            if isinstance(part, DeferredIndexer):
                part._checkpoint_wrapped_module.register_forward_hook(self)

    def __call__(self, *_):
        self.count += 1


def scored(folder, lengths, keys):
    """Logprobs of sequences in one pack, and how often indexers were asked."""
    engine = build(folder, **keys)
    calls, step = Calls(engine), pack(samples_of(lengths), num_shards=1, max_tokens=64)
    return unpack(step, [[out.logprobs for out in engine.forward(step.shards[0])]]), calls.count


@pytest.mark.parametrize(
    ("lengths", "num_asked"),
    [([9, 2, CHOSEN, 7, 7, CHOSEN + 1], 4), ([2, CHOSEN, CHOSEN, 1], 0)],
    ids=["long and short", "short"],
)
def test_an_indexer_is_asked_for_sequences_with_more_tokens_than_it_chooses(run_ranks, tmp_path, lengths, num_asked):
    """Once, by the layer it is in; the next one shares what it found."""
    model = save_model(FAMILY, FAMILIES[FAMILY], tmp_path)
    ((found, asked),) = run_ranks(scored, 1, str(tmp_path), lengths, {})
    assert asked == num_asked
    for sample, logprobs in zip(samples_of(lengths), found, strict=True):
        torch.testing.assert_close(logprobs[1:], eager_logprobs(model, sample.token_ids), atol=2e-5, rtol=0)


@pytest.mark.full
def test_compiled_layers_choose_the_same_keys(run_ranks, tmp_path):
    save_model(FAMILY, FAMILIES[FAMILY], tmp_path)
    lengths = [9, 2, 7, 7]
    ((found, _),) = run_ranks(scored, 1, str(tmp_path), lengths, {"compile_layers": True}, timeout_seconds=300)
    ((expected, _),) = run_ranks(scored, 1, str(tmp_path), lengths, {})
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def stepped(folder, keys):
    """What a step with weight decay changed, and what has an adapter."""
    engine = build(folder, **keys)
    before = {name: tensor.clone() for name, tensor in engine.named_weights(torch.float32)}
    step = pack(samples_of([9, 7]), num_shards=1, max_tokens=64)
    engine.forward_backward(step.shards[0], sft_loss, step.denominators)
    engine.optim_step()
    after = dict(engine.named_weights(torch.float32))
    changed = [name for name, tensor in after.items() if not torch.equal(tensor, before[name])]
    adapted = [
        name for name, part in engine._model.named_modules() if isinstance(getattr(part, "lora_A", None), nn.Module)
    ]
    return changed, adapted


@pytest.mark.parametrize("keys", [{}, {"lora": {"rank": 2}}], ids=["whole", "lora"])
def test_what_no_gradient_reaches_is_neither_decayed_nor_adapted(run_ranks, tmp_path, keys):
    save_model(FAMILY, FAMILIES[FAMILY], tmp_path)
    ((changed, adapted),) = run_ranks(stepped, 1, str(tmp_path), keys)
    assert any("self_attn.q_b_proj" in name for name in changed)
    assert bool(adapted) == bool(keys)
    assert not any("indexer" in name for name in [*changed, *adapted])

"""Sequence mixers over packs: no state passes from one sequence to the next, whatever else the engine does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_table import FAMILIES, save_model
from ranks import RankError
from tiny_models import random_samples

from shardwise.config import EngineConfig, ModelError, OptimizerConfig
from shardwise.data.packing import pack, unpack
from shardwise.engine import TrainEngine
from shardwise.engine.mixers import PackedMixer
from shardwise.recipes.losses import sft_loss

CPU = torch.device("cpu")
HYBRIDS = ["qwen3_next", "falcon_h1", "lfm2"]
"""A gated delta rule, a state space beside attention, a short convolution."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {family: tmp_path_factory.mktemp(family) for family in HYBRIDS}
    for family, folder in made.items():
        save_model(family, FAMILIES[family], folder)
    return {family: str(folder) for family, folder in made.items()}


def build(folder, **keys):
    return TrainEngine.build(Path(folder), EngineConfig(**keys), device=CPU, optimizer=OptimizerConfig())


def score_versions(folders, versions):
    """Of every folder and version of the samples: the logprobs of each sequence, all in one pack."""
    results = []
    for folder in folders:
        engine = build(folder)
        steps = [pack(samples, num_shards=1, max_tokens=64) for samples in versions]
        results.append([unpack(step, [[o.logprobs for o in engine.forward(step.shards[0])]]) for step in steps])
    return results


def test_trap_06_with_one_sequence_changed_every_other_of_the_pack_keeps_its_bits(run_ranks, folders):
    samples = random_samples([9, 7, 7, 3], prompt_tokens=1, vocab=97)
    versions = [samples]
    for changed, sample in enumerate(samples):
        tokens = sample.token_ids.clone()
        tokens[1:] = 3 + (tokens[1:] - 3 + 50) % 94
        versions.append([replace(s, token_ids=tokens) if i == changed else s for i, s in enumerate(samples)])
    (results,) = run_ranks(score_versions, 1, list(folders.values()), versions)
    for name, (original, *found) in zip(folders, results, strict=True):
        for changed, logprobs in enumerate(found):
            for index, values in enumerate(logprobs):
                assert torch.equal(values, original[index]) == (index != changed), (name, changed, index)


def gradients(folders, keys):
    results = []
    for folder in folders:
        engine = build(folder, **keys)
        step = pack(random_samples([9, 7, 7, 3], vocab=97), num_shards=1, max_tokens=16)
        engine.forward_backward(step.shards[0], sft_loss, step.denominators)
        named = engine._model.hf_model.named_parameters()
        results.append([p.grad.full_tensor().clone() for _, p in named if p.grad is not None])
    return results


def test_recomputed_mixers_give_the_gradients_of_kept_ones(run_ranks, folders):
    """Two micro-batches, each recomputed with its own layout."""
    (kept,) = run_ranks(gradients, 1, list(folders.values()), {})
    (recomputed,) = run_ranks(gradients, 1, list(folders.values()), {"activation_checkpointing": "full"})
    torch.testing.assert_close(recomputed, kept, atol=1e-7, rtol=1e-5)


def test_a_unit_inside_a_mixer_is_refused(run_ranks, folders):
    """It would be gathered for every run of sequences, and ranks have different runs."""
    precision = [{"module": "model.layers.0.linear_attn.norm", "param_dtype": "float32"}]
    with pytest.raises(
        RankError, match=r"model\.layers\.0\.linear_attn piece by piece, but .*norm inside it is an FSDP"
    ):
        run_ranks(gradients, 1, [folders["qwen3_next"]], {"module_precision": precision})


def test_a_model_that_does_not_hand_the_layout_on_is_refused():
    with pytest.raises(ModelError, match="Identity is not supported: it does not pass keyword arguments on"):
        PackedMixer(torch.nn.Identity())(torch.zeros(1, 3, 2))

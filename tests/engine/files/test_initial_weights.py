"""What an engine starts with, read in two parts: frozen weights at once, trained ones when no state is resumed from."""

from functools import partial
from pathlib import Path

import pytest
import torch
from resumed_engines import LORA, build, steps
from safetensors.torch import load_file, save_file
from sharded_lora import needs_integer_shards
from tiny_models import random_samples, tiny_folder

from shardwise.config import EngineConfig, ModelError, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.engine.shards import local_shard

KINDS = {
    "whole": (2, "llama", {}, {}),
    "tied": (2, "qwen3", {"tie_word_embeddings": True}, {}),
    "frozen": (2, "llama", {}, {"freeze_module_prefix": ["model.embed_tokens", "model.layers.0.mlp"]}),
    "frozen routers": (2, "qwen3_moe", {"num_experts": 4}, {"freeze_router": True}),
    "lora": (2, "llama", {}, {"lora": LORA | {"use_dora": True, "modules_to_save": ["lm_head"]}}),
    "nf4": (2, "llama", {}, {"lora": LORA | {"quantize_base": "nf4"}}),
}
"""Ranks, model and engine."""


def read_in_two_parts(folder, engine):
    """What each of both parts read, and the names of the tensors that differ from those of an engine built at once."""
    whole, own = (build(folder, engine, {}, with_trained=with_trained) for with_trained in (True, False))
    first = own.num_bytes_read
    asked = [partial(steps, own, [0]), own.stage_export, own.state.stage, partial(own.named_weights, torch.float32)]
    for ask in asked + ([partial(own.adapter_weights, torch.float32)] if "lora" in engine else []):
        with pytest.raises(AssertionError, match="no trained weight has been loaded"):
            ask()
    own.load_initial_weights()
    found, expected = (
        {name: local_shard(tensor) for name, tensor in one._model.state_dict().items()} for one in (own, whole)
    )
    assert found.keys() == expected.keys()
    differing = [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]
    return first, own.num_bytes_read - first, whole.num_bytes_read, differing, steps(own, [0]) == steps(whole, [0])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[needs_integer_shards] if kind == "nf4" else ()) for kind in KINDS]
)
def test_both_parts_make_up_the_whole_and_read_nothing_twice(run_ranks, tmp_path, kind):
    num_ranks, family, size, engine = KINDS[kind]
    folder = str(tiny_folder(family, tmp_path / "model", **size))
    for first, second, whole, differing, same_step in run_ranks(read_in_two_parts, num_ranks, folder, engine):
        assert differing == []
        assert same_step
        assert first + second == whole
        assert (first > 0) == (kind not in ("whole", "tied"))
        assert (second > 0) == (kind != "nf4"), "a new adapter is drawn, and the copy of lm_head is read"


def first_errors(folder):
    """Of building an engine without trained weights, and of loading them."""
    options = {"device": torch.device("cpu"), "optimizer": OptimizerConfig(), "with_trained": False}
    with pytest.raises(ModelError) as missing:
        TrainEngine.build(Path(folder) / "missing", EngineConfig(), **options)
    engine = TrainEngine.build(Path(folder) / "nan", EngineConfig(), **options)
    with pytest.raises(ModelError) as nonfinite:
        engine.load_initial_weights()
    return str(missing.value), str(nonfinite.value), engine.state.has_weights


def test_a_folder_that_does_not_fit_is_told_at_once_and_one_with_nan_when_it_is_read(run_ranks, tmp_path):
    for name in ("missing", "nan"):
        folder = tiny_folder("llama", tmp_path / name)
        weights = load_file(folder / "model.safetensors")
        if name == "missing":
            del weights["model.norm.weight"]
        else:
            weights["model.norm.weight"][3] = torch.nan
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for missing, nonfinite, has_weights in run_ranks(first_errors, 2, str(tmp_path)):
        assert "1 tensor is missing (model.norm.weight)" in missing
        assert "model.norm.weight" in nonfinite
        assert not has_weights


def resumed_with_a_head(folder, state):
    """The values of a critic, and those of one that resumes from its state."""
    options = {"device": torch.device("cpu"), "optimizer": OptimizerConfig(), "head": "token_values"}
    first = TrainEngine.build(Path(folder), EngineConfig(), **options)
    first.state.save(Path(state))
    second = TrainEngine.build(Path(folder), EngineConfig(), **options, with_trained=False)
    second.state.load(Path(state))
    third = TrainEngine.build(Path(folder), EngineConfig(), **options, with_trained=False)
    third.load_initial_weights()
    batches = pack(random_samples([5, 9], seed=0), num_shards=1, max_tokens=32).shards[0]
    return [[output.values.tolist() for output in engine.forward(batches)] for engine in (first, second, third)]


def critic_with_adapters(folder):
    """Of a critic with adapters that is built in two parts its frozen value head and the copy of that which is trained;
    the values of one that is built at once, and its own."""
    options = {"device": torch.device("cpu"), "optimizer": OptimizerConfig(), "head": "token_values"}
    whole, own = (
        TrainEngine.build(Path(folder), EngineConfig(lora=LORA), **options, with_trained=with_trained)
        for with_trained in (True, False)
    )
    heads = [parameter for name, parameter in own._model.named_parameters() if ".score." in name]
    frozen, copy = ([one for one in heads if one.requires_grad == is_trained] for is_trained in (False, True))
    for parameter in copy:
        parameter.data.fill_(torch.nan)  # it has memory, and whatever was there
    own.load_initial_weights()
    batches = pack(random_samples([5, 9], seed=0), num_shards=1, max_tokens=32).shards[0]
    values = [[output.values.tolist() for output in engine.forward(batches)] for engine in (whole, own)]
    return *([local_shard(part).tolist() for part in head] for head in (frozen, copy)), *values


def test_the_trained_copy_of_a_critics_head_is_the_head_of_its_folder(run_ranks, tmp_path):
    """It is no tensor of the folder by itself: the second part fills it."""
    folder = tiny_folder("llama", tmp_path / "model")
    for frozen, copy, whole, own in run_ranks(critic_with_adapters, 1, str(folder)):
        assert copy == frozen != []
        assert own == whole


def test_a_critic_begins_with_its_folder_and_a_fresh_head_or_with_its_state(run_ranks, tmp_path):
    folder = tiny_folder("llama", tmp_path / "model")
    for first, second, third in run_ranks(resumed_with_a_head, 1, str(folder), str(tmp_path / "state")):
        assert second == first
        assert third == first

"""The record of what is proven of each family: that it says the truth, and that engines go by it."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from family_checks import CPU, Proof
from family_table import FAMILIES, REFUSED, language_model, save_model
from prove_models import PAGE, RECORD, page
from ranks import RankError

from shardwise.config import ConfigError, EngineConfig, FrozenEngineConfig, OptimizerConfig
from shardwise.engine import TrainEngine
from shardwise.engine.model import _require_proven
from shardwise.engine.quantized import SHARDS_INTEGERS
from shardwise.families import (
    CHECKS,
    is_proven,
    other_release,
    proven_record,
    proven_release,
    unproven_reason,
    with_release,
)
from shardwise.rollout import EmbeddedEngine

COVERING = ["gemma3_text", "deepseek_v3"]
"""Windows and tied weights; latent attention and experts. The others: make test-full."""


@pytest.mark.parametrize(
    "family", [name if name in COVERING else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES]
)
def test_what_is_proven_of_a_family_is_what_the_record_says(run_ranks, tmp_path, family):
    proof = Proof(family, tmp_path)
    found = proof.on_one_rank(run_ranks) | proof.on_two_ranks(run_ranks)
    expected = proven_record()[family]
    assert found == (expected if SHARDS_INTEGERS else expected | {"qlora": found["qlora"]})


def test_the_record_has_every_family_and_its_page_is_the_one_in_the_docs():
    record = proven_record()
    assert json.loads(RECORD.read_text(encoding="utf-8"))["families"] == record
    assert record.keys() == FAMILIES.keys() | REFUSED.keys()
    assert all(row.keys() == CHECKS.keys() for family, row in record.items() if family in FAMILIES)
    assert PAGE.read_text(encoding="utf-8") == page(record, proven_release()), "run make models"


def test_the_page_names_the_whole_checkpoints_of_which_only_the_language_model_is_proven():
    said = PAGE.read_text(encoding="utf-8")
    assert "Whole checkpoints of `apertus1p5`, `dots3_note`, `gemma3n`, `gemma4_unified` or `llama4` are" in said
    assert "all in float32 on a CPU" in said


def test_at_least_thirty_families_are_proven_in_all_but_what_is_refused_by_name():
    proven = [row for family, row in proven_record().items() if family in FAMILIES]
    assert len(proven) >= 30
    for row in proven:
        assert row["packing"] == row["fsdp2"] == row["export"] == "proven"
        assert not any(result.startswith("fails") for result in row.values())


@pytest.mark.parametrize(
    ("proven", "installed", "is_another"),
    [("5.23.0", "5.23.4", False), ("5.23.0", "5.17.0", True), ("5.23.0", "5.2.3", True), ("5.23.0", "6.23.0", True)],
)
def test_another_release_of_transformers_is_named_with_the_one_of_the_record(
    monkeypatch, proven, installed, is_another
):
    monkeypatch.setattr("shardwise.families.proven._installed_release", lambda: installed)
    monkeypatch.setattr("shardwise.families.proven.proven_release", lambda: proven)
    note = f"model families are proven with transformers {proven}, and {installed} is installed"
    assert other_release() == (note if is_another else None)
    assert with_release("it has no gate") == (f"it has no gate ({note})" if is_another else "it has no gate")


UNLISTED = "persimmon"
"""A family that would be computed right, had anybody looked."""


def test_of_a_whole_checkpoint_its_language_model_has_to_be_proven_too(run_ranks, tmp_path):
    """Of the towers around it no other thing is known than that they go with the one that was proven."""
    options = FAMILIES["llava"] | {"text_config": language_model(UNLISTED)}
    save_model("llava", options, tmp_path)
    with pytest.raises(RankError, match=f"not proven for the family {UNLISTED}, of which nothing is proven"):
        run_ranks(build_unlisted, 1, str(tmp_path), {})
    with pytest.raises(ConfigError, match=f"not proven for the family {UNLISTED},"):
        EmbeddedEngine.from_folder(tmp_path, dtype=torch.float32, max_rows=1, device=CPU)
    run_ranks(build_unlisted, 1, str(tmp_path), {"allow_unproven": True})


def build_unlisted(folder, options):
    TrainEngine.build(Path(folder), EngineConfig(**options), device=CPU, optimizer=OptimizerConfig())


def test_a_family_that_is_not_in_the_record_is_refused_on_every_rank_unless_it_is_allowed(run_ranks, tmp_path):
    save_model(UNLISTED, {}, tmp_path)
    with pytest.raises(RankError) as error:
        run_ranks(build_unlisted, 2, str(tmp_path), {})
    message = (
        f"ConfigError: {tmp_path}: training on packed sequences, sharding over ranks, export to the Hugging Face "
        "layout: not proven for the family persimmon, of which nothing is proven (docs/models.md has all families); "
        "choose another, or set engine.allow_unproven=true to try it unproven\n"
    )
    assert str(error.value).count(message) == 2
    run_ranks(build_unlisted, 2, str(tmp_path), {"allow_unproven": True})
    options = {"dtype": torch.float32, "max_rows": 1, "device": CPU}
    with pytest.raises(ConfigError, match=r"embedded rollout .* set rollout\.engine\.allow_unproven=true"):
        EmbeddedEngine.from_folder(tmp_path, **options)
    EmbeddedEngine.from_folder(tmp_path, **options, allow_unproven=True)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"activation_checkpointing": "full"}, "activation checkpointing of whole layers"),
        ({"activation_checkpointing": "selective"}, "activation checkpointing by operation"),
        (
            {"activation_checkpointing": "selective", "checkpoint_every_layers": 2},
            "activation checkpointing of whole layers",
        ),
        ({"lora": {"rank": 2, "quantize_base": "nf4"}}, "LoRA, LoRA on a base in 4 bits"),
        ({"ulysses_size": 2}, r"sequence parallelism \(ulysses_size above 1\)"),
    ],
    ids=["full", "selective", "every second", "qlora", "ulysses"],
)
def test_what_is_asked_of_a_family_is_named(run_ranks, tmp_path, options, named):
    save_model(UNLISTED, {}, tmp_path)
    with pytest.raises(RankError, match=rf"[:,] {named}[:,].* not proven for the family persimmon"):
        run_ranks(build_unlisted, 2, str(tmp_path), options)


def mesh_of(*, sharding=1, sp_group=None, ep=None):
    return SimpleNamespace(fsdp=SimpleNamespace(size=lambda: sharding), sp_group=sp_group, ep=ep)


@pytest.mark.parametrize(
    ("config", "mesh", "head", "check"),
    [
        (FrozenEngineConfig(), mesh_of(), "logprobs", "packing"),
        (FrozenEngineConfig(), mesh_of(sharding=2), "logprobs", "fsdp2"),
        (FrozenEngineConfig(), mesh_of(sp_group=0), "logprobs", "ulysses"),
        (FrozenEngineConfig(), mesh_of(ep=0), "logprobs", "expert_parallel"),
        (FrozenEngineConfig(), mesh_of(), "token_values", "token_values"),
        (FrozenEngineConfig(), mesh_of(), "sequence_scores", "sequence_scores"),
        (EngineConfig(), mesh_of(), "logprobs", "export"),
        (EngineConfig(lora={"rank": 2}), mesh_of(), "logprobs", "lora"),
        (EngineConfig(lora={"rank": 2, "target_parameters": ["up"]}), mesh_of(), "logprobs", "lora_experts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_layout_asks_of_a_family_is_asked_of_the_record(config, mesh, head, check):
    """And nothing more: the same config without it is not refused for it."""
    with pytest.raises(ConfigError) as error:
        _require_proven(Path("model"), [UNLISTED], config, mesh, head)
    asked = str(error.value).removeprefix("model: ").partition(": not proven")[0].split(", ")
    assert CHECKS[check] in asked
    with pytest.raises(ConfigError) as error:
        _require_proven(Path("model"), [UNLISTED], FrozenEngineConfig(), mesh_of(), "logprobs")
    assert (CHECKS[check] in str(error.value)) == (check == "packing")


@pytest.mark.parametrize(
    ("reduces_unused", "sharding", "config", "is_refused"),
    [
        (False, 2, EngineConfig(allow_unproven=True), True),
        (True, 2, EngineConfig(allow_unproven=True), False),
        (False, 1, EngineConfig(allow_unproven=True), False),
        (False, 2, FrozenEngineConfig(allow_unproven=True), False),
    ],
    ids=["torch 2.12", "torch 2.13", "one rank", "frozen"],
)
def test_what_is_unproven_trains_on_several_ranks_where_gradients_cannot_be_mixed(
    monkeypatch, reduces_unused, sharding, config, is_refused
):
    """Until torch 2.13 FSDP adds up gradients of different weights where ranks reach different ones."""
    monkeypatch.setattr("shardwise.engine.model.REDUCES_UNUSED", reduces_unused)
    with pytest.raises(ConfigError) if is_refused else nullcontext() as error:
        _require_proven(Path("model"), [UNLISTED], config, mesh_of(sharding=sharding), "logprobs")
    if is_refused:
        assert str(error.value) == (
            "model: engine.allow_unproven=true trains on several ranks from torch 2.13 on, and this is "
            f"{torch.__version__}: gradients would be wrong wherever ranks reach other parameters of the model, as "
            "experts that are modules of their own; install a newer torch, or train on one rank"
        )
    _require_proven(Path("model"), ["deepseek_v3"], config, mesh_of(sharding=sharding), "logprobs")
    sharded = next(name for name in FAMILIES if is_proven(name, "fsdp2") and not is_proven(name, "ulysses"))
    _require_proven(Path("model"), [sharded], config, mesh_of(sharding=sharding, sp_group=0), "logprobs")


def test_what_is_not_proven_of_a_proven_family_is_named_beside_what_is():
    assert unproven_reason(["deepseek_v3"], CHECKS, "key") is None
    family, check = next(
        (family, check) for family in FAMILIES for check in CHECKS if proven_record()[family][check] != "proven"
    )
    assert unproven_reason([family], ["packing"], "key") is None
    reason = unproven_reason([family], ["packing", check], "key")
    assert reason.startswith(f"{CHECKS[check]}: not proven for the family {family}, of which training on packed seq")
    assert reason.endswith("or set key=true to try it unproven")

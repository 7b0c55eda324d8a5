"""Which families vLLM serves right: that the record says the truth, and what it takes."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from family_table import FAMILIES
from prove_models import vllm_record
from tiny_models import tiny_folder
from transformers import Qwen3Config, Qwen3Model
from vllm_engines import needs_vllm
from vllm_family_checks import LACKS, VLLM_CHECKS, is_noticed, open_engine, prove, save_pair, served

from shardwise.config import ConfigError, LoraConfig, ModelError
from shardwise.rollout.vllm_start import transformers_kept, window_arguments

COVERING = ["gpt_neox", "cohere2", "gpt_oss"]
"""Transformers' own class within vLLM, and adapters of modules with other names there; windows, tied weights; experts
that are packed, and copied as no other's. The others are marked full."""

LOOKED_AT = vllm_record()["families"]
SIZES = Qwen3Config(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)


@pytest.fixture
def patient(run_ranks):
    return partial(run_ranks, timeout_seconds=600)


@needs_vllm
@pytest.mark.parametrize(
    "family", [name if name in COVERING else pytest.param(name, marks=pytest.mark.full) for name in LOOKED_AT]
)
def test_what_vllm_serves_of_a_family_is_what_the_record_says(patient, tmp_path, family):
    assert prove(family, tmp_path, patient) == vllm_record()["families"][family]


def test_the_record_has_a_reason_of_ours_for_every_family_that_is_not_served():
    rows = vllm_record()["families"]
    assert rows.keys() <= FAMILIES.keys()
    for family, row in rows.items():
        assert row.keys() == set(VLLM_CHECKS) | ({"lacks"} if family in LACKS else set())
        assert not any(found.startswith("fails") for found in row.values())
        assert "which a sync does not find" not in "".join(row[check] for check in VLLM_CHECKS)
    assert sum(row["vllm"] == "proven" for row in rows.values()) >= 60


@needs_vllm
def test_a_family_that_vllm_computes_otherwise_ends_a_run_at_its_first_sync(patient, tmp_path):
    """Gemma 3n's embeddings of each layer."""
    assert vllm_record()["families"]["gemma3n_text"]["vllm"].startswith("logprobs differ by 1: ")
    (found,) = patient(served, 1, save_pair("gemma3n_text", tmp_path))
    for one in found:
        assert "the two compute different things with them" in one.probe


@needs_vllm
@pytest.mark.full
@pytest.mark.parametrize("family", sorted(LACKS))
def test_what_vllm_lacks_of_a_family_is_refused_at_the_start_or_found_by_the_first_sync(patient, tmp_path, family):
    assert is_noticed(save_pair(family, tmp_path, with_lacks=True), patient)


def test_a_window_that_vllm_would_leave_out_is_refused(tmp_path):
    config = SimpleNamespace(model_type="qwen2_moe", layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(ModelError, match=r"leaves the windows of qwen2_moe out; set use_sliding_window to false"):
        window_arguments(tmp_path, config)
    assert not window_arguments(tmp_path, SimpleNamespace(model_type="qwen2_moe", layer_types=["full_attention"]))


def test_classes_of_transformers_that_vllm_changes_are_changed_for_its_model_alone(tmp_path):
    class Compiles:
        pass

    def call(self):
        return "compiled"

    def change_and_fail():
        with transformers_kept(skeleton):
            Qwen3Model.__bases__ = (*Qwen3Model.__bases__, Compiles)
            Qwen3Model.__call__ = call
            raise OSError("no memory")

    with torch.device("meta"):
        skeleton, model, trainer = (Qwen3Model(SIZES) for _ in range(3))
    before = dict(vars(Qwen3Model)), Qwen3Model.__bases__
    with transformers_kept(skeleton) as hand_over:
        Qwen3Model.__bases__ = (*Qwen3Model.__bases__, Compiles)
        Qwen3Model.__call__, Qwen3Model.compiles = call, True
        hand_over(torch.nn.ModuleList([model]))
    assert (dict(vars(Qwen3Model)), Qwen3Model.__bases__) == before
    assert (model(), model.compiles, isinstance(model, Compiles)) == ("compiled", True, True)
    assert isinstance(model, Qwen3Model)
    assert not isinstance(trainer, Compiles)
    with pytest.raises(OSError, match="no memory"):
        change_and_fail()
    assert (dict(vars(Qwen3Model)), Qwen3Model.__bases__) == before


@needs_vllm
def test_adapters_beside_experts_are_refused_on_a_cpu_before_vllm_starts(tmp_path):
    folder = tiny_folder("qwen3_moe", tmp_path / "experts")
    with pytest.raises(ConfigError, match=r"no kernel for fused experts beside adapters; set it to false"):
        open_engine(folder, LoraConfig(rank=2))

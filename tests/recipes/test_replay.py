"""A bundle run again: what is shown, and what is compared."""

import math
import shutil

import pytest
import torch
from bad_steps import DOWN, build, parameters_of, poisoned, train
from safetensors.torch import load_file, save_file

from shardwise.config import (
    ConfigError,
    CriticConfig,
    DistillationConfig,
    EngineConfig,
    FrozenEngineConfig,
    LoraConfig,
)
from shardwise.controller.process_group import Rank, process_group
from shardwise.recipes.bundles import Bundle
from shardwise.recipes.losses import LossSource
from shardwise.recipes.replay import replay

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def alone():
    with process_group(Rank(0, 1, 0), device_type="cpu", timeout_seconds=60):
        yield


def test_a_student_is_replayed_with_its_teacher(model_folder, tmp_path):
    worker = build(model_folder)
    bad = tmp_path / "bad"
    shutil.copytree(model_folder, bad)
    build(bad, role="teacher", engine=FrozenEngineConfig(), worker=worker)
    weights = load_file(bad / "model.safetensors")  # what is bad at the start is refused, so it becomes so later
    weights[f"{DOWN}.weight"][0, 0] = math.nan
    save_file(weights, bad / "model.safetensors", metadata={"format": "pt"})
    dict(worker.engines["teacher"].engine._model.hf_model.named_parameters())[f"{DOWN}.weight"].to_local()[0, 0] = (
        math.nan
    )
    worker.use_loss("policy", LossSource.of("distillation", DistillationConfig()).model_dump_json())
    path = tmp_path / "step_1"
    assert train(worker, path, teacher="teacher")["train/nonfinite_fraction"] == 1.0
    assert Bundle.read(str(path)).step.faults[0][1].module == "lm_head (divergence)"
    assert replay(str(path), CPU)


@pytest.mark.parametrize("kind", ["base", "teacher"])
def test_a_model_outside_of_the_bundle_is_found_and_has_to_be_the_same(model_folder, tmp_path, monkeypatch, kind):
    """From another folder than that of the run, which gave a relative path."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_folder, kind)
    path = tmp_path / "step_1"
    if kind == "base":
        worker = build(kind, engine=EngineConfig(lora=LoraConfig()))
        name = next(name for name in parameters_of(worker) if "lora_B" in name)
        train(poisoned(worker, name), path)
    else:
        worker = build(model_folder)
        build(kind, role="teacher", engine=FrozenEngineConfig(), worker=worker)
        worker.use_loss("policy", LossSource.of("distillation", DistillationConfig()).model_dump_json())
        train(poisoned(worker), path, teacher="teacher")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert replay(str(path), CPU)
    folder = tmp_path / kind
    weights = load_file(folder / "model.safetensors")
    save_file(
        weights | {"model.norm.weight": weights["model.norm.weight"] * 2},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ConfigError) as changed:
        replay(str(path), CPU)
    assert str(changed.value) == (
        f"{path} was written with other files: those of {kind}.path={folder} (model.safetensors) have changed since, "
        "so another step would be run; put them back"
    )
    folder.rename(tmp_path / "moved")
    with pytest.raises(
        ConfigError,
        match=rf"step_1 does not hold the model of {kind}\.path={folder}, and it is not there; put it back, or",
    ):
        replay(str(path), CPU)


def step_with_a_bad_token(folder, path):
    """Of a critic, whose embedding of the token 51 is infinite: the first of the second row, and of no other."""
    worker = build(folder, head="token_values")
    worker.use_loss("policy", LossSource.of("value", CriticConfig()).model_dump_json())
    parameters_of(worker)["model.embed_tokens.weight"].data.to_local()[51] = math.inf
    train(worker, path, values=True)


def test_the_row_is_shown_that_the_fault_is_in(model_folder, tmp_path, capsys):
    path = tmp_path / "step_1"
    step_with_a_bad_token(model_folder, path)
    bundle = Bundle.read(str(path))
    [bad] = [batch for batch in bundle.micro_batches() if 51 in batch.tokens.input_ids]
    capsys.readouterr()
    assert replay(str(path), CPU)
    out = capsys.readouterr().out
    assert (
        f"first in rank 0, micro-batch {bad.index}: forward: the output of model.embed_tokens has 0 NaN and 32 Inf"
        in out
    )
    assert '  row rows.jsonl:1, from token 0 of 7 on, ends in "O&\'()*+"\n' in out


def test_one_micro_batch_is_replayed_alone(model_folder, tmp_path, capsys):
    path = tmp_path / "step_1"
    step_with_a_bad_token(model_folder, path)
    batches = Bundle.read(str(path)).micro_batches()
    assert len(batches) == 2
    capsys.readouterr()
    for batch in batches:
        assert replay(str(path), CPU, micro_batch=batch.index), "finite where it was, and not where it was not"
        out = capsys.readouterr().out
        assert ("no tensor that is not finite\n" in out) == (51 not in batch.tokens.input_ids)
        assert "; 1 micro-batch of " in out
    with pytest.raises(ConfigError, match=r"--micro-batch 2: .*step_1 has the micro-batches 0 to 1 of each rank$"):
        replay(str(path), CPU, micro_batch=2)


def test_a_critic_is_replayed_with_its_head(model_folder, tmp_path):
    worker = build(model_folder, head="token_values")
    parameters_of(worker)["score.weight"].data.to_local()[0, 3] = math.nan
    worker.use_loss("policy", LossSource.of("value", CriticConfig()).model_dump_json())
    path = tmp_path / "step_1"
    train(worker, path, values=True)
    assert Bundle.read(str(path)).step.faults[0][1].module == "score"
    assert replay(str(path), CPU)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_kept_as_exactly_as_they_were(model_folder, tmp_path, dtype):
    """float32 masters of a model that computes in less; a loss that is NaN is no overflow of float16."""
    worker = poisoned(build(model_folder, engine=EngineConfig(param_dtype=dtype)))
    path = tmp_path / "step_1"
    for _ in range(2):
        train(worker, path)
    assert Bundle.read(str(path)).step.number == 1
    assert load_file(path / "hf" / "model.safetensors")[f"{DOWN}.weight"].dtype == torch.float32
    assert replay(str(path), CPU)

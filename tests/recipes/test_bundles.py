"""What a skipped step leaves: how many, when, and read back as it was written."""

import math
import shutil
from dataclasses import fields

import pytest
import torch
from bad_steps import DOWN, build, parameters_of, poisoned, samples, train

from shardwise.config import ConfigError, EngineConfig, LoraConfig, ModelError, TrainingError
from shardwise.controller.process_group import Rank, process_group
from shardwise.data import pack
from shardwise.engine.files.verified_files import read_sealed_json, write_sealed_json
from shardwise.recipes.bundles import BUNDLE, Bundle
from shardwise.recipes.checkpointing.manifest import hash_share, write_manifest


@pytest.fixture(autouse=True)
def alone():
    with process_group(Rank(0, 1, 0), device_type="cpu", timeout_seconds=60):
        yield


@pytest.mark.parametrize("max_steps", [1, 3])
def test_the_first_of_a_row_is_kept_before_the_run_ends(model_folder, tmp_path, capsys, max_steps):
    worker = poisoned(build(model_folder, optimizer={"max_nonfinite_steps": max_steps}))
    for number in range(1, max_steps):
        train(worker, tmp_path / f"step_{number}")
    with pytest.raises(TrainingError, match=rf"in {max_steps} optimizer steps in a row .*`shardwise replay`"):
        train(worker, tmp_path / f"step_{max_steps}")
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    err = capsys.readouterr().err
    assert err.count("warning: optimizer step 1 of policy was skipped: rank 0, micro-batch 0: forward: the output") == 1
    assert f"`shardwise replay {tmp_path / 'step_1'}` runs it again" in err


def test_few_are_kept_and_none_is_overwritten(model_folder, tmp_path):
    worker = build(model_folder)
    weight = parameters_of(worker)[f"{DOWN}.weight"].data.to_local()
    healthy = float(weight[0, 0])
    for _ in range(5):
        for value in (math.nan, healthy):
            weight[0, 0] = value
            train(worker, tmp_path / "step_4")
            healthy = float(weight[0, 0]) if math.isfinite(float(weight[0, 0])) else healthy
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_4", "step_4.2", "step_4.3"]
    assert [Bundle.read(str(tmp_path / name)).step.number for name in ("step_4", "step_4.2", "step_4.3")] == [1, 3, 5]


def test_a_bundle_that_cannot_be_written_ends_no_run(model_folder, tmp_path, capsys):
    (tmp_path / "nonfinite").write_text("a file where the folder should be")
    assert train(poisoned(build(model_folder)), tmp_path / "nonfinite" / "step_1")["train/nonfinite_fraction"] == 1.0
    err = capsys.readouterr().err
    assert "was skipped: the gradient norm was nan; it could not be kept: " in err
    assert str(tmp_path / "nonfinite") in err


def test_a_base_that_cannot_be_read_ends_no_run(model_folder, tmp_path, capsys):
    base = shutil.copytree(model_folder, tmp_path / "base")
    worker = build(base, engine=EngineConfig(lora=LoraConfig()))
    (base / "model.safetensors").unlink()
    (base / "model.safetensors").symlink_to("nowhere")
    poisoned(worker, next(name for name in parameters_of(worker) if "lora_B" in name))
    assert train(worker, tmp_path / "step_1")["train/nonfinite_fraction"] == 1.0
    assert f"it could not be kept: base.path: {base / 'model.safetensors'} cannot be read (" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_an_error_of_the_pass_that_looks_for_the_module_ends_the_run(model_folder, tmp_path, monkeypatch):
    """Going on after it would add broken-off gradients, of which FSDP holds some, to those of the next step."""
    worker = poisoned(build(model_folder))

    def fails(*arguments, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(worker.engines["policy"].engine, "diagnose", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(worker, tmp_path / "step_1")
    assert not (tmp_path / "step_1").exists()


def test_a_wrong_path_and_a_damaged_bundle_are_named(model_folder, tmp_path):
    path = tmp_path / "step_1"
    train(poisoned(build(model_folder)), path)
    with pytest.raises(ConfigError, match=r"nowhere is no bundle: it has no bundle\.json; name a folder in nonfinite/"):
        Bundle.read(str(tmp_path / "nowhere"))
    file = path / "rank_0.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    advice = "copy the bundle again, or replay that of another step$"
    with pytest.raises(
        ModelError, match=rf"rank_0\.safetensors is damaged: \S+ is not what was written \(xxh3\); {advice}"
    ):
        Bundle.read(str(path))
    file.unlink()
    with pytest.raises(ModelError, match=rf"rank_0\.safetensors is missing; {advice}"):
        Bundle.read(str(path))


def test_a_bundle_of_another_version_is_refused(model_folder, tmp_path):
    path = tmp_path / "step_1"
    train(poisoned(build(model_folder)), path)
    content = read_sealed_json(path / BUNDLE)
    write_sealed_json(path / BUNDLE, content | {"format": 2})
    (path / "manifest.json").unlink()
    write_manifest(path, [hash_share(path)], step=1)
    with pytest.raises(
        ModelError, match=r"bundle\.json has format 2, and this version of Shardwise reads 1; replay it"
    ):
        Bundle.read(str(path))


def test_what_is_read_is_what_was_packed(model_folder, tmp_path):
    path = tmp_path / "step_1"
    train(poisoned(build(model_folder)), path)
    [packed] = pack(samples(), num_shards=1, max_tokens=20).shards
    read = Bundle.read(str(path)).micro_batches()
    assert [(batch.rank, batch.index) for batch in read] == [(0, 0), (0, 1)]
    for batch, expected in zip(read, packed, strict=True):
        for part in fields(expected):
            value, wanted = (getattr(one, part.name) for one in (batch.tokens, expected))
            same = torch.equal(value, wanted) if isinstance(wanted, torch.Tensor) else value == wanted
            assert same, part.name

"""The example that reads digits, as its first lines say."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUM_ROWS = 1500
NO_EXTRAS = ["trainer.tensorboard=false", "trainer.validate_every_steps=0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    command = [sys.executable, "examples/vl_digits/prepare.py", str(folder), str(NUM_ROWS)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def keys(folder, out, *more):
    return [
        *["shardwise", "sft", "-c", "examples/vl_digits_sft.yaml", f"model.path={folder / 'model'}"],
        *[f"data.train_files={folder / 'train.jsonl'}", f"data.validation_files={folder / 'validation.jsonl'}"],
        *[f"trainer.output_dir={out}", *NO_EXTRAS, *more],
    ]


def accuracy(model: Path, rows: Path) -> float:
    spec = importlib.util.spec_from_file_location("evaluate_digits", ROOT / "examples" / "vl_digits" / "evaluate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.accuracy(model, rows)


@pytest.mark.slow
def test_two_ranks_learn_from_pictures_and_write_what_transformers_reads(shell, folder, tmp_path, metrics_of):
    lines = (folder / "validation.jsonl").read_text().splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(lines[:6]))
    small = ["trainer.total_steps=3", "trainer.batch_size=8", f"data.validation_files={folder / 'few.jsonl'}"]
    run = shell(*keys(folder, tmp_path, *small, "--nproc", "2"), timeout=240)
    assert run.code == 0, run.err
    steps = metrics_of(tmp_path)
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]
    assert steps[-1]["val/loss"] > 0
    assert 0 <= accuracy(tmp_path / "checkpoints" / "step_3" / "hf", folder / "few.jsonl") <= 1


@pytest.mark.full
def test_a_picture_that_breaks_off_ends_the_run_by_its_row_and_file(shell, folder, tmp_path):
    picture = (folder / "pictures" / "train_0_0.png").read_bytes()
    (folder / "pictures" / "half.png").write_bytes(picture[: len(picture) // 2])
    row = json.loads((folder / "train.jsonl").read_text().splitlines()[0])
    row["images"][-1] = "pictures/half.png"
    (folder / "broken.jsonl").write_text(json.dumps(row) + "\n")
    run = shell(*keys(folder, tmp_path / "out", f"data.train_files={folder / 'broken.jsonl'}", "--nproc", "2"))
    assert run.code == 2
    where = f"broken.jsonl line 1: image {len(row['images'])} (pictures/half.png) is damaged"
    assert where in run.err
    assert "Traceback" not in run.err


@pytest.mark.full
def test_reading_digits_is_learned(shell, folder, tmp_path):
    """On fewer rows and steps than in docs/vision.md."""
    validation = folder / "validation.jsonl"
    untrained = accuracy(folder / "model", validation)
    run = shell(*keys(folder, tmp_path / "out", "trainer.total_steps=350", "trainer.learning_rate=2e-3"), timeout=900)
    assert run.code == 0, run.err
    assert accuracy(tmp_path / "out" / "checkpoints" / "step_350" / "hf", validation) > untrained + 0.2
    shutil.rmtree(tmp_path / "out")

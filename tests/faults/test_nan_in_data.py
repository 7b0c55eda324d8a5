"""NaN and infinities in the data that a run reads. What takes a number from a row refuses one that is not finite and
names the row, before a step is made of it: margins of preferences, and scores that a reward function has from its row.
One that is too large for float32 is met in the step. Nothing else of a row is a number: words have to be text, and
images have 8 bits a channel."""

import json
import math

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from safetensors.torch import load_file

from shardwise.config import DataError
from shardwise.data import ImageReader
from shardwise.data.image_processors import GridProcessor
from shardwise.families import GridTower

ROW = 2
"""Which of a file's rows is bad, counted from 0."""
NOT_FINITE = [math.nan, math.inf, -math.inf]
TOO_LARGE = 1e39
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return {"score": extra_info["difficulty"] + ground_truth, "difficulty": extra_info["difficulty"]}
"""


def write(path, rows):
    """As jsonl, in the words that Python writes (NaN, Infinity), or as parquet. Returns the name of the bad row."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"{path.name} line {ROW + 1}"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return f"{path.name} row {ROW}"


def assert_refused(done, run, *parts):
    """One line that names the row, and no step."""
    assert done.code == 2, done.err
    (line,) = done.err.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part in line
    assert not (run / "checkpoints").exists()
    assert not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text()


@pytest.fixture
def train(assets, command, tmp_path):
    """`train("sft", file, *overrides)`"""

    def run(recipe, file, *overrides):
        return command(
            recipe,
            f"model.path={assets.model}",
            f"data.train_files={file}",
            "trainer.tensorboard=false",
            "trainer.total_steps=2",
            f"trainer.output_dir={tmp_path / 'run'}",
            *overrides,
        )

    return run


MARGINS = ["data.margin_column=gap", "data.max_sequence_tokens=64", "trainer.batch_size=4"]


def pairs(margin):
    """Two steps."""
    return [
        {"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": f"{n}", "gap": margin if n == ROW else 1.0}
        for n in range(8)
    ]


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("file", ["rows.jsonl", "rows.parquet"])
def test_a_margin_that_is_not_finite_is_refused_with_its_row(train, tmp_path, file, value):
    row = write(tmp_path / file, pairs(value))
    done = train("reward-model", tmp_path / file, *MARGINS)
    assert_refused(done, tmp_path / "run", f'{row}: column "gap" is a number, expected a finite number')


def test_a_margin_that_is_too_large_for_float32_costs_its_step_and_the_bundle_names_its_row(
    train, command, metrics_of, tmp_path
):
    row = write(tmp_path / "rows.jsonl", pairs(TOO_LARGE))
    done = train("reward-model", tmp_path / "rows.jsonl", *MARGINS)
    assert done.code == 0, done.err
    skipped = [metrics["step"] for metrics in metrics_of(tmp_path / "run") if metrics["train/nonfinite_fraction"]]
    assert len(skipped) == 1
    bundle = tmp_path / "run" / "nonfinite" / f"step_{skipped[0]}"
    assert f"optimizer step {skipped[0]} of reward model was skipped: " in done.err
    assert "the loss has 0 NaN and 1 Inf" in done.err
    again = command("replay", str(bundle))
    assert again.code == 0, again.err
    assert f"  row {row} chosen, ends in " in again.out
    weights = load_file(tmp_path / "run" / "checkpoints" / "step_2" / "hf" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize("file", ["rows.jsonl", "rows.parquet"])
def test_a_nan_in_place_of_words_is_refused_with_its_row(train, tmp_path, file):
    """As pandas fills an empty cell of a table."""
    words = {"rows.jsonl": ["1", "2", math.nan, "4"], "rows.parquet": [math.nan] * 4}[file]
    row = write(tmp_path / file, [{"prompt": "1+1=", "response": response} for response in words])
    row = row.replace(f"row {ROW}", "row 0")  # a column of parquet has one type: every row is bad
    done = train("sft", tmp_path / file, "data.max_sequence_tokens=64", "trainer.batch_size=4")
    assert_refused(done, tmp_path / "run", f'{row}: column "response" is a number, expected a string: NaN')


def judge_rows(train, tmp_path, file, on_failure, *, ground_truth=ROW, difficulty=0.5):
    """A run whose rewards are numbers of its rows, every row in both steps. Returns the bad row's name too."""
    rows = [
        {
            "prompt": f"{n}+1=",
            "reward_model": {"ground_truth": float(ground_truth if n == ROW else n)},
            "extra_info": {"difficulty": difficulty if n == ROW else 0.5},
        }
        for n in range(4)
    ]
    row = write(tmp_path / file, rows)
    (tmp_path / "rules.py").write_text(REWARD)
    done = train(
        "rl",
        tmp_path / file,
        f"reward.functions={tmp_path / 'rules.py'}:score",
        f"reward.on_failure={on_failure}",
        "reward.num_workers=1",
        "data.max_prompt_tokens=40",
        "rollout.num_prompts=4",
        "rollout.group_size=2",
        "rollout.max_response_tokens=4",
    )
    return done, row


@pytest.mark.parametrize(("column", "value"), [("difficulty", math.nan), ("ground_truth", -math.inf)])
@pytest.mark.parametrize("file", ["rows.jsonl", "rows.parquet"])
def test_a_score_that_is_not_finite_because_its_row_is_not_ends_the_run_with_the_row(
    train, tmp_path, file, column, value
):
    done, row = judge_rows(train, tmp_path, file, "abort", **{column: value})
    parts = f"rules.py:score failed for row {row}", f'returned {value} as "score", expected a finite number'
    assert_refused(done, tmp_path / "run", *parts)


def test_a_score_that_is_not_finite_because_its_row_is_not_is_left_out_and_counted_where_the_config_says_so(
    train, tmp_path, metrics_of
):
    done, _ = judge_rows(train, tmp_path, "rows.jsonl", "mask", difficulty=math.nan)
    assert done.code == 0, done.err
    for metrics in metrics_of(tmp_path / "run"):
        assert (metrics["reward/failed"], metrics["train/nonfinite_fraction"]) == (0.25, 0)
        assert metrics["reward/mean"] == (0.5 + 1.5 + 3.5) / 3
    weights = load_file(tmp_path / "run" / "checkpoints" / "step_2" / "hf" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize("on_failure", ["abort", "mask"])
def test_a_score_that_is_too_large_for_float32_ends_the_run_with_its_row(train, tmp_path, on_failure):
    done, row = judge_rows(train, tmp_path, "rows.jsonl", on_failure, ground_truth=TOO_LARGE)
    assert_refused(done, tmp_path / "run", f"advantage=grpo gave nan for row {row}, token ", "(reward 1e+39, ")


def test_an_image_of_floats_is_refused_with_its_row(tmp_path):
    """Of the formats of files only TIFF could hold them; in memory PIL can."""
    from transformers import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024})
    tower = GridTower(merge_size=2, num_values=96)
    reader = ImageReader(GridProcessor(processor, tower))
    image = Image.new("F", (16, 8), math.nan)
    image.save(tmp_path / "nan.tiff")
    for cell in ("nan.tiff", (tmp_path / "nan.tiff").read_bytes()):
        with pytest.raises(DataError, match=r"^rows\.jsonl line 3.* none of JPEG, PNG, WEBP can be read there"):
            reader.open(cell, tmp_path, "rows.jsonl line 3")
    with pytest.raises(DataError, match=r"^rows\.jsonl line 3 has the mode F, more than 8 bits a channel"):
        reader.open(image, tmp_path, "rows.jsonl line 3")

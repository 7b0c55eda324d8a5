"""The example that reads digits, as its first lines say."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

ROOT = Path(__file__).parents[2]
NUM_ROWS = 1500
NO_EXTRAS = ["trainer.tensorboard=false", "trainer.validate_every_steps=0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("digits"), str(NUM_ROWS))


def prepared(folder: Path, *num_rows: str) -> Path:
    command = [sys.executable, "examples/vl_digits/prepare.py", str(folder), *num_rows]
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


@pytest.mark.full
def test_two_ranks_learn_from_pictures_and_write_what_transformers_reads(shell, folder, tmp_path, metrics_of):
    lines = (folder / "validation.jsonl").read_text().splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(lines[:6]))
    small = ["trainer.total_steps=3", "trainer.warmup_steps=2", "trainer.batch_size=8"]
    small.append(f"data.validation_files={folder / 'few.jsonl'}")
    run = shell(*keys(folder, tmp_path, *small, "--nproc", "2"), timeout=240)
    assert run.code == 0, run.err
    steps = metrics_of(tmp_path)
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]
    assert steps[-1]["val/loss"] > 0
    assert accuracy(tmp_path / "checkpoints" / "step_3" / "hf", folder / "few.jsonl") < 0.5, (
        "three steps teach no digits"
    )


@pytest.mark.full
def test_adapters_learn_from_pictures_and_peft_reads_them(command, folder, tmp_path, metrics_of):
    """What is written merged is what peft merges into the model."""
    small = ["trainer.total_steps=3", "trainer.batch_size=8", "data.validation_files=[]", "engine.lora.rank=8"]
    done = command(*keys(folder, tmp_path, *small, "trainer.learning_rate=1e-2", "trainer.warmup_steps=0")[1:])
    assert done.code == 0, done.err
    steps = metrics_of(tmp_path)
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]
    written = tmp_path / "checkpoints" / "step_3"
    base = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    expected = PeftModel.from_pretrained(base, written / "adapter").merge_and_unload().state_dict()
    found = AutoModelForImageTextToText.from_pretrained(written / "hf", dtype=torch.float32).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0, msg=name)
    moved = {name for name, tensor in expected.items() if not torch.equal(tensor, before[name])}
    assert any(".language_model." in name for name in moved)


RIGHT_DIGITS = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(char in ground_truth for char in solution_str) / 5
"""


@pytest.mark.full
def test_rewards_for_answers_to_pictures_rise(command, folder, tmp_path, metrics_of):
    """Every row is asked once, so no picture is known. To answer in digits is enough here; reading itself takes
    minutes: make test-full."""
    (tmp_path / "rules.py").write_text(RIGHT_DIGITS)
    done = command(
        *["rl", "-c", str(ROOT / "examples" / "vl_digits_grpo.yaml"), f"model.path={folder / 'model'}"],
        *[f"data.train_files={folder / 'train.jsonl'}", "data.max_train_rows=256", "data.validation_files=[]"],
        *["rollout.num_prompts=16", "rollout.group_size=8", f"reward.functions={tmp_path / 'rules.py'}:compute_score"],
        *["trainer.total_steps=16", "trainer.learning_rate=3e-3", "trainer.warmup_steps=0", "reward.num_workers=1"],
        *[f"trainer.output_dir={tmp_path / 'run'}", *NO_EXTRAS],
    )
    assert done.code == 0, done.err
    rewards = [row["reward/mean"] for row in metrics_of(tmp_path / "run")]
    assert len(rewards) == 16
    assert sum(rewards[:4]) < 0.1
    assert sum(rewards[-4:]) > 0.3


def preferred(rows: list[dict]) -> list[dict]:
    """The rows with a right and a wrong answer, in which every digit is the next one."""
    wrong = str.maketrans("0123456789", "1234567890")
    return [row | {"chosen": row["answer"], "rejected": row["answer"].translate(wrong)} for row in rows]


def test_the_margin_of_right_answers_to_pictures_rises(command, folder, tmp_path, metrics_of):
    """Who sees no picture cannot prefer each digit to the next, for 0 comes after 9. The rows are learnt by heart, with
    a reference engine beside the policy."""
    rows = preferred([json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()[:32]])
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = command(
        *["preference", "-c", str(ROOT / "examples" / "vl_digits_sft.yaml"), f"model.path={folder / 'model'}"],
        *[f"data.train_files={folder / 'pairs.jsonl'}", "data.validation_files=[]", "trainer.batch_size=32"],
        *["trainer.total_steps=12", "trainer.learning_rate=3e-3", "trainer.warmup_steps=0"],
        *[f"trainer.output_dir={tmp_path / 'run'}", *NO_EXTRAS],
    )
    assert done.code == 0, done.err
    steps = metrics_of(tmp_path / "run")
    assert steps[0]["preference/margin"] == pytest.approx(0, abs=1e-5)
    assert steps[-1]["preference/margin"] > 0.5
    assert steps[-1]["preference/accuracy"] > 0.9


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str)) % 4 + len(solution_str) % 3
"""


def rewarded(job, metrics_of, folder, tmp_path, num_ranks, *overrides):
    """Metrics, completions and the folder of the last checkpoint of a run in whose steps rows have one to three
    pictures."""
    (tmp_path / "rules.py").write_text(REWARD)
    out = tmp_path / f"ranks_{num_ranks}"
    done = job(
        *[num_ranks, "rl", "-c", str(ROOT / "examples/vl_digits_grpo.yaml"), f"model.path={folder / 'model'}"],
        *[f"data.train_files={folder / 'train.jsonl'}", "data.validation_files=[]", "trainer.total_steps=3"],
        *["rollout.num_prompts=6", "rollout.group_size=4", f"reward.functions={tmp_path / 'rules.py'}:compute_score"],
        *["algorithm.kl_coef=0.1", "engine.max_tokens_per_micro_batch=256", f"trainer.output_dir={out}", *NO_EXTRAS],
        *["trainer.learning_rate=3e-3", "trainer.warmup_steps=0", *overrides],
    )
    assert done.code == 0, done.err
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    return metrics_of(out), [sample["completion"] for sample in samples], out / "checkpoints" / "step_3"


def assert_alike(alone, together, *more):
    """Of all steps the metrics, and the completions."""
    names = ("train/loss", "train/grad_norm", "reward/mean", "policy/ref_kl", "policy/approx_kl", *more)
    for expected, found in zip(alone[0], together[0], strict=True):
        assert expected["train/grad_norm"] > 0
        for name in names:
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert together[1] == alone[1]


@pytest.mark.full
def test_an_adapter_learns_from_rewards_for_pictures_alike_on_one_rank_and_two(job, folder, tmp_path, metrics_of):
    """The reference policy is the adapter off; two minibatches. Weights go to the rollout engines with the adapter
    merged."""
    keys = ["engine.lora={rank: 4, target_modules: all-linear}", "algorithm.num_minibatches=2"]
    alone, together = (rewarded(job, metrics_of, folder, tmp_path, n, *keys) for n in (1, 2))
    assert_alike(alone, together)
    expected, found = (load_file(run[2] / "adapter" / "adapter_model.safetensors") for run in (alone, together))
    moved = 0.0
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=2e-5, msg=name)
        moved = max(moved, float(tensor.abs().max())) if "lora_B" in name else moved
    assert moved > 1e-3
    assert any("visual" in name for name in expected)


@pytest.mark.full
def test_a_critic_and_a_reference_see_pictures_alike_on_one_rank_and_two(job, folder, tmp_path, metrics_of):
    """Models of their own beside the policy. The critic learns from pictures too: its tower moves."""
    critic = "critic={optimizer: {learning_rate: 3e-3, adam_eps: 1e-4}}"
    keys = ["algorithm.advantage=gae", critic, "trainer.adam_eps=1e-4"]
    alone, together = (rewarded(job, metrics_of, folder, tmp_path, n, *keys) for n in (1, 2))
    assert_alike(alone, together, "critic/loss", "critic/grad_norm")
    divergence = [row["policy/ref_kl"] for row in alone[0]]
    assert divergence[0] == pytest.approx(0, abs=1e-6), "the reference sees the pictures that the policy sees"
    assert divergence[-1] > 1e-4
    for part in ("hf", "critic/hf"):
        expected, found = (load_file(run[2] / part / "model.safetensors") for run in (alone, together))
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-4, msg=name)
    start = load_file(folder / "model" / "model.safetensors")
    moved = [name for name, tensor in expected.items() if "visual" in name and not torch.equal(tensor, start[name])]
    assert moved


def half(picture: Path) -> None:
    picture.write_bytes(picture.read_bytes()[: picture.stat().st_size // 2])


BAD_PICTURES = {
    "missing": (Path.unlink, "there is no file"),
    "no image": (lambda picture: picture.write_text("a digit"), "is damaged, or no image: none of JPEG, PNG, WEBP"),
    "half": (half, "is damaged: .*; replace it or remove the row"),
    "huge": (lambda picture: Image.new("1", (10000, 9000)).save(picture), "has 10000 x 9000 pixels, .* scale it down"),
    "mode": (lambda picture: Image.new("I;16", (32, 32)).save(picture), "has the mode I;16, .* save it with 8 bits"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        *(("sft", kind) for kind in BAD_PICTURES),
        *(
            pytest.param(recipe, kind, marks=() if kind == "half" else pytest.mark.full)
            for recipe in ("rl", "preference")
            for kind in BAD_PICTURES
        ),
    ],
)
def test_a_bad_picture_ends_the_run_in_one_line_without_a_step(command, folder, tmp_path, recipe, kind):
    spoil, reason = BAD_PICTURES[kind]
    rows = two_rows(folder, tmp_path)
    spoil(tmp_path / rows[1]["images"][0])
    assert_refused(command, folder, tmp_path, recipe, rows, rf"image 1 \({rows[1]['images'][0]}\):? {reason}")


@pytest.mark.parametrize("recipe", ["sft", "rl", pytest.param("reward-model", marks=pytest.mark.full)])
def test_more_places_than_pictures_end_the_run_in_one_line_without_a_step(command, folder, tmp_path, recipe):
    rows = two_rows(folder, tmp_path)
    num_places = len(rows[1]["images"])
    del rows[1]["images"][-1]
    reason = rf'column "images" has {num_places - 1} images, and the messages have places for {num_places}: '
    assert_refused(command, folder, tmp_path, recipe, rows, reason)


def two_rows(folder: Path, target: Path) -> list[dict]:
    """Their pictures are in `target`."""
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()[:2]]
    (target / "pictures").mkdir()
    for path in (path for row in rows for path in row["images"]):
        shutil.copy(folder / path, target / path)
    return rows


def assert_refused(command, folder, tmp_path, recipe, rows, reason):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in preferred(rows)))
    small = ["rollout.num_prompts=2", "rollout.group_size=2"] if recipe == "rl" else ["trainer.batch_size=2"]
    done = command(
        *[recipe, "-c", str(ROOT / f"examples/vl_digits_{'grpo' if recipe == 'rl' else 'sft'}.yaml")],
        *[f"model.path={folder / 'model'}", f"data.train_files={tmp_path / 'rows.jsonl'}", "data.validation_files=[]"],
        *[f"trainer.output_dir={tmp_path / 'run'}", *small, *NO_EXTRAS],
    )
    assert done.code == 2
    assert re.fullmatch(rf"error: rows.jsonl line 2: {reason}.*\n", done.err), done.err
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert not metrics.exists() or metrics.read_text() == ""


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
def test_reading_digits_is_learned_from_answers_and_better_from_rewards(shell, tmp_path):
    """The example as it is, but for half of GRPO's steps: ten minutes on two cores."""
    folder = prepared(tmp_path / "digits")
    validation, taught = folder / "validation.jsonl", tmp_path / "sft" / "checkpoints" / "step_400" / "hf"
    run = shell(*keys(folder, tmp_path / "sft"), timeout=1800)
    assert run.code == 0, run.err
    run = shell(
        *["shardwise", "rl", "-c", "examples/vl_digits_grpo.yaml", f"model.path={taught}", "data.validation_files=[]"],
        *[f"data.train_files={folder / 'train.jsonl'}", f"trainer.output_dir={tmp_path / 'grpo'}", *NO_EXTRAS],
        "trainer.total_steps=80",
        timeout=3600,
    )
    assert run.code == 0, run.err
    rewarded = tmp_path / "grpo" / "checkpoints" / "step_80" / "hf"
    untrained, after_answers, after_rewards = (accuracy(m, validation) for m in (folder / "model", taught, rewarded))
    assert after_answers > untrained + 0.2
    assert after_rewards > after_answers + 0.05
    for path in (tmp_path / "sft", tmp_path / "grpo"):
        shutil.rmtree(path)

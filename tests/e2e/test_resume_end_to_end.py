"""The same command again resumes from the newest checkpoint, bitwise as if it had never stopped."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.engine.files.state_files import StateIndex

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS, SAVED = 6, 2
LOGS = ("metrics.jsonl", "samples.jsonl")

COMMON = [f"trainer.total_steps={STEPS}", f"trainer.save_every_steps={SAVED}", "trainer.tensorboard=false"]


def rows_options(assets, output_dir) -> list[str]:
    """20 rows in batches of 8: step 3, the first after the checkpoint, begins in the middle of an epoch and ends it."""
    return [
        f"model.path={assets.model}",
        f"data.train_files={assets.sft}",
        f"data.validation_files={assets.sft.with_name('sft_validation.jsonl')}",
        "data.max_train_rows=20",
        "data.max_validation_rows=6",
        "data.max_sequence_tokens=64",
        "engine.max_tokens_per_micro_batch=96",
        "trainer.batch_size=8",
        "trainer.learning_rate=5e-3",
        "trainer.lr_schedule=cosine",
        "trainer.validate_every_steps=3",
        *COMMON,
        f"trainer.output_dir={output_dir}",
    ]


def rl_options(assets, output_dir) -> list[str]:
    return [
        f"model.path={assets.model}",
        f"data.train_files={assets.parquet}",
        "data.max_prompt_tokens=40",
        "engine.max_tokens_per_micro_batch=128",
        "rollout.num_prompts=4",
        "rollout.group_size=4",
        "rollout.max_response_tokens=8",
        f"reward.functions={assets.reward}",
        "trainer.learning_rate=3e-3",
        *COMMON,
        f"trainer.output_dir={output_dir}",
    ]


PPO = [
    "critic={critic_warmup_steps: 1, optimizer: {learning_rate: 0.01}}",
    "algorithm.advantage=gae",
    "algorithm.num_minibatches=2",
    "algorithm.num_epochs=2",
    "algorithm.kl_coef=0.1",
    "algorithm.kl_controller={name: adaptive, target: 0.01, horizon: 100}",
    "data.mixture=[{weights: {sums: 3, products: 1}}, {from_step: 4, weights: {sums: 1, products: 2}}]",
    "data.difficulty={min_pass_rate: 0.1, max_pass_rate: 0.9}",
]
GRPO_LORA = ["engine.lora={rank: 4}", "algorithm.kl_coef=0.1", "engine.param_dtype=bfloat16"]


def stop_after(run: Path, step: int, target: Path) -> Path:
    """What a process that was killed after `step`, and a bit further, leaves: logs of later steps, half a line at their
    end, half a checkpoint."""
    shutil.copytree(run, target)
    for folder in (target / "checkpoints").glob("step_*"):
        if int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)
    for name in (*LOGS, "performance.jsonl"):
        if (target / name).exists():
            with (target / name).open("a") as file:
                file.write('{"step": 7, "train/lo')
    half = target / "checkpoints" / f".step_{step + SAVED}.tmp" / "hf"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"cut")
    return target


def parts_in(checkpoint: Path) -> dict:
    """Position in the data, pass rates, KL coefficient and what else the recipe keeps from step to step."""
    return json.loads((checkpoint / "state" / "run.json").read_text())["content"]["parts"]


def assert_same_run(found: Path, expected: Path, *, subfolders=("hf",)) -> None:
    for name in LOGS:
        if (expected / name).exists():
            assert (found / name).read_text() == (expected / name).read_text()
    steps = [json.loads(line)["step"] for line in (found / "performance.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    last = f"checkpoints/step_{STEPS}"
    for subfolder in subfolders:
        files = sorted((expected / last / subfolder).glob("*.safetensors"))
        assert files
        for file in [*files, *(expected / last / subfolder).glob("index.json")]:
            assert (found / file.relative_to(expected)).read_bytes() == file.read_bytes(), file.name
    assert parts_in(found / last) == parts_in(expected / last)
    assert {path.name for path in (found / "checkpoints").iterdir()} == {"step_2", "step_4", "step_6", "latest"}


@pytest.fixture(scope="module")
def sft_run(assets, job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft") / "run"
    done = job(2, "sft", *rows_options(assets, folder), timeout=240)
    assert done.code == 0, done.err
    return folder


@pytest.fixture(scope="module")
def ppo_run(assets, job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo") / "run"
    done = job(2, "rl", *rl_options(assets, folder), *PPO, timeout=240)
    assert done.code == 0, done.err
    return folder


def test_f25_trap_14_sft_with_packing_goes_on_in_the_middle_of_an_epoch(sft_run, assets, job, tmp_path):
    run = stop_after(sft_run, 2, tmp_path / "run")
    done = job(2, "sft", *rows_options(assets, run), timeout=240)
    assert done.code == 0, done.err
    assert f"sft: resumes from {run / 'checkpoints' / 'step_2'}" in done.out
    assert_same_run(run, sft_run, subfolders=("hf", "state/policy"))


def test_f25_trap_14_sft_goes_on_where_an_epoch_ends(assets, command, tmp_path):
    """16 rows in batches of 8: the checkpoint of step 2 is after the last row of the first epoch."""
    whole, rows = tmp_path / "whole", "data.max_train_rows=16"
    done = command("sft", *rows_options(assets, whole), rows)
    assert done.code == 0, done.err
    run = stop_after(whole, 2, tmp_path / "run")
    done = command("sft", *rows_options(assets, run), rows)
    assert f"sft: resumes from {run / 'checkpoints' / 'step_2'}" in done.out
    assert_same_run(run, whole, subfolders=("hf", "state/policy"))


def test_f25_trap_14_ppo_goes_on_with_its_critic_controller_mixture_and_difficulty(ppo_run, assets, job, tmp_path):
    """The kl coefficient has moved, a row sits out, and stage 2 of the mixture begins after the checkpoint."""
    state = parts_in(ppo_run / "checkpoints" / "step_2")
    assert state["learner"]["kl_coef"] != 0.1
    assert state["pipeline"]["prompts"]["pass_rates"]
    assert state["pipeline"]["prompts"]["taken"] == {"sums": 6, "products": 2}
    run = stop_after(ppo_run, 2, tmp_path / "run")
    done = job(2, "rl", *rl_options(assets, run), *PPO, timeout=240)
    assert done.code == 0, done.err
    assert_same_run(run, ppo_run, subfolders=("hf", "critic/hf", "state/policy", "state/critic"))


def test_f24_trap_15_another_layout_goes_on_with_the_same_losses(sft_run, assets, command, metrics_of, tmp_path):
    """Two ranks stopped, one goes on, with activation checkpointing and other micro-batches."""
    run = stop_after(sft_run, 2, tmp_path / "run")
    layout = ["engine.activation_checkpointing=full", "engine.max_tokens_per_micro_batch=64"]
    done = command("sft", *rows_options(assets, run), *layout)
    assert done.code == 0, done.err
    for one, two in zip(metrics_of(run), metrics_of(sft_run), strict=True):
        assert one["train/loss"] == pytest.approx(two["train/loss"], abs=1e-5)
        assert one["train/learning_rate"] == two["train/learning_rate"]


LAYOUTS = {
    "1 to 2": (1, 2, []),
    "2 to 4": (2, 4, []),
    "4 to 1": (4, 1, []),
    "4 to replicas of 2": (4, 4, ["engine.fsdp_size=2"]),
    "2 to ulysses": (2, 2, ["engine.ulysses_size=2"]),
    "1 to ulysses": (1, 2, ["engine.ulysses_size=2"]),
}
SKIPPED = ["trainer.faults=[step=3 phase=backward action=nan]", "trainer.save_every_steps=1"]
"""Step 3 has a loss that is NaN, so what is saved after it is what it began with."""


def state_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the policy's training state, whole."""
    folder, found = checkpoint / "state" / "policy", {}
    index = StateIndex.read(folder)
    files = {name: load_file(folder / name) for name in index.files}
    for name, spec in index.specs.items():
        found[name] = torch.full(spec.shape, torch.nan, dtype=spec.dtype)
        for part in index.cuts[name].parts:
            rows = slice(part.start, part.stop) if spec.shape else ...
            found[name][rows] = files[part.file][name]
    return found


@pytest.fixture(scope="module")
def sft_run_on(sft_run, assets, job, tmp_path_factory):
    """`sft_run_on(4)`: as `sft_run`, on so many ranks."""
    runs = {2: sft_run}

    def run_on(nproc: int) -> Path:
        if nproc not in runs:
            runs[nproc] = tmp_path_factory.mktemp("sft") / "run"
            done = job(nproc, "sft", *rows_options(assets, runs[nproc]), timeout=240)
            assert done.code == 0, done.err
        return runs[nproc]

    return run_on


@pytest.mark.full
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_f24_trap_15_the_command_goes_on_on_another_layout_with_the_same_state(
    sft_run_on, assets, job, metrics_of, tmp_path, name
):
    before, after, layout = LAYOUTS[name]
    whole = sft_run_on(before)
    skipped = stop_after(whole, 2, tmp_path / "skipped")
    done = job(after, "sft", *rows_options(assets, skipped), *layout, *SKIPPED, timeout=240)
    assert done.code == 0, done.err
    assert metrics_of(skipped)[2]["train/nonfinite_fraction"] == 1
    saved, again = (skipped / "checkpoints" / f"step_{step}" for step in (2, 3))
    found, expected = state_in(again), state_in(saved)
    assert found.keys() == expected.keys()
    assert {name.partition("/")[0] for name in found} == {"master", "exp_avg", "exp_avg_sq", "step"}
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert (again / "hf" / "model.safetensors").read_bytes() == (saved / "hf" / "model.safetensors").read_bytes()

    run = stop_after(whole, 2, tmp_path / "run")
    done = job(after, "sft", *rows_options(assets, run), *layout, timeout=240)
    assert done.code == 0, done.err
    rows, others = metrics_of(run), metrics_of(whole)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row, other in zip(rows, others, strict=True):
        assert row["train/loss"] == pytest.approx(other["train/loss"], abs=1e-5)
        assert row.get("val/loss") == pytest.approx(other.get("val/loss"), abs=1e-5)


def other_recipes(assets) -> dict[str, tuple[str, list[str]]]:
    pairs = assets.sft.with_name("pairs.jsonl")
    if not pairs.exists():
        rows = [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": str(n), "response": str(n), "label": n % 2}
                for n in range(20)]  # fmt: skip
        pairs.write_text("".join(json.dumps(row | {"label": bool(row["label"])}) + "\n" for row in rows))
    data = [f"data.train_files={pairs}", "data.validation_files=[]", "data.max_sequence_tokens=48"]
    return {
        "rl": ("rl", GRPO_LORA),
        "kto": ("preference", [*data, "loss=kto"]),
        "dpo before training": ("preference", [*data, "loss=dpo", "reference_logprobs=before_training"]),
        "reward model": ("reward-model", data),
        "distill": ("distill", [f"teacher.model.path={assets.model}"]),
        "lora sft": ("sft", ["engine.lora={rank: 4, dropout: 0.2}"]),
        "on-policy distillation": (
            "rl",
            ["algorithm.advantage=distill", f"teachers=[{{model: {{path: {assets.model}}}}}]"],
        ),
    }


NAMES = ("rl", "kto", "dpo before training", "reward model", "distill", "lora sft")


@pytest.mark.parametrize("name", [*NAMES, pytest.param("on-policy distillation", marks=pytest.mark.full)])
def test_f25_trap_14_every_recipe_goes_on_bitwise(assets, command, tmp_path, name):
    recipe, more = other_recipes(assets)[name]
    options = rl_options if recipe == "rl" else rows_options
    done = command(recipe, *options(assets, tmp_path / "whole"), *more)
    assert done.code == 0, done.err
    run = stop_after(tmp_path / "whole", 4, tmp_path / "run")
    done = command(recipe, *options(assets, run), *more)
    assert done.code == 0, done.err
    assert_same_run(run, tmp_path / "whole")


CHANGES = {
    "learning rate": (
        ["trainer.learning_rate=1e-3"],
        "trainer.learning_rate was 0.005 and is 0.001; give another trainer.output_dir, set it back, allow it with "
        "trainer.resume_allow=[trainer.learning_rate], or start a new run with trainer.resume=never",
    ),
    "seed": (["trainer.seed=1"], "trainer.seed was 0 and is 1"),
    "rows": (["data.max_train_rows=16"], "data.max_train_rows was 20 and is 16"),
    "length": (["trainer.total_steps=8"], "trainer.total_steps was 6 and is 8"),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_f26_a_changed_config_is_one_line_before_anything_starts(sft_run, assets, command, name):
    """A cosine schedule depends on the number of steps. What is there stays as it was."""
    before = {path: path.stat().st_mtime_ns for path in sft_run.rglob("*")}
    options, expected = CHANGES[name]
    done = command("sft", *rows_options(assets, sft_run), *options)
    assert done.code == 2
    assert done.err.startswith(
        f"error: {sft_run / 'checkpoints' / 'step_6'} was trained with another config: {expected}"
    )
    assert done.err.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in sft_run.rglob("*")} == before


def test_an_allowed_change_takes_effect_from_the_checkpoint_on(sft_run, assets, command, metrics_of, tmp_path):
    run = stop_after(sft_run, 2, tmp_path / "run")
    allowed = ["trainer.learning_rate=1e-3", "trainer.resume_allow=[trainer.learning_rate]"]
    done = command("sft", *rows_options(assets, run), *allowed)
    assert done.code == 0, done.err
    rates = [row["train/learning_rate"] for row in metrics_of(run)]
    whole = [row["train/learning_rate"] for row in metrics_of(sft_run)]
    assert rates[:2] == whole[:2]
    assert rates[2:] == pytest.approx([rate / 5 for rate in whole[2:]])


@pytest.mark.parametrize("recipe", ["sft", pytest.param("rl", marks=pytest.mark.full)])
def test_other_rows_are_gone_on_with_as_the_error_offers_it(request, assets, command, metrics_of, tmp_path, recipe):
    """Of PPO with a mixture and pass rates too. From then on the run has them, and no offer is needed any more."""
    name, options, more = ("sft_run", rows_options, []) if recipe == "sft" else ("ppo_run", rl_options, PPO)
    whole = request.getfixturevalue(name)
    run = stop_after(whole, 2, tmp_path / "run")
    arguments = [recipe, *options(assets, run), *more, "data.max_train_rows=14"]
    done = command(*arguments)
    assert done.code == 2
    offer = re.search(r"trainer\.resume_allow=\[[^]]+\]", done.err)[0]
    assert offer == "trainer.resume_allow=[data.max_train_rows]"
    done = command(*arguments, "trainer.total_steps=4", offer.replace("]", ", trainer.total_steps]"))
    assert done.code == 0, done.err
    assert done.err.count("training rows, now there are") == done.err.count("warning: ") == 1
    assert metrics_of(run)[:2] == metrics_of(whole)[:2]
    assert [row["data/num_rows"] for row in metrics_of(run)][2:] == [14, 14]
    parts = parts_in(run / "checkpoints" / "step_4")
    count = parts["rows"]["num_rows"] if recipe == "sft" else sum(parts["pipeline"]["prompts"]["num_rows"].values())
    assert count == 14
    done = command(*arguments, "trainer.resume_allow=[trainer.total_steps]")
    assert done.code == 0, done.err
    assert "warning: " not in done.err
    assert [row["step"] for row in metrics_of(run)] == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def lora_run(assets, job, tmp_path_factory):
    run = tmp_path_factory.mktemp("lora") / "run"
    done = job(2, "sft", *rows_options(assets, run), "engine.lora={rank: 2}", timeout=240)
    assert done.code == 0, done.err
    return run


STATE_CHANGES = {
    "muon": (["trainer.optimizer=muon"], "trainer.optimizer"),
    "bfloat16 masters": (["engine.param_dtype=bfloat16", "engine.master_dtype=bfloat16"], "engine"),
    "float16": (["engine.param_dtype=float16"], "engine"),
    "lora": (["engine.lora={rank: 2}"], "engine"),
    "rank": (["engine.lora={rank: 4}"], "engine"),
    "frozen": (["engine.freeze_module_prefix=model.layers.0"], "engine"),
}


IN_DEFAULT = ("muon", "lora", "rank")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_DEFAULT else pytest.mark.full) for name in STATE_CHANGES]
)
def test_f26_a_change_that_no_state_survives_is_refused_with_what_works(request, assets, command, tmp_path, name):
    """Allowed all the same, it is refused by the engine, with the same ways out; the weights can be resumed from."""
    change, allowed = STATE_CHANGES[name]
    run = stop_after(request.getfixturevalue("lora_run" if name == "rank" else "sft_run"), 2, tmp_path / "run")
    options, folder = [*rows_options(assets, run), *change], run / "checkpoints" / "step_2"
    done = command("sft", *options)
    assert done.code == 2
    assert done.err.startswith(f"error: {folder} was trained with another config:")
    assert "trainer.resume_allow" not in done.err
    assert f"begin a run from its weights (model.path={folder / 'hf'} with another trainer.output_dir)" in done.err
    done = command("sft", *options, f"trainer.resume_allow=[{allowed}]")
    assert done.code == 2
    assert done.err.splitlines()[-1].endswith(
        "or begin without that state: trainer.resume=never, or model.path=PATH of the hf/ beside it with another "
        "trainer.output_dir"
    )
    anew = [f"model.path={folder / 'hf'}", f"trainer.output_dir={tmp_path / 'anew'}", "trainer.total_steps=1"]
    done = command("sft", *options, *anew)
    assert done.code == 0, done.err


def test_a_finished_run_says_so_and_changes_nothing(sft_run, assets, command):
    before = {path: path.read_bytes() for path in sft_run.rglob("*") if path.is_file()}
    done = command("sft", *rows_options(assets, sft_run))
    assert done.code == 0, done.err
    assert (
        f"sft: nothing to do: {sft_run / 'checkpoints' / 'step_6'} has done 6 steps, and the run is of 6; a larger "
        "trainer.total_steps continues it, trainer.resume=never starts anew and moves it aside\n"
    ) in done.out
    assert {path: path.read_bytes() for path in sft_run.rglob("*") if path.is_file()} == before


def test_a_run_with_a_constant_rate_goes_on_to_more_steps(assets, command, metrics_of, tmp_path):
    constant = ["trainer.lr_schedule=constant"]
    done = command("sft", *rows_options(assets, tmp_path / "run"), *constant, "trainer.total_steps=2")
    assert done.code == 0, done.err
    done = command("sft", *rows_options(assets, tmp_path / "run"), *constant)
    assert done.code == 0, done.err
    done = command("sft", *rows_options(assets, tmp_path / "whole"), *constant)
    assert done.code == 0, done.err
    validated_at_its_end = [row for row in metrics_of(tmp_path / "run") if "val/loss" in row and row["step"] == 2]
    assert len(validated_at_its_end) == 1
    found, expected = ([row for row in metrics_of(tmp_path / n) if row["step"] != 2] for n in ("run", "whole"))
    assert found == expected


def test_never_starts_anew_and_moves_the_earlier_run_aside(sft_run, assets, command, metrics_of, tmp_path):
    run = stop_after(sft_run, 2, tmp_path / "run")
    done = command("sft", *rows_options(assets, run), "trainer.resume=never", "trainer.total_steps=1")
    assert done.code == 0, done.err
    assert [row["step"] for row in metrics_of(run)] == [1]
    assert (run / "metrics.jsonl.1").read_bytes().startswith((sft_run / "metrics.jsonl").read_bytes())
    assert (run / "checkpoints.1" / "step_2" / "manifest.json").is_file()


def test_a_named_checkpoint_is_gone_on_from_in_a_folder_of_its_own(sft_run, assets, command, metrics_of, tmp_path):
    """An older one, without the newer one being touched."""
    before = {path: path.read_bytes() for path in sft_run.rglob("*") if path.is_file()}
    source = sft_run / "checkpoints" / "step_4"
    done = command("sft", *rows_options(assets, tmp_path / "other"), f"trainer.resume={source}")
    assert done.code == 0, done.err
    assert [row["step"] for row in metrics_of(tmp_path / "other")] == [5, 6]
    assert {path: path.read_bytes() for path in sft_run.rglob("*") if path.is_file()} == before
    for one, two in zip(metrics_of(tmp_path / "other"), metrics_of(sft_run)[4:], strict=True):
        assert one["train/loss"] == pytest.approx(two["train/loss"], abs=1e-5)


def test_going_back_to_an_older_checkpoint_moves_the_newer_ones_aside(sft_run, assets, command, tmp_path):
    run = shutil.copytree(sft_run, tmp_path / "run")
    done = command("sft", *rows_options(assets, run), f"trainer.resume={run / 'checkpoints' / 'step_2'}")
    assert done.code == 0, done.err
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        *("step_2", "step_4", "step_6", "step_4.1", "step_6.1", "latest"),
    }


def test_a_path_without_a_state_is_named(assets, command, tmp_path):
    done = command("sft", *rows_options(assets, tmp_path / "run"), f"trainer.resume={tmp_path}")
    assert done.code == 2
    assert f"trainer.resume={tmp_path} is neither a checkpoint with a training state" in done.err


def test_a_run_of_another_recipe_is_named(sft_run, assets, command):
    done = command("rl", *rl_options(assets, sft_run))
    assert done.code == 2
    assert "is of a run of another recipe (SFT, this is RL)" in done.err


def test_a_damaged_file_of_a_checkpoint_is_named_and_nothing_starts(sft_run, assets, command, tmp_path):
    run = stop_after(sft_run, 2, tmp_path / "run")
    for name in ("hf/model.safetensors", "state/policy/rank_1.safetensors", "state/policy/index.json"):
        path = run / "checkpoints" / "step_2" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        done = command("sft", *rows_options(assets, run))
        assert done.code == 2
        assert f"error: {path} is damaged: " in done.err
        path.write_bytes(whole)
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()[:-1]] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_a_damaged_checkpoint_costs_the_steps_after_the_one_before_and_nothing_else(sft_run, assets, job, tmp_path):
    """The newest one has a flipped bit; the run ends with the bits of one that never met it."""
    run = stop_after(sft_run, 4, tmp_path / "run")
    damaged = run / "checkpoints" / "step_4" / "state" / "policy" / "rank_1.safetensors"
    whole = damaged.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    damaged.write_bytes(flipped)
    done = job(2, "sft", *rows_options(assets, run), timeout=240)
    assert done.code == 0, done.err
    assert f"{damaged} is damaged: " in done.err
    assert "that checkpoint is passed over, and kept with a number behind its name" in done.err
    assert f"sft: resumes from {run / 'checkpoints' / 'step_2'}" in done.out
    aside = run / "checkpoints" / "step_4.1"
    assert (aside / "state" / "policy" / "rank_1.safetensors").read_bytes() == flipped
    shutil.rmtree(aside)
    assert_same_run(run, sft_run, subfolders=("hf", "state/policy"))


def test_checkpoints_without_a_state_are_smaller_and_not_resumed(assets, command, metrics_of, tmp_path):
    options = [*rows_options(assets, tmp_path / "run"), "trainer.save_state=false", "trainer.total_steps=1"]
    for _ in range(2):
        done = command("sft", *options)
        assert done.code == 0, done.err
    assert {path.name for path in (tmp_path / "run/checkpoints/step_1").iterdir()} == {"hf", "manifest.json"}
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1]
    assert (tmp_path / "run" / "metrics.jsonl.1").exists()


@pytest.mark.full
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_f25_a_run_that_is_killed_in_any_step_ends_as_one_that_was_not(ppo_run, assets, job, tmp_path, step):
    """A rank dies between the minibatches of the step; in the first two steps there is no checkpoint yet."""
    run, arguments = tmp_path / "run", ["rl", *rl_options(assets, tmp_path / "run"), *PPO]
    done = job(2, *arguments, f"trainer.faults=[rank={step % 2} step={step} phase=optim nth=2 action=kill]")
    assert done.code == -signal.SIGKILL, done.err
    saved = {int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*")}
    assert saved <= {kept for kept in range(SAVED, STEPS, SAVED) if kept < step}
    done = job(2, *arguments)
    assert done.code == 0, done.err
    assert ("resumes from" in done.out) == bool(saved)
    assert_same_run(run, ppo_run, subfolders=("hf", "critic/hf", "state/policy", "state/critic"))


@pytest.mark.full
def test_a_killed_run_goes_on(ppo_run, assets, job, marked, tmp_path):
    """SIGKILL to every process once the first checkpoint is there, wherever the run is then."""
    run, mark = tmp_path / "run", f"killed-{tmp_path}"
    arguments = [sys.executable, "-m", "shardwise", "rl", "--nproc", "2", *rl_options(assets, run), *PPO]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "SHARDWISE_TEST_MARK": mark}
    launcher = subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while not (run / "checkpoints" / "step_2").is_dir() and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)
    launcher.wait()
    assert not (run / "checkpoints" / "step_6").is_dir()
    done = job(2, "rl", *rl_options(assets, run), *PPO, timeout=240)
    assert done.code == 0, done.err
    assert_same_run(run, ppo_run, subfolders=("hf", "critic/hf"))


def test_a_checkpoint_is_what_its_manifest_says(sft_run):
    checkpoint = sft_run / "checkpoints" / "step_2"
    manifest = json.loads((checkpoint / "manifest.json").read_text())["content"]
    assert (manifest["step"], manifest["num_ranks"]) == (2, 2)
    files = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    shards = {f"state/policy/rank_{rank}.safetensors" for rank in (0, 1)}
    assert set(manifest["files"]) == files - shards - {"manifest.json"}
    names = {name for shard in shards for name in load_file(checkpoint / shard)}
    assert {name.partition("/")[0] for name in names} == {"master", "exp_avg", "exp_avg_sq", "step"}
    weights = load_file(checkpoint / "hf" / "model.safetensors")
    listed = manifest["files"]["hf/model.safetensors"]["tensors"]
    assert listed == {name: f"float32 {list(tensor.shape)}" for name, tensor in weights.items()}
    index = json.loads((checkpoint / "state" / "policy" / "index.json").read_text())["content"]["tensors"]
    masters = {name: index[f"master/{name}"] for name in weights}
    assert {name: ("F32", list(weights[name].shape)) for name in weights} == {
        name: (tree["dtype"], tree["shape"]) for name, tree in masters.items()
    }

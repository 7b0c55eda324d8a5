"""Ranks that only sample, beside or ahead of those that train."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SPLIT, AHEAD = ["rollout.placement=split"], ["rollout.placement=split", "rollout.max_staleness=1"]


def options(assets, output_dir) -> list[str]:
    return [
        f"model.path={assets.model}",
        f"data.train_files={assets.parquet}",
        f"data.validation_files={assets.parquet}",
        "data.max_prompt_tokens=40",
        "engine.max_tokens_per_micro_batch=128",
        "rollout.num_prompts=4",
        "rollout.group_size=4",
        "rollout.max_response_tokens=8",
        f"reward.functions={assets.reward}",
        "trainer.total_steps=5",
        "trainer.save_every_steps=2",
        "trainer.validate_every_steps=2",
        "trainer.learning_rate=1e-2",
        "trainer.tensorboard=false",
        f"trainer.output_dir={output_dir}",
    ]


def without_staleness(rows):
    return [{name: value for name, value in row.items() if not name.startswith("staleness/")} for row in rows]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def saved_steps(run: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("step_")) for folder in (run / "checkpoints").glob("step_*"))


def assert_same_run(found: Path, expected: Path) -> None:
    assert without_staleness(lines(found / "metrics.jsonl")) == without_staleness(lines(expected / "metrics.jsonl"))
    for name in ("samples.jsonl", "checkpoints/step_5/hf/model.safetensors"):
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.fixture(scope="module")
def ahead(assets, job, tmp_path_factory):
    """Two ranks: one trains, the other samples one step ahead."""
    folder = tmp_path_factory.mktemp("ahead") / "run"
    done = job(2, "rl", *options(assets, folder), *AHEAD, timeout=240)
    assert done.code == 0, done.err
    return folder


def test_ranks_that_sample_without_staleness_change_no_bit(assets, job, command, tmp_path):
    done = command("rl", *options(assets, tmp_path / "colocated"))
    assert done.code == 0, done.err
    done = job(2, "rl", *options(assets, tmp_path / "split"), *SPLIT, timeout=240)
    assert done.code == 0, done.err
    assert_same_run(tmp_path / "split", tmp_path / "colocated")
    assert {row["staleness/max"] for row in lines(tmp_path / "split" / "metrics.jsonl")} == {0.0}


def test_one_step_ahead_every_sample_is_one_version_old(ahead):
    assert [row["staleness/max"] for row in lines(ahead / "metrics.jsonl")] == [0, 1, 1, 1, 1]
    assert {row["staleness/share_1"] for row in lines(ahead / "metrics.jsonl")[1:]} == {1.0}
    versions = {(row["step"], row["policy_version"]) for row in lines(ahead / "samples.jsonl")}
    assert versions == {(1, 0), (2, 0), (3, 1), (4, 2), (5, 3)}
    for row in lines(ahead / "performance.jsonl"):
        assert row["seconds/rollout_idle"] >= 0


def test_one_step_ahead_the_same_seed_gives_the_same_bytes(ahead, assets, job, tmp_path):
    done = job(2, "rl", *options(assets, tmp_path / "run"), *AHEAD, timeout=240)
    assert done.code == 0, done.err
    assert_same_run(tmp_path / "run", ahead)


def test_a_run_goes_on_bitwise_with_the_rollouts_that_were_ahead(ahead, assets, job, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(ahead, run)
    for step in (4, 5):
        shutil.rmtree(run / "checkpoints" / f"step_{step}")
    state = json.loads((run / "checkpoints" / "step_2" / "state" / "run.json").read_text())["content"]["parts"]
    assert len(state["pipeline"]["ready"]) >= 1
    done = job(2, "rl", *options(assets, run), *AHEAD, timeout=240)
    assert done.code == 0, done.err
    assert_same_run(run, ahead)


def test_a_run_that_is_stopped_ahead_goes_on_bitwise(ahead, assets, job, tmp_path):
    run = tmp_path / "run"
    done = job(2, "rl", *options(assets, run), *AHEAD, "trainer.max_time_seconds=0.1", timeout=240)
    assert done.code == 75, done.err
    assert saved_steps(run) == [1]
    done = job(2, "rl", *options(assets, run), *AHEAD, timeout=240)
    assert done.code == 0, done.err
    assert_same_run(run, ahead)


NOTED = """
import time


class Noted:
    "Every episode that begins is noted; all of a step take longer together than its training does."

    def __init__(self, *, notes):
        self.notes = notes

    def reset(self, example):
        with open(self.notes, "a") as file:
            file.write(f"{example.uid}\\n")
        time.sleep(0.5)

    def step(self, response):
        return None

    def reward(self):
        return 1.0

    def close(self):
        pass
"""


@pytest.mark.parametrize(
    ("stop", "code"),
    [("trainer.max_time_seconds=0.1", 75), ("trainer.faults=[rank=0 step=1 phase=sync action=terminate]", 143)],
    ids=["time", "SIGTERM"],
)
@pytest.mark.parametrize(
    "more",
    [[], pytest.param(["trainer.async_save=false"], marks=pytest.mark.full), ["rollout.partial=true"]],
    ids=["async", "sync", "partial"],
)
def test_a_run_that_is_stopped_far_ahead_samples_nothing_that_its_checkpoint_lacks(
    assets, job, tmp_path, stop, code, more
):
    """A rollout in flight would keep the rank that samples from hearing of the end."""
    (tmp_path / "noted.py").write_text(NOTED)
    noted = json.dumps({"path": f"{tmp_path / 'noted.py'}:Noted", "parameters": {"notes": str(tmp_path / "notes")}})
    given = [
        *SPLIT,
        "rollout.max_staleness=50",
        f"rollout.environment={noted}",
        "reward.functions=[{type: environment}]",
    ]
    run = tmp_path / "run"
    done = job(2, "rl", *options(assets, run), *given, "trainer.total_steps=100", *more, stop, timeout=240)
    assert done.code == code, done.err
    assert "resumable: the same command continues after step 1" in done.out
    assert saved_steps(run) == [1]
    state = json.loads((run / "checkpoints" / "step_1" / "state" / "run.json").read_text())["content"]["parts"]
    num_begun = len((tmp_path / "notes").read_text().splitlines())
    assert num_begun == 16 * (1 + len(state["pipeline"]["ready"])), "4 completions of 4 prompts in a step"


@pytest.mark.parametrize(
    "more", [pytest.param([], marks=pytest.mark.full), ["rollout.partial=true"]], ids=["whole", "partial"]
)
def test_an_error_ends_every_rank_whatever_is_in_flight(assets, job, tmp_path, more):
    """Without a word of the thread that samples."""
    slow = ["rollout.max_response_tokens=50", "rollout.max_concurrent_sequences=1", "trainer.validate_every_steps=0"]
    given = [*SPLIT, "rollout.max_staleness=3", *slow, *more]
    fault = "trainer.faults=[rank=0 step=2 phase=backward action=raise]"
    done = job(2, "rl", *options(assets, tmp_path / "run"), *given, fault, timeout=120)
    assert done.code == 1
    assert "error: rank 0: the fault plan raises in phase backward\n" in done.err
    assert "rank 1: another rank ended or hangs; its own message tells why" in done.err
    assert "generate" not in done.err
    assert saved_steps(tmp_path / "run") == []


@pytest.mark.full
def test_f19_rollouts_that_were_ahead_are_trained_on_by_weights_that_lost_their_states(ahead, assets, job, tmp_path):
    """Step 3 trains what was ahead, step 4 what the weights of step 2 sampled: both as in the run that lost nothing."""
    run = tmp_path / "run"
    shutil.copytree(ahead, run)
    for step in (4, 5):
        shutil.rmtree(run / "checkpoints" / f"step_{step}")
    lost = run / "checkpoints" / "step_2" / "state" / "policy" / "rank_0.safetensors"
    lost.unlink()
    done = job(2, "rl", *options(assets, run), *AHEAD, "trainer.resume_fallback=weights", timeout=240)
    assert done.code == 0, done.err
    assert f"{lost} is missing; policy resumes from the weights of {run / 'checkpoints' / 'step_2'}" in done.err
    rows, others = (lines(folder / "metrics.jsonl") for folder in (run, ahead))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[:3] == others[:3]
    samples, expected = (
        [row for row in lines(folder / "samples.jsonl") if row["step"] <= 4] for folder in (run, ahead)
    )
    assert samples == expected
    assert {(row["step"], row["policy_version"]) for row in samples} == {(1, 0), (2, 0), (3, 1), (4, 2)}
    assert rows[3]["train/grad_norm"] != others[3]["train/grad_norm"], "the optimizer began anew"


@pytest.mark.parametrize("medium", ["shared_memory", pytest.param("disk", marks=pytest.mark.full)])
def test_another_medium_and_changes_alone_bring_the_same_weights(assets, job, tmp_path, medium):
    """Of frozen weights nothing travels again. What resumes begins with all of them."""
    folder = f", folder: {tmp_path / 'weights'}" if medium == "disk" else ""
    frozen = "engine.freeze_module_prefix=[model.embed_tokens, model.layers.0]"
    placements = {"whole": "{num_ranks: 1}", "changes": f"{{num_ranks: 1, medium: {medium}{folder}, delta: true}}"}
    if medium == "shared_memory":
        placements["written where they are served"] = "{num_ranks: 1, medium: shared_memory}"
    moved = {}
    for name, placement in placements.items():
        overrides = [frozen, f"rollout.placement={placement}", "rollout.max_staleness=1"]
        done = job(2, "rl", *options(assets, tmp_path / name), *overrides, timeout=240)
        assert done.code == 0, done.err
        rows = lines(tmp_path / name / "metrics.jsonl")
        moved[name] = [row.pop("sync/bytes") for row in rows]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in placements:
        assert_same_run(tmp_path / name, tmp_path / "whole")
        assert name == "changes" or moved[name] == moved["whole"]
    assert max(moved["changes"]) < 0.6 * min(moved["whole"])


def test_partial_rollouts_go_on_under_new_weights(assets, job, tmp_path):
    run, slow = tmp_path / "run", ["rollout.max_response_tokens=50", "rollout.max_concurrent_sequences=1"]
    seldom = ["trainer.save_every_steps=0", "trainer.validate_every_steps=0"]  # they wait for whole completions
    done = job(2, "rl", *options(assets, run), *AHEAD, "rollout.partial=true", *slow, *seldom, timeout=240)
    assert done.code == 0, done.err
    rows = lines(run / "metrics.jsonl")
    assert max(row["staleness/max"] for row in rows) <= 1
    assert max(row["staleness/interrupted"] for row in rows) == 1 / 16  # of those that are sampled one by one
    assert min(row["staleness/token_mean"] for row in rows[1:]) < 1  # without partial=true it is 1
    assert all(row["tokens/sampled"] == row["tokens/trained"] == row["train/num_tokens"] for row in rows)
    assert {row["token_versions"] is None for row in lines(run / "samples.jsonl")} == {True, False}
    for row in lines(run / "samples.jsonl"):
        versions = row["token_versions"] or [row["policy_version"]] * len(row["token_ids"])
        assert len(versions) == len(row["token_ids"]) == len(row["logprobs"])
        assert versions == sorted(versions)
        assert row["step"] - 2 <= versions[0] <= versions[-1] <= row["step"] - 1


@pytest.mark.full
@pytest.mark.parametrize("max_staleness", [1, 3])
def test_partial_rollouts_are_whole_where_the_run_saves_or_validates(assets, job, tmp_path, max_staleness):
    run, slow = tmp_path / "run", ["rollout.max_response_tokens=50", "rollout.max_concurrent_sequences=1"]
    partial = ["rollout.placement=split", f"rollout.max_staleness={max_staleness}", "rollout.partial=true"]
    given = [*options(assets, run), *partial, *slow, "rollout.dynamic_sampling={max_rounds: 2}"]
    done = job(2, "rl", *given, "trainer.total_steps=4", "trainer.lr_schedule=constant", timeout=240)
    assert done.code == 0, done.err
    done = job(2, "rl", *given, "trainer.total_steps=6", "trainer.lr_schedule=constant", timeout=240)
    assert done.code == 0, done.err
    rows = lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert max(row["staleness/max"] for row in rows) <= max_staleness
    state = json.loads((run / "checkpoints" / "step_2" / "state" / "run.json").read_text())["content"]["parts"]
    ready = [
        one for rollout in state["pipeline"]["ready"] for group in rollout["groups"] for one in group["completions"]
    ]
    assert {one["finish_reason"] for one in ready} <= {"stop", "length"}
    assert ready


@pytest.mark.full
def test_two_trainers_and_two_samplers_compute_what_one_of_each_does(ahead, assets, job, metrics_of, tmp_path):
    placement = ["rollout.placement={num_ranks: 2}", "rollout.max_staleness=1"]
    done = job(4, "rl", *options(assets, tmp_path / "run"), *placement, timeout=240)
    assert done.code == 0, done.err
    for four, two in zip(metrics_of(tmp_path / "run"), metrics_of(ahead), strict=True):
        for name in ("train/loss", "train/grad_norm", "policy/entropy", "reward/mean", "staleness/mean"):
            assert four[name] == pytest.approx(two[name], abs=1e-4), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            SPLIT,
            "rollout.placement.num_ranks=1 leaves none of the job's 1 ranks to train; start at least 2 (--nproc 2)",
        ),
        (["rollout.max_staleness=1"], "set rollout.placement=split, or max_staleness=0"),
    ],
)
def test_ranks_that_cannot_be_divided_are_one_line(assets, command, tmp_path, arguments, message):
    done = command("rl", *options(assets, tmp_path / "run"), *arguments)
    assert done.code == 2
    assert message in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_of_either_kind_ends_the_run_and_is_named(assets, marked, tmp_path, victim):
    arguments = [*options(assets, tmp_path / "run"), *AHEAD, "trainer.total_steps=100000"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "SHARDWISE_TEST_MARK": str(tmp_path)}
    launcher = subprocess.Popen(
        [sys.executable, "-m", "shardwise", "rl", "--nproc", "2", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "checkpoints" / "step_2").is_dir() and time.monotonic() < deadline:
            assert launcher.poll() is None, launcher.communicate()[1]
            time.sleep(0.05)
        pids = [pid for pid in marked(str(tmp_path)) if f"\0RANK={victim}\0".encode() in environ_of(pid)]
        rank = next(pid for pid in pids if parent_of(pid) == launcher.pid)
        os.kill(rank, signal.SIGKILL)
        _, error = launcher.communicate(timeout=20)
        left = marked(str(tmp_path))
    finally:
        for pid in marked(str(tmp_path)):
            os.kill(pid, signal.SIGKILL)
    assert launcher.returncode == 1
    assert f"error: rank {victim} was ended by SIGKILL" in error
    assert "; the other ranks were stopped" in error
    assert not left


def environ_of(pid: int) -> bytes:
    try:
        return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.mark.full
def test_a_folder_for_weights_that_holds_something_else_is_one_line_and_stays_as_it_is(assets, shell, tmp_path):
    """While a thread of rank 0 asks the rank that samples: the process ends without a word of that thread's."""
    notes = tmp_path / "weights" / "version-notes"
    notes.mkdir(parents=True)
    split = f"rollout.placement={{type: split, medium: disk, folder: {notes.parent}}}"
    done = shell("shardwise", "rl", "--nproc", "2", *options(assets, tmp_path / "run"), split)
    assert done.code == 2
    assert done.err.splitlines() == [
        f"error: rollout.placement.folder={notes.parent} holds version-notes, which is not a run's; give an empty "
        "folder, or one that is yet to be made, or move away what is in this one"
    ]
    assert [path.name for path in notes.parent.iterdir()] == ["version-notes"]

"""Signals to runs: the step is finished, a checkpoint saved, and the same command goes on."""

import os
import re
import signal

import pytest


def resumable_step(out: str) -> int:
    return int(re.search(r"resumable: the same command continues after step (\d+)$", out, re.MULTILINE)[1])


def saved_steps(run) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*"))


NUM_STEPS = 16


@pytest.fixture
def sft_arguments(assets):
    """Of a run on two ranks."""

    def make(output_dir, *more: str) -> list[str]:
        return [
            *("sft", "--nproc", "2"),
            f"model.path={assets.model}",
            f"data.train_files={assets.sft}",
            "data.max_train_rows=20",
            "data.max_sequence_tokens=64",
            "trainer.batch_size=8",
            "trainer.learning_rate=5e-3",
            f"trainer.total_steps={NUM_STEPS}",
            "trainer.tensorboard=false",
            f"trainer.output_dir={output_dir}",
            *more,
        ]

    return make


@pytest.mark.full
def test_f1_f10_a_run_that_was_stopped_and_lost_a_rank_ends_as_if_nothing_had_been(
    sft_arguments, shell, start, tmp_path
):
    """F10: SIGTERM to the launcher. F1: SIGKILL to a rank of the run that goes on, which starts again by itself."""
    first = start(*sft_arguments(tmp_path / "run"))
    first.wait_until(lambda: first.steps)
    first.launcher.terminate()
    assert first.end() == 143
    step = resumable_step(first.out)
    assert first.steps == list(range(1, step + 1))
    assert saved_steps(first.run) == [step]
    assert first.err.splitlines() == ["SIGTERM: saves and stops after this step", "terminated; all ranks ended"]

    second = start(*sft_arguments(tmp_path / "run", "--max-restarts", "2", "trainer.save_every_steps=1"))
    second.wait_until(lambda: len(saved_steps(second.run)) > 1)
    os.kill(second.ranks()[1], signal.SIGKILL)
    assert second.end() == 0
    cause, restart = second.err.splitlines()
    assert re.fullmatch(
        r"error: rank 1 was ended by SIGKILL in step \d+(, `\w+.*`)?; the other ranks were stopped", cause
    )
    newest = re.fullmatch(rf"restart 1 of 2: resumes from {first.run}/checkpoints/step_(\d+)", restart)
    assert int(newest[1]) > step

    undisturbed = tmp_path / "undisturbed"
    done = shell("shardwise", *sft_arguments(undisturbed), timeout=300)
    assert done.code == 0, done.err
    weights = f"checkpoints/step_{NUM_STEPS}/hf/model.safetensors"
    assert (first.run / "metrics.jsonl").read_text() == (undisturbed / "metrics.jsonl").read_text()
    assert (first.run / weights).read_bytes() == (undisturbed / weights).read_bytes()


@pytest.mark.full
def test_f10_a_second_signal_ends_a_run_at_once_and_names_what_it_goes_on_from(sft_arguments, start, tmp_path):
    run = start(
        *sft_arguments(tmp_path / "run", "trainer.save_every_steps=1"),
        faults="rank=1 step=3 phase=backward action=hang",
    )
    run.wait_until(lambda: saved_steps(run.run) == [1, 2])
    run.launcher.terminate()
    run.wait_until(lambda: "saves and stops after this step\n" in run.err)
    run.launcher.terminate()
    assert run.end(seconds=20) == 143
    assert run.err.splitlines() == [
        "SIGTERM: saves and stops after this step",
        f"terminated; all ranks ended without saving; the same command resumes from {run.run}/checkpoints/step_2",
    ]


@pytest.fixture
def endless_rl(assets, tmp_path):
    """Of two ranks, with two reward processes and what forked them."""
    return [
        *("rl", "--nproc", "2"),
        f"model.path={assets.model}",
        f"data.train_files={assets.parquet}",
        "data.max_prompt_tokens=40",
        "rollout.num_prompts=4",
        "rollout.group_size=4",
        "rollout.max_response_tokens=40",
        f"reward.functions={assets.reward}",
        "trainer.total_steps=100000",
        "trainer.tensorboard=false",
        f"trainer.output_dir={tmp_path / 'run'}",
    ]


@pytest.mark.slow
def test_f11_ctrl_c_to_every_process_is_one_clean_stop(endless_rl, start):
    run = start(*endless_rl)
    run.wait_until(lambda: run.steps)
    assert len(run.processes()) == 6
    os.killpg(run.launcher.pid, signal.SIGINT)
    assert run.end() == 130
    assert saved_steps(run.run) == [resumable_step(run.out)] == run.steps[-1:]
    assert run.err.splitlines()[-1] == "interrupted; all ranks ended"
    assert "Traceback" not in run.err


@pytest.mark.full
def test_f11_after_ctrl_c_the_same_command_goes_on_and_a_dead_launcher_takes_all_with_it(endless_rl, start):
    run = start(*endless_rl)
    run.wait_until(lambda: run.steps)
    os.killpg(run.launcher.pid, signal.SIGINT)
    assert run.end() == 130
    before = run.steps[-1]
    again = start(*endless_rl)
    again.wait_until(lambda: again.steps[-1] > before)
    again.launcher.kill()
    assert again.end() == -signal.SIGKILL


def test_f11_a_run_saves_and_stops_before_its_time_is_up(assets, command, sft_arguments, tmp_path, monkeypatch):
    """Alone on one rank; the same command goes on. The job has been running since yesterday."""
    monkeypatch.setenv("SHARDWISE_STARTED", "0")
    arguments = [a for a in sft_arguments(tmp_path / "run") if a not in ("--nproc", "2")]
    done = command(*arguments, "trainer.max_time_seconds=1")
    assert done.code == 75, done.err
    assert done.out.splitlines()[-1] == (
        "stopped for trainer.max_time_seconds=1; resumable: the same command continues after step 1"
    )
    assert saved_steps(tmp_path / "run") == [1]
    assert command(*arguments, "trainer.total_steps=3").code == 0
    assert saved_steps(tmp_path / "run") == [1, 3]

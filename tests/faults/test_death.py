"""Ranks and launchers that die, are stopped or hang in the middle of reinforcement learning: the run ends as one that
nothing happened to, and nothing is left behind.

Each step makes four optimizer steps, two minibatches in each of two epochs over its rollouts, so that most faults hit
in between.
"""

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

STEPS = 3
NTH = {
    "rollout": (1, 2),
    "reward": (1, 2),
    "logprob": (2, 3),
    "forward": (3, 11),
    "backward": (4, 12),
    "allreduce": (2, 6),
    "optim": (3, 7),
    "sync": (2, 3),
    "stage": (20, 80),
    "write": (20, 90),
    "commit": (1, 3),
}
"""How often a rank has entered a phase when it does so in steps 1 and 2; stage and write: early and late in the save
after step 1, before which there is no checkpoint; commit: before those of steps 1 and 2 get their names."""
OF_RANK_0_ALONE = {"reward", "commit"}
OF_SAVES = {"stage", "write", "commit"}
PEERS_END_SECONDS = 5.0
ORPHANS_END_SECONDS = 10.0
SECOND_JOB_ENDS_SECONDS = 5.0
HANG_NOTICED_SECONDS = 20.0
"""Beside engine.collective_timeout_seconds: the step until the hang, stacks of every rank, two cores for everything."""
TWO_RANKS: list[str] = []
APART = ["rollout.placement=split", "rollout.max_staleness=1"]
"""One rank trains, one samples the rollouts of the next step meanwhile."""


FULL = pytest.mark.full


def cell(phase: str, rank: int, *, in_default: bool):
    """Parameters of a test, of which `make test` runs one."""
    return pytest.param(phase, rank, id=f"{phase} on rank {rank}", marks=() if in_default else FULL)


@pytest.fixture(scope="session")
def rl_arguments(assets):
    """Of a run on two ranks; a few of its own options."""

    def make(output_dir: Path, *more: str) -> list[str]:
        return [
            *("rl", "--nproc", "2"),
            f"model.path={assets.model}",
            f"data.train_files={assets.parquet}",
            "data.max_prompt_tokens=40",
            "engine.max_tokens_per_micro_batch=64",
            "rollout.num_prompts=4",
            "rollout.group_size=4",
            "rollout.max_response_tokens=8",
            f"reward.functions={assets.reward}",
            "algorithm.num_epochs=2",
            "algorithm.num_minibatches=2",
            "trainer.learning_rate=3e-3",
            f"trainer.total_steps={STEPS}",
            "trainer.save_every_steps=1",
            "trainer.tensorboard=false",
            f"trainer.output_dir={output_dir}",
            *more,
        ]

    return make


@pytest.fixture(scope="session")
def undisturbed(rl_arguments, job, tmp_path_factory):
    """`undisturbed(options)`: the folder of a run with them that nothing happened to, nor anything watched."""
    folders: dict[tuple[str, ...], Path] = {}

    def find(options: list[str]) -> Path:
        key = tuple(options)
        if key not in folders:
            folder = tmp_path_factory.mktemp("undisturbed") / "run"
            recipe, _, size, *arguments = rl_arguments(folder, *options)
            done = job(int(size), recipe, *arguments, timeout=300)
            assert done.code == 0, done.err
            folders[key] = folder
        return folders[key]

    return find


def assert_same_run(found: Path, expected: Path) -> None:
    """Metrics, samples, weights and optimizer states, to the bit."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (found / name).read_text() == (expected / name).read_text()
    last = Path("checkpoints", f"step_{STEPS}")
    files = [path.relative_to(expected) for path in (expected / last).rglob("*.safetensors")]
    assert {file.parts[2] for file in files} == {"hf", "state"}
    for file in files:
        assert (found / file).read_bytes() == (expected / file).read_bytes(), file
    kept = {f"step_{step}" for step in range(1, STEPS + 1)} | {"latest"}
    assert {path.name for path in (found / "checkpoints").iterdir()} == kept, "no leftovers"


def assert_restarted_once(run, rank: int) -> None:
    cause, restart, *warned = run.err.splitlines()
    has_old_logs = (run.run / "metrics.jsonl.1").exists()  # that nothing resumes from
    assert len(warned) == has_old_logs
    assert restart.endswith(": starts as before") or not has_old_logs
    assert re.fullmatch(rf"error: rank {rank} was ended by SIGKILL in .*; the other ranks were stopped", cause)
    assert re.fullmatch(rf"restart 1 of 1: resumes from {run.run}/checkpoints/step_[12]|.*: starts as before", restart)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        cell(phase, rank, in_default=(phase, rank) == ("backward", 1))
        for phase in NTH
        for rank in (0, 1)
        if rank == 0 or phase not in OF_RANK_0_ALONE
    ],
)
def test_f01_f02_trap_26_a_rank_killed_in_any_phase_changes_nothing(
    rl_arguments, undisturbed, start, tmp_path, phase, rank
):
    run = start(
        *rl_arguments(tmp_path / "run", "--max-restarts", "1"),
        faults=f"rank={rank} phase={phase} nth={NTH[phase][1]} action=kill",
    )
    assert run.end() == 0, run.err
    assert_restarted_once(run, rank)
    assert_same_run(run.run, undisturbed(TWO_RANKS))


@pytest.mark.full
@pytest.mark.parametrize(
    ("phase", "rank"), [("backward", 0), ("commit", 0), ("sync", 0), ("rollout", 1), ("sync", 1)], ids=str
)
def test_f25_a_run_with_rollouts_ahead_goes_on_with_them(rl_arguments, undisturbed, start, tmp_path, phase, rank):
    """The checkpoint of step 1 holds the rollouts of steps 2 and 3, which its weights and those before them sampled:
    a rank that is killed as it samples is killed before there is one. All micro-batches are of rank 0."""
    nth = NTH[phase][1] * (2 if phase == "backward" else 1)
    run = start(
        *rl_arguments(tmp_path / "run", "--max-restarts", "1", *APART),
        faults=f"rank={rank} phase={phase} nth={nth} action=kill",
    )
    assert run.end() == 0, run.err
    assert_restarted_once(run, rank)
    assert_same_run(run.run, undisturbed(APART))
    state = json.loads((run.run / "checkpoints" / "step_1" / "state" / "run.json").read_text())["content"]
    assert len(state["parts"]["pipeline"]["ready"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "rank"),
    [cell(phase, rank, in_default=False) for phase, rank in zip(NTH, (1, 0, 1, 0, 1, 0, 1, 0, 1, 1, 0), strict=True)],
)
def test_f10_f11_trap_26_a_rank_terminated_in_any_phase_saves_and_goes_on(
    rl_arguments, undisturbed, start, tmp_path, phase, rank
):
    """A save goes on beside step 2, after which a signal in it stops the run."""
    arguments = rl_arguments(tmp_path / "run")
    run = start(*arguments, faults=f"rank={rank} phase={phase} nth={NTH[phase][0]} action=terminate")
    assert run.end() == 143, run.err
    assert run.err == "SIGTERM: saves and stops after this step\n"
    step = run.steps[-1]
    assert step in ((1, 2) if phase in OF_SAVES else (1,))
    assert run.out.endswith(
        f"rl: saved {run.run}/checkpoints/step_{step}\nstopped by SIGTERM; resumable: the same command continues after "
        f"step {step}\n"
    )
    again = start(*arguments)
    assert again.end() == 0, again.err
    assert f"resumes from {run.run}/checkpoints/step_{step}\n" in again.out
    assert_same_run(run.run, undisturbed(TWO_RANKS))


def listening_ports(pids: list[int]) -> set[int]:
    """TCP ports on which these processes listen."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            sockets.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == "0A" and inode in sockets:
            ports.add(int(local.rpartition(":")[2], 16))
    return ports


@pytest.mark.full
def test_f05_a_killed_launcher_takes_all_with_it_and_the_same_command_goes_on(
    rl_arguments, undisturbed, start, tmp_path
):
    arguments = rl_arguments(tmp_path / "run")
    run = start(*arguments, faults="rank=1 phase=backward nth=12 action=hang")
    run.wait_until(lambda: (run.run / "checkpoints" / "step_1").is_dir())
    ports = listening_ports(list(run.ranks().values()))
    assert ports
    assert len(run.processes()) == 6, "launcher, two ranks, two reward processes and what forked them"
    run.launcher.kill()
    killed = time.monotonic()
    while run.processes() and time.monotonic() < killed + ORPHANS_END_SECONDS:
        time.sleep(0.05)
    assert not run.processes()
    assert run.end() == -signal.SIGKILL
    for port in ports:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", port))
    again = start(*arguments)
    assert again.end() == 0, again.err
    assert f"resumes from {run.run}/checkpoints/step_1" in again.out
    assert_same_run(run.run, undisturbed(TWO_RANKS))


@pytest.mark.full
def test_f03_trap_21_a_rank_that_hangs_is_named_and_the_run_goes_on(rl_arguments, undisturbed, start, tmp_path):
    """Rank 1 sleeps before the norm of the gradients, in which rank 0 waits for it."""
    run = start(
        *rl_arguments(tmp_path / "run", "--max-restarts", "1", "engine.collective_timeout_seconds=20"),
        faults="rank=1 phase=allreduce nth=6 action=hang",
    )
    run.wait_until(lambda: run.steps)
    began = time.monotonic()
    run.wait_until(lambda: "restart 1 of 1" in run.err)
    assert time.monotonic() - began < 20 + HANG_NOTICED_SECONDS
    assert run.end() == 0, run.err
    cause, restart = run.err.splitlines()
    assert re.fullmatch(
        rf"error: rank 1 hangs in step 2, `train policy`: rank 0 waited in vain \(.*[Tt]imed out.*\); stacks of every "
        rf"rank: {run.run}/faults/1",
        cause,
    )
    assert restart == f"restart 1 of 1: resumes from {run.run}/checkpoints/step_1"
    stacks = (run.run / "faults" / "1" / "rank_1.txt").read_text()
    assert "in fault_point" in stacks
    assert "in optim_step" in stacks
    assert "in fault_point" not in (run.run / "faults" / "1" / "rank_0.txt").read_text()
    assert_same_run(run.run, undisturbed(TWO_RANKS))


@pytest.mark.full
def test_f16_two_jobs_at_once_with_the_same_port_do_not_meet(rl_arguments, undisturbed, start, tmp_path, monkeypatch):
    """Nor with what an earlier job left in a store: each finds its ranks through a folder of its own."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        runs = [start(*rl_arguments(tmp_path / name)) for name in ("one", "two")]
        assert [run.launcher.wait(timeout=300) for run in runs] == [0, 0], [run.err for run in runs]
    for run in runs:
        assert run.end() == 0
        assert_same_run(run.run, undisturbed(TWO_RANKS))


@pytest.mark.full
def test_f16_f23_a_second_job_in_the_same_folder_is_refused_and_the_first_goes_on(rl_arguments, shell, start, tmp_path):
    arguments = rl_arguments(tmp_path / "run", "trainer.total_steps=100000", "trainer.save_every_steps=0")
    run = start(*arguments)
    run.wait_until(lambda: run.steps)
    began = time.monotonic()
    second = shell("shardwise", *arguments, timeout=300)
    assert time.monotonic() - began < SECOND_JOB_ENDS_SECONDS
    assert second.code == 2
    pattern = rf"error: trainer.output_dir={run.run} is written to by process {run.ranks()[0]} on .*, since .*\n"
    assert re.fullmatch(pattern, second.err)
    before = run.steps[-1]
    run.wait_until(lambda: run.steps[-1] > before)
    assert run.steps == list(range(1, run.steps[-1] + 1))
    run.launcher.terminate()
    assert run.end() == 143


@pytest.mark.full
def test_f01_a_killed_rank_costs_seconds(rl_arguments, start, tmp_path, record_property):
    """From the death to the line that says so, and to the next trained step: at most 20 s on two idle cores. Here, on
    whatever else runs beside it, no more than to notice it and what the same command takes to its first step, which is
    measured before and after."""
    arguments = rl_arguments(tmp_path / "run", "--max-restarts", "1", "trainer.total_steps=1000")
    began = time.monotonic()
    run = start(*arguments)
    run.wait_until(lambda: run.steps)
    start_seconds = [time.monotonic() - began]
    run.wait_until(lambda: len(run.steps) > 2)
    os.kill(run.ranks()[1], signal.SIGKILL)
    died = time.monotonic()
    run.wait_until(lambda: "restart 1 of 1: resumes from " in run.err)
    noticed_seconds = time.monotonic() - died
    run.wait_until(lambda: "resumes from " in run.out)
    resumed_step = int(re.search(r"resumes from .*/step_(\d+)$", run.out, re.MULTILINE)[1])
    run.wait_until(lambda: run.steps[-1:] > [resumed_step])
    recovery_seconds = time.monotonic() - died
    run.launcher.terminate()
    assert run.end() == 143
    last = run.steps[-1]
    began = time.monotonic()
    again = start(*arguments)
    again.wait_until(lambda: again.steps[-1] > last)
    start_seconds.append(time.monotonic() - began)
    again.launcher.terminate()
    assert again.end() == 143
    record_property("noticed_seconds", noticed_seconds)
    record_property("recovery_seconds", recovery_seconds)
    record_property("start_seconds", start_seconds)
    assert noticed_seconds < PEERS_END_SECONDS
    assert recovery_seconds < PEERS_END_SECONDS + max(start_seconds)

"""Processes that vanish in the middle of a run on two ranks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MARK = "SHARDWISE_TEST_MARK"


@pytest.fixture
def started(assets, marked, tmp_path):
    """A run of many steps, caught after its first: (launcher, run folder, mark)."""
    arguments = [
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
    mark = str(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", MARK: mark}
    with (tmp_path / "stderr").open("w") as stderr:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "shardwise", "rl", "--nproc", "2", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.is_file() and metrics.read_text()) and launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert launcher.poll() is None, (tmp_path / "stderr").read_text()
    yield launcher, tmp_path, mark
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)
    launcher.wait()


def ranks_of(launcher, marked_pids) -> dict[int, int]:
    """Process id by rank."""
    found = {}
    for pid in marked_pids:
        variables = dict(v.partition("=")[::2] for v in Path(f"/proc/{pid}/environ").read_text().split("\0"))
        parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        if parent == launcher.pid:
            found[int(variables["RANK"])] = pid
    return found


@pytest.mark.parametrize("victim", [0])
def test_a_killed_rank_is_named_and_nothing_is_left(started, marked, metrics_of, victim):
    launcher, folder, mark = started
    assert len(marked(mark)) == 6  # launcher, two ranks, two reward processes and what forked them
    os.kill(ranks_of(launcher, marked(mark))[victim], signal.SIGKILL)
    assert launcher.wait(timeout=15) == 1
    lines = (folder / "stderr").read_text().splitlines()
    assert lines[-1] == f"error: rank {victim} was ended by SIGKILL; the other ranks were stopped"
    assert not [line for line in lines if "Traceback" in line]
    assert_all_gone(marked, mark)
    assert [row["step"] for row in metrics_of(folder / "run")][:1] == [1]


def test_everything_ends_within_5_seconds_of_the_death_of_the_launcher(started, marked, metrics_of):
    launcher, folder, mark = started
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    assert_all_gone(marked, mark)
    assert [row["step"] for row in metrics_of(folder / "run")][:1] == [1]


def test_ctrl_c_ends_the_run_without_a_traceback(started, marked, metrics_of):
    launcher, folder, mark = started
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.wait(timeout=15) == 130
    stderr = (folder / "stderr").read_text()
    assert stderr.splitlines()[-1] == "interrupted; all ranks ended"
    assert "Traceback" not in stderr
    assert_all_gone(marked, mark)
    assert [row["step"] for row in metrics_of(folder / "run")][:1] == [1]


def assert_all_gone(marked, mark: str) -> None:
    deadline = time.monotonic() + 5
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not marked(mark)

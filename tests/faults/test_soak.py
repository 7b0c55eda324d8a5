"""F14: 200 steps with saves, retention and validation leave nothing behind, step after step."""

import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import pytest

STEPS, WARM_UP = 200, 50
MAX_SLOPE = 1e-3
"""Of the median, for each step."""


@pytest.fixture
def scratch(monkeypatch):
    """Where the run, and nobody else, keeps its scratch files."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def resources_of(pids, scratch):
    """Sums over these processes, and what lies in shared memory and in the scratch folder."""
    found = {"rss_pages": 0, "fds": 0, "threads": 0}
    for pid in pids:
        with contextlib.suppress(OSError):  # ended meanwhile
            found["rss_pages"] += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            found["fds"] += len(list(Path(f"/proc/{pid}/fd").iterdir()))
            found["threads"] += len(list(Path(f"/proc/{pid}/task").iterdir()))
    return found | {
        "shared_memory": len(list(Path("/dev/shm").iterdir())),
        "scratch_files": sum(1 for _ in scratch.rglob("*")),
    }


def slope(points):
    """Growth for each step, as a share of the median: between the medians of the first and the last third of the steps
    after the warm-up."""
    first_end, last_start = WARM_UP + (STEPS - WARM_UP) / 3, STEPS - (STEPS - WARM_UP) / 3
    early = [point for point in points if WARM_UP <= point[0] < first_end]
    late = [point for point in points if point[0] >= last_start]
    assert len(early) >= 5, points
    assert len(late) >= 5, points
    (first_step, first), (last_step, last) = (
        [statistics.median(axis) for axis in zip(*part, strict=True)] for part in (early, late)
    )
    return (last - first) / max(first, 1) / (last_step - first_step)


def test_the_slope_of_a_line_is_found_and_its_jumps_are_not():
    line = [(step, 1000 + 2 * step + 500 * (step % 10 == 0)) for step in range(STEPS)]
    assert slope(line) == pytest.approx(2 / (1000 + 2 * 75), rel=0.05)
    assert slope([(step, 7) for step in range(STEPS)]) == 0


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["sft", "rl"])
def test_f14_a_long_run_holds_no_more_at_its_end_than_at_its_beginning(assets, start, scratch, tmp_path, recipe):
    data = {
        "sft": [
            f"data.train_files={assets.sft}",
            f"data.validation_files={assets.sft}",
            "data.max_sequence_tokens=64",
            "trainer.batch_size=4",
        ],
        "rl": [
            f"data.train_files={assets.parquet}",
            f"data.validation_files={assets.parquet}",
            "data.max_prompt_tokens=40",
            "rollout.num_prompts=2",
            "rollout.group_size=2",
            "rollout.max_response_tokens=4",
            f"reward.functions={assets.reward}",
            "algorithm.kl_coef=0.1",
        ],
    }
    run = start(
        *(recipe, "--nproc", "2", f"model.path={assets.model}", *data[recipe]),
        "data.max_train_rows=16",
        "data.max_validation_rows=4",
        f"trainer.total_steps={STEPS}",
        "trainer.save_every_steps=5",
        "trainer.keep_last=2",
        "trainer.keep_every_steps=50",
        "trainer.validate_every_steps=10",
        f"trainer.output_dir={tmp_path / 'run'}",
    )
    points = []
    while run.launcher.poll() is None:
        steps = run.steps
        if steps:
            points.append((steps[-1], resources_of(run.processes(), scratch)))
        time.sleep(0.1)
    assert run.end() == 0, run.err
    points = [point for point in points if point[0] < STEPS]  # then processes end
    slopes = {name: slope([(step, found[name]) for step, found in points]) for name in points[0][1]}
    print({name: f"{100 * value:.4f} % per step" for name, value in slopes.items()})
    assert all(value < MAX_SLOPE for value in slopes.values()), slopes
    saved = sorted(path.name for path in (run.run / "checkpoints").glob("step_*"))
    assert saved == ["step_100", "step_150", "step_195", "step_200", "step_50"]

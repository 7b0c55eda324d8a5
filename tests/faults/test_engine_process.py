"""Rollout engines in processes of their own that die in the middle of reinforcement learning (F6, F8): the run goes on,
with the numbers of one whose engines were in its ranks and never died, or ends with the history."""

import json
from pathlib import Path

import pytest

STEPS = 3
PROCESS = ["rollout.engine.process.max_restarts=2"]
APART = ["rollout.placement.type=split", "rollout.placement.delta=true", "rollout.max_staleness=1"]


@pytest.fixture(scope="module")
def rl_arguments(assets):
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
            "trainer.learning_rate=3e-3",
            f"trainer.total_steps={STEPS}",
            "trainer.tensorboard=false",
            f"trainer.output_dir={output_dir}",
            *more,
        ]

    return make


def restarts(run: Path) -> list[float]:
    rows = map(json.loads, (run / "performance.jsonl").read_text().splitlines())
    return [row["rollout/engine_restarts"] for row in rows]


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "faults", "expected"),
    [
        ([], "rank=1 step=2 phase=serve action=kill; rank=0 step=3 phase=load action=kill", [0, 1, 1]),
        (APART, "rank=1 phase=serve nth=2 action=kill", None),
    ],
    ids=["colocated", "split"],
)
def test_f06_trap_25_engines_that_are_killed_change_no_number(
    rl_arguments, shell, start, tmp_path, options, faults, expected
):
    undisturbed = tmp_path / "undisturbed"
    done = shell("shardwise", *rl_arguments(undisturbed, *options), timeout=300)
    assert done.code == 0, done.err
    run = start(*rl_arguments(tmp_path / "killed", *options, *PROCESS), faults=faults)
    assert run.end() == 0, run.err
    assert run.err.count("warning: the rollout engine of rank") == faults.count("action")
    found = restarts(run.run)
    assert sum(found) == faults.count("action")
    assert expected is None or found == expected
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (run.run / name).read_text() == (undisturbed / name).read_text()
    weights = f"checkpoints/step_{STEPS}/hf/model.safetensors"
    assert (run.run / weights).read_bytes() == (undisturbed / weights).read_bytes()


@pytest.mark.full
def test_f08_trap_25_a_run_whose_restarts_are_used_up_ends_with_the_history_and_leaves_nothing(
    rl_arguments, start, tmp_path
):
    run = start(
        *rl_arguments(tmp_path / "run", "rollout.engine.process.max_restarts=0"),
        faults="rank=1 step=2 phase=serve action=kill",
    )
    assert run.end() == 1
    assert run.steps == [1]
    cause, history = run.err.splitlines()[-2:]
    assert "rank 1 failed in " in cause
    assert cause.endswith("the rollout engine of rank 1 was lost 1 times, and rollout.engine.process.max_restarts=0:")
    assert "in `generate`, it ended its process by SIGKILL" in history

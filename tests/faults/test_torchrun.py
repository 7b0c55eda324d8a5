"""Ranks under torchrun, where no launcher of ours watches."""

import re
import socket
import time

import pytest

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shardwise")


@pytest.mark.parametrize(
    ("action", "state"),
    [
        pytest.param("hang", "", id="sleeps"),
        pytest.param("stop", r" and is stopped \(SIGSTOP\)", id="is stopped", marks=pytest.mark.full),
    ],
)
def test_f03_a_rank_that_hangs_is_named_with_the_stacks_of_all_and_ended(assets, shell, tmp_path, action, state):
    started = time.monotonic()
    done = shell(
        *TORCHRUN,
        "sft",
        f"model.path={assets.model}",
        f"data.train_files={assets.sft}",
        f"trainer.output_dir={tmp_path / 'run'}",
        "data.max_sequence_tokens=64",
        "trainer.total_steps=4",
        "trainer.batch_size=4",
        "engine.collective_timeout_seconds=15",
        f"trainer.faults=[rank=1 step=2 phase=allreduce action={action}]",
    )
    assert done.code == 1
    assert time.monotonic() - started < 75, "torchrun gives ranks that do not answer 30 s more"
    reports = tmp_path / "run" / "faults" / "1"
    (told,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(
        rf"error: rank 1 hangs in step 2, `train policy`{state}: rank 0 waited in vain \(.*[Tt]imed out.*\); stacks of "
        rf"the ranks on {socket.gethostname()}: {reports}",
        told,
    )
    first, second = ((reports / f"rank_{rank}.txt").read_text() for rank in (0, 1))
    assert "optim_step" in first
    assert "Timed out" in first
    assert ("is stopped (SIGSTOP)" in second) if action == "stop" else ("in fault_point" in second)

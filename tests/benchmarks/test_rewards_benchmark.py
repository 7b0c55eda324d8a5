"""The reward benchmark: its bound by hand, and a small run of it."""

import pytest

from benchmarks import rewards


@pytest.mark.alone
@pytest.mark.parametrize("num_hangs", [0, 2])
def test_f48_a_small_run_counts_the_slot_time_of_hangs(tmp_path, monkeypatch, num_hangs):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.py").write_text(rewards.RULES)
    found = rewards.measure(kind="sleep", num_jobs=200, num_hangs=num_hangs, num_workers=2, timeout_seconds=2.0)
    # Two hangs of 2 s on two slots, and 200 calls of at least 1 ms.
    assert found["seconds_at_best"] >= (num_hangs * 2.0 + (200 - num_hangs) * 0.001) / 2
    assert found["seconds"] >= found["seconds_at_best"] * 0.99
    assert found["share_of_bound"] == pytest.approx(found["seconds_at_best"] / found["seconds"], abs=0.02)
    assert found["queueing_p50_ms"] <= found["queueing_p99_ms"] <= found["queueing_max_ms"]

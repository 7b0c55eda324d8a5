"""The check of the GRPO benchmark, and our side of it from end to end on canned completions."""

import json
import sys

import pytest

from benchmarks.grpo_step import FIRST_BOUNDS, build_task, check_agreement
from benchmarks.peers.grpo_task import COMPLETIONS_FILE, GrpoTask, reward_of
from benchmarks.peers.lockstep import Child

TASK = GrpoTask(
    num_prompts=2,
    group_size=4,
    max_tokens=12,
    temperature=1.0,
    kl_coef=0.04,
    learning_rate=1e-4,
    threads=1,
    canned=True,
)


def answer(*steps):
    """Of steps (loss, gradient norm, KL, reward)."""
    figures = [dict(zip(("grad_norm", "kl", "reward"), rest, strict=True)) for _, *rest in steps]
    return {"losses": [loss for loss, *_ in steps], "figures": figures}


NOTHING_YET = (0.0, 0.0, 0.0, 0.0)


def test_agreement_compares_each_step_with_what_the_peer_logs_one_step_late():
    ours = answer((0.1, 1.0, 0.0, 5.0), (0.2, 2.0, 0.5, 6.0), (9.0, 9.0, 9.0, 9.0))
    found = check_agreement(ours, answer(NOTHING_YET, (0.1, 1.0, 0.0, 5.0), (0.2, 2.01, 0.5, 6.0)))
    assert set(FIRST_BOUNDS) < set(found)
    assert found["grad_norm"] == {"ours": 1.0, "trl": 1.0, "difference": 0.0, "later": pytest.approx(0.01 / 2.01)}


@pytest.mark.parametrize(
    ("step", "name"),
    [
        ((0.10002, 1.0, 0.0, 5.0), "loss"),
        ((0.1, 1.001, 0.0, 5.0), "grad_norm"),
        ((0.1, 1.0, 0.001, 5.0), "kl"),
        ((0.1, 1.0, 0.0, 5.1), "reward"),
    ],
)
def test_a_difference_in_the_first_step_stops_the_benchmark_and_is_named(step, name):
    ours = answer((0.1, 1.0, 0.0, 5.0), (0.2, 2.0, 0.5, 6.0), NOTHING_YET)
    with pytest.raises(SystemExit, match=f"same {name}"):
        check_agreement(ours, answer(NOTHING_YET, step, (0.2, 2.0, 0.5, 6.0)))


@pytest.mark.full
def test_our_side_counts_the_tokens_and_rewards_of_the_canned_completions(tmp_path):
    folder = tmp_path / "task"
    build_task(folder, TASK, mean_tokens=6.0)
    canned = json.loads((folder / COMPLETIONS_FILE).read_text())
    child = Child(sys.executable, "benchmarks.grpo_worker", ["--folder", str(folder)], threads=1)
    found = child.steps(2)
    assert child.finish()["peak_bytes"] > 0
    steps = [dict(list(canned.items())[:2]), dict(list(canned.items())[2:4])]
    expected_tokens = sum(len(prompt.split()) + len(ids) for step in steps for prompt, g in step.items() for ids in g)
    assert found["tokens"] == expected_tokens
    for figures, step in zip(found["figures"], steps, strict=True):
        texts = [" ".join(f"w{token}" for token in ids if token > 1) for group in step.values() for ids in group]
        assert figures["reward"] == pytest.approx(sum(map(reward_of, texts)) / len(texts))
        assert figures["grad_norm"] > 0
    assert found["figures"][0]["kl"] == pytest.approx(0, abs=1e-6), "the policy still is the reference"
    assert found["figures"][1]["kl"] > 1e-5

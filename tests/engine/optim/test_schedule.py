import math

import pytest

from shardwise.config import OptimizerConfig
from shardwise.engine.optim.schedule import missed_peak, schedule_at

COSINE = [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0]
"""(1 + cos(pi k / 4)) / 2 for k = 0..4."""


@pytest.mark.parametrize(
    ("settings", "total_steps", "expected"),
    [
        ({}, 3, [1, 1, 1]),
        ({"warmup_steps": 3}, 6, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"lr_schedule": "linear"}, 5, [1, 0.75, 0.5, 0.25, 0]),
        ({"lr_schedule": "linear", "min_lr_ratio": 0.2}, 5, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"lr_schedule": "linear", "warmup_steps": 1}, 6, [0.5, 1, 0.75, 0.5, 0.25, 0]),
        ({"lr_schedule": "cosine"}, 5, COSINE),
        ({"lr_schedule": "cosine", "warmup_steps": 2}, 7, [1 / 3, 2 / 3, *COSINE]),
        ({"lr_schedule": "cosine", "min_lr_ratio": 0.5}, 5, [0.5 + x / 2 for x in COSINE]),
        ({"lr_schedule": "wsd", "lr_decay_steps": 2}, 6, [1, 1, 1, 1, 0.5, 0]),
        (
            {"lr_schedule": "wsd", "lr_decay_steps": 4, "warmup_steps": 1, "min_lr_ratio": 0.2},
            8,
            [0.5, 1, 1, 1, 0.8, 0.6, 0.4, 0.2],
        ),
        ({"lr_schedule": "linear"}, 1, [1]),
        ({"lr_schedule": "cosine", "warmup_steps": 2}, 3, [1 / 3, 2 / 3, 1]),
    ],
)
def test_shares_of_the_peak_worked_by_hand(settings, total_steps, expected):
    config = OptimizerConfig(**settings)
    shares = [schedule_at(config, step, total_steps) for step in range(total_steps)]
    assert shares == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_learning_rate_stays_at_its_floor_after_the_last_step(schedule):
    config = OptimizerConfig(
        learning_rate=1.0, lr_schedule=schedule, min_lr_ratio=0.1, lr_decay_steps=2 if schedule == "wsd" else 0
    )
    assert schedule_at(config, 25, 10) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("keys", "fewest_steps"),
    [
        ({}, 1),
        ({"warmup_steps": 3}, 4),
        ({"lr_schedule": "linear", "warmup_steps": 3}, 4),
        ({"lr_schedule": "wsd", "lr_decay_steps": 4}, 5),
        ({"lr_schedule": "wsd", "lr_decay_steps": 4, "warmup_steps": 3}, 8),
    ],
)
def test_a_run_that_is_too_short_for_its_peak_is_told(keys, fewest_steps):
    config = OptimizerConfig(learning_rate=1.0, **keys)
    for total_steps in range(1, 10):
        reaches_peak = max(schedule_at(config, step, total_steps) for step in range(total_steps)) == 1.0
        assert reaches_peak == (total_steps >= fewest_steps)
        assert (missed_peak(config, total_steps, key="trainer") is None) == reaches_peak


def test_a_schedule_that_is_too_long_is_named_with_its_keys():
    config = OptimizerConfig(learning_rate=0.5, lr_schedule="wsd", lr_decay_steps=4, warmup_steps=3)
    assert missed_peak(config, 7, key="critic.optimizer") == (
        "critic.optimizer.warmup_steps=3 + critic.optimizer.lr_decay_steps=4 of the run's 7 optimizer steps leave none "
        "at the peak, critic.optimizer.learning_rate=0.5; lower critic.optimizer.warmup_steps or "
        "critic.optimizer.lr_decay_steps, or raise trainer.total_steps"
    )
    said = missed_peak(OptimizerConfig(warmup_steps=2), 2, key="trainer")
    assert said.startswith("trainer.warmup_steps=2 of the run's 2 optimizer steps leave none")

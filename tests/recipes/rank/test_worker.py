"""All that a rank hosts, and the names that it is commanded by."""

import re
import threading
from pathlib import Path

import pytest
import torch
from small_workers import OPTIMIZER, ROLES, build_everyone, build_one, score, supervised_samples, train

from shardwise.config import EngineConfig
from shardwise.recipes.checkpointing.checkpoint_writer import CheckpointWriter
from shardwise.recipes.rank.background_worker import BackgroundWorker
from shardwise.recipes.rank.worker import Worker

RECIPES = Path(__file__).parents[3] / "shardwise" / "recipes"

pytestmark = pytest.mark.usefixtures("alone")


def test_close_drops_every_engine_and_another_recipe_starts_afresh(everyone):
    worker = build_everyone(everyone, {"policy": "both"})
    worker.close()
    with pytest.raises(AssertionError):
        worker.generate([])
    for role in ROLES:
        with pytest.raises(KeyError):
            worker.score([], role, True)
    build_one(worker, "policy", everyone, EngineConfig(), optimizer=OPTIMIZER)
    samples = supervised_samples()
    logprobs = torch.cat(score(worker, samples))
    assert train(worker, samples)["train/loss"].result() == pytest.approx(-float(logprobs.sum()) / 3, rel=1e-6)


def test_recipes_command_what_a_worker_has_and_a_worker_has_nothing_else():
    sources = [file.read_text(encoding="utf-8") for file in RECIPES.rglob("*.py")]
    sent = {name for source in sources for name in re.findall(r'\.(?:call|scatter|_results)\(\s*"(\w+)"', source)}
    worker = Worker(torch.device("cpu"))
    has = {name for name in dir(worker) if not name.startswith("_") and callable(getattr(worker, name))}
    beside = set(vars(BackgroundWorker(CheckpointWriter(0, links=None), threading.Event())))
    assert sent - beside <= has <= sent
    assert beside <= sent

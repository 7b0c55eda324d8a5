"""A run of a tiny model on the ranks of `run_ranks`, whose steps a test fills with faults."""

import io
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import call_store
from tiny_models import random_samples

from shardwise.config import EngineConfig, SFTConfig, UserError
from shardwise.controller.local import RankGroup, serve, serve_in_background
from shardwise.controller.process_group import Rank, connect
from shardwise.recipes.checkpointing.checkpoint_writer import CheckpointWriter
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.engines import build_engine
from shardwise.recipes.rank.worker import Worker
from shardwise.recipes.run import Run


class Position:
    """A part of a recipe that keeps something: the step."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def config_of(output_dir, model, **trainer) -> SFTConfig:
    tree = {
        "model": {"path": str(model)},
        "data": {"train_files": "rows.jsonl"},
        "trainer": {
            "output_dir": str(output_dir),
            "tensorboard": False,
            "total_steps": 6,
            "save_every_steps": 2,
            "save_retries": 0,
            "async_save": False,
            **trainer,
        },
    }
    return SFTConfig.parse(tree, origin="test")


def run_steps(output_dir, model, at_step: Callable[[int, Worker, Run], None] | None = None, **trainer):
    """Runs on this rank. Returns, on rank 0, the steps that were done, the error they ended with, if any, and what was
    said on standard error.

    Args:
        at_step: called on rank 0 after the optimizer step of every step, with its number, rank 0's worker and the
            run.
    """
    config = config_of(output_dir, model, **trainer)
    control, rank = dist.group.WORLD, Rank(dist.get_rank(), dist.get_world_size(), dist.get_rank())
    links = connect("background", rank, call_store(), timeout=timedelta(seconds=30))
    writer = CheckpointWriter(rank.rank, links)
    worker = Worker(torch.device("cpu"), writer=writer)
    if rank.rank != 0:
        writing = serve_in_background(writer, links, lambda _: None)
        serve(worker, control)
        writing.join()
        return None
    background = RankGroup(writer, links, timeout_seconds=30)
    group = RankGroup(worker, control, timeout_seconds=30, background=background)
    steps, said = [], io.StringIO()
    try:
        total_steps = config.trainer.total_steps
        engine = build_engine(
            group,
            "policy",
            EngineSource(model=config.model, layout=EngineConfig()),
            optimizer=config.trainer.optimizer_config(),
            total_steps=total_steps,
        )
        position = Position()
        with (
            redirect_stderr(said),
            Run(config, parts={"position": position}, engines={"": engine}, total_steps=total_steps) as run,
        ):
            assert position.step == run.first_step - 1
            for step in run.steps():
                steps.append(step)
                metrics = engine.train(random_samples([5, 7, 3], seed=step))
                if at_step is not None:
                    at_step(step, worker, run)
                position.step = step
                run.report(step, metrics, num_tokens=1)
        return steps, None, said.getvalue()
    except UserError as error:
        return steps, f"{type(error).__name__}: {error}", said.getvalue()
    finally:
        with suppress(RuntimeError):  # where the other rank is gone, its own error tells
            group.shutdown()

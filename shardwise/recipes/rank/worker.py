"""The object that lives on every rank: its engines, and the methods that the controller calls on them."""

import threading
from collections.abc import Callable

import torch

from shardwise.recipes.checkpointing.checkpoint_writer import CheckpointWriter
from shardwise.recipes.rank.checkpoint_files import CheckpointFiles
from shardwise.recipes.rank.hosted_engines import HostedEngines
from shardwise.recipes.rank.rollout_host import RolloutHost
from shardwise.recipes.rank.trainer import Trainer
from shardwise.recipes.rank.weight_transfer import WeightTransfer
from shardwise.transfer import Medium


class Worker:
    """What the controller commands on every rank, by the names of methods. Configs arrive as the JSON of their pydantic
    classes, because commands are plain data.

    Methods of engines are collective: the controller calls them on every rank.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        join_medium: Callable[[], Medium] | None = None,
        writer: CheckpointWriter | None = None,
        interruption: threading.Event | None = None,
    ) -> None:
        """
        Args:
            join_medium: joins the medium that carries weights to ranks that only sample; None on ranks that neither
                send nor receive.
            writer: writes the checkpoints that are staged here; None: nothing is staged.
            interruption: once another thread sets it, `generate` returns the tokens it has; `pull_weights` clears it.
        """
        interruption = interruption or threading.Event()
        self.engines = HostedEngines(device)
        self.build_engine = self.engines.build_engine
        self.load_initial_weights = self.engines.load_initial_weights

        trainer = Trainer(self.engines)
        self.use_loss = trainer.use_loss
        self.train = trainer.train
        self.skip_step = trainer.skip_step
        self.check_teacher = trainer.check_teacher
        self.divergence = trainer.divergence
        self.score = trainer.score

        self._weights = WeightTransfer(self.engines, join_medium=join_medium, interruption=interruption)
        self.sync_adapter_only = self._weights.sync_adapter_only
        self.sync_weights = self._weights.sync_weights
        self.push_weights = self._weights.push_weights
        self.pull_weights = self._weights.pull_weights
        self.measure_sync = self._weights.measure_sync
        self.measure_push = self._weights.measure_push
        self.measure_pull = self._weights.measure_pull

        rollout = RolloutHost(self.engines, self._weights, interruption=interruption)
        self.build_rollout = rollout.build_rollout
        self.generate = rollout.generate
        self.rollout_logprobs = rollout.rollout_logprobs
        self.take_restarts = rollout.take_restarts

        files = CheckpointFiles(self.engines, writer)
        self.nonfinite_tensors = files.nonfinite_tensors
        self.save = files.save
        self.stage_weights = files.stage_weights
        self.stage_state = files.stage_state
        self.load_state = files.load_state
        self.load_weights_alone = files.load_weights_alone
        self.hash_files = files.hash_files
        self.verify_files = files.verify_files
        self.sees = files.sees
        self.export_model = files.export_model

    def close(self) -> None:
        """Drops every engine, so that another recipe can build its own."""
        self.engines.close()
        self._weights.close()

"""Divides the ranks of an RL job into those that train and those that sample, and syncs weights between them."""

from dataclasses import dataclass
from typing import Any, Self

from shardwise.config import ConfigError, ModelConfig, RLConfig, Split
from shardwise.controller.base import WorkerGroup
from shardwise.recipes.background_call import BackgroundCall
from shardwise.recipes.engines import build_rollout_engines


def num_training_ranks(num_ranks: int, split: Split | None) -> int:
    """Returns how many of a job's ranks train; they are the first ones. Raises ConfigError: none would."""
    num_apart = 0 if split is None else split.num_ranks
    if num_apart >= num_ranks:
        raise ConfigError(
            f"rollout.placement.num_ranks={num_apart} leaves none of the job's {num_ranks} ranks to train; start at "
            f"least {num_apart + 1} (--nproc {num_apart + 1}), or lower it"
        )
    return num_ranks - num_apart


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a job, by what they do."""

    trainers: WorkerGroup
    rollouts: WorkerGroup
    """The ranks that sample: the trainers themselves, or others."""
    sends_delta: bool = False
    """Whether weight syncs to other ranks carry only what has changed."""
    supervises: bool = False
    """Whether rollout engines run in processes of their own."""
    num_weight_parts: int = 1
    """How many neighboring ranks are sent the weights of one rollout engine, each a part of them."""
    shares_memory: bool = False
    """Whether the rank that sends weights may write straight into the memory of the only rollout engine."""

    @classmethod
    def of(cls, group: WorkerGroup, config: RLConfig) -> Self:
        """Divides the ranks of a job according to rollout.placement."""
        split, supervises = config.rollout.split, config.rollout.engine.process is not None
        if split is None:
            num_parts = 1 if config.rollout.sync_adapter_only else config.rollout.engine.ranks_per_engine
            return cls(group, group, supervises=supervises, num_weight_parts=num_parts)
        num_trainers = num_training_ranks(group.size, split)
        return cls(
            group.part(
                0,
                num_trainers,
                timeout_seconds=config.engine.collective_timeout_seconds,
                timeout_key="engine.collective_timeout_seconds",
            ),
            group.part(
                num_trainers,
                group.size,
                timeout_seconds=split.timeout_seconds,
                timeout_key="rollout.placement.timeout_seconds",
            ),
            sends_delta=split.delta,
            supervises=supervises,
            shares_memory=split.medium == "shared_memory" and split.num_ranks == 1,
        )

    @property
    def are_split(self) -> bool:
        return self.rollouts is not self.trainers

    def interrupt_sampling(self) -> None:
        """Makes the rollout engines return what they have so far, while another thread's call to them runs."""
        assert self.rollouts.background is not None, "ranks that sample work in the background too"
        self.rollouts.background.call("interrupt")

    def build_rollout(self, model: ModelConfig, config: RLConfig) -> None:
        """Builds the rollout engines, which wait for the policy's weights."""
        lora = config.engine.lora if config.rollout.sync_adapter_only else None
        if lora is not None:
            self.trainers.call("sync_adapter_only")
        build_rollout_engines(
            self.rollouts,
            model,
            config.rollout.sampling(),
            config.engine.param_dtype,
            lora=lora,
            shares_memory=self.shares_memory,
        )

    def sync_weights(self, version: int) -> list[dict[str, Any]]:
        """Brings the policy's weights into the rollout engines, verified. Returns their SyncReceipts."""
        if not self.are_split:
            return self.trainers.call("sync_weights", version)
        receive = BackgroundCall(lambda: self.rollouts.call("pull_weights", version, self.sends_delta))
        self.trainers.call("push_weights", version, self.sends_delta)
        return receive.result()

    def seconds_per_byte(self) -> float:
        """Measures the seconds that a byte of the weights takes to the rollout engines with nothing else to do; nothing
        else may run meanwhile."""
        if not self.are_split:
            return max(self.trainers.call("measure_sync"))
        receive = BackgroundCall(lambda: self.rollouts.call("measure_pull"))
        measured = self.trainers.call("measure_push")
        receive.result()
        return max(seconds for seconds in measured if seconds is not None)

    def take_restarts(self) -> dict[str, float]:
        """Returns how often processes of rollout engines were replaced since the last call, for `Run.report`; empty if
        they have no processes of their own. Waits for what is being sampled."""
        return {"rollout/engine_restarts": sum(self.rollouts.call("take_restarts"))} if self.supervises else {}

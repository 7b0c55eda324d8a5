"""One rank's part in bringing the policy's weights to the rollout engines."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from shardwise.config import TrainingError
from shardwise.engine import raised_on_every_rank
from shardwise.fault_plan import fault_point
from shardwise.memfd import SharedTensors
from shardwise.recipes.rank.hosted_engines import POLICY, HostedEngine, HostedEngines
from shardwise.rollout import VllmEngine
from shardwise.transfer import (
    Assembly,
    DeltaDecoder,
    DeltaEncoder,
    Medium,
    SyncReceipt,
    pull_weights,
    push_weights,
    seconds_per_byte_inside,
    seconds_per_byte_sent,
    sync_local,
    take_pieces,
)


class WeightTransfer:
    """Syncs the policy's weights into the rollout engine of this rank, or over a medium to those of other ranks."""

    def __init__(
        self,
        engines: HostedEngines,
        *,
        join_medium: Callable[[], Medium] | None,
        interruption: threading.Event,
    ) -> None:
        """
        Args:
            join_medium: joins the medium that carries weights to ranks that only sample; None on ranks that neither
                send nor receive.
            interruption: interrupts sampling while it is set; `pull_weights` clears it.
        """
        self._engines = engines
        self._join_medium = join_medium
        self._interruption = interruption
        self._medium: Medium | None = None
        self._syncs_adapter_only = False
        self.memory: SharedTensors | None = None
        """The memory that holds the weights of this rank's rollout engine, if another rank may write into it."""
        self._encoder, self._decoder, self._assembly = DeltaEncoder(), DeltaDecoder(), Assembly()

    def sync_adapter_only(self) -> None:
        """Makes weight syncs bring only the policy's adapter from here on."""
        self._syncs_adapter_only = True

    def sync_weights(self, version: int) -> dict[str, Any]:
        """Brings the policy's weights into the rollout engine, verified. Returns the SyncReceipt."""
        fault_point("sync")
        return asdict(self.bring(version))

    def measure_sync(self) -> float:
        """Measures the seconds per byte of weights into this rank's rollout engine, with nothing else to do."""
        return seconds_per_byte_inside(self._engines.device)

    def measure_push(self) -> float | None:
        """Measures the seconds per byte through the medium to ranks that sample; None on ranks that send nothing."""
        medium = self._joined_medium()
        return None if medium is None else seconds_per_byte_sent(medium)

    def measure_pull(self) -> None:
        """Receives what `measure_push` sends."""
        medium = self._joined_medium()
        assert medium is not None, "this rank is no end of what carries weights"
        take_pieces(medium, is_exposed=self.memory is not None)

    def push_weights(self, version: int, delta: bool) -> dict[str, Any] | None:
        """Sends the policy's weights to the ranks that sample. Returns the SyncReceipt on the rank that sends.

        Args:
            delta: sends only what has changed if they hold the version before.
        """
        fault_point("sync")
        hosted = self._engines.take_device(POLICY, "params")
        receipt = push_weights(
            self._weights(hosted),
            self._joined_medium(),
            version=version,
            delta=self._encoder if delta else None,
            may_be_infinite=hosted.engine.buffer_names,
        )
        return None if receipt is None else asdict(receipt)

    def pull_weights(self, version: int, delta: bool) -> dict[str, Any]:
        """Loads the weights that `push_weights` sends with the same `delta`, verified. Returns the SyncReceipt."""
        fault_point("sync")
        self._interruption.clear()
        engine, medium = self._engines.rollout_engine, self._joined_medium()
        assert engine is not None
        assert medium is not None, "this rank is no end of what carries weights"
        decoder = self._decoder if delta else None
        receipt = pull_weights(
            engine, medium, version=version, delta=decoder, assembly=self._assembly, memory=self.memory
        )
        return asdict(receipt)

    def bring(self, version: int) -> SyncReceipt:
        """Brings the policy's weights into this rank's own rollout engine. Raises as `sync_local`."""
        engine = self._engines.rollout_engine
        assert engine is not None
        hosted = self._engines.take_device(POLICY, "params")
        engine.wake("weights")
        receipt = sync_local(self._weights(hosted), engine, version=version, may_be_infinite=hosted.engine.buffer_names)
        self._engines.synced_version = version
        return receipt

    def close(self) -> None:
        """Forgets what belongs to the engines that are dropped."""
        self._syncs_adapter_only, self.memory = False, None
        self._encoder, self._decoder = DeltaEncoder(), DeltaDecoder()

    def _joined_medium(self) -> Medium | None:
        """Returns the medium, which is joined at the first sync, when all its ends take part."""
        if self._medium is None and self._join_medium is not None:
            self._medium = self._join_medium()
        return self._medium

    def _weights(self, hosted: HostedEngine) -> Iterator[tuple[str, torch.Tensor]]:
        """Streams what this rank's rollout engine needs of the policy's weights, or all of it."""
        rollout, dtype = self._engines.rollout_engine, getattr(torch, hosted.config.param_dtype)
        if self._syncs_adapter_only:
            return hosted.engine.adapter_weights(dtype)
        if isinstance(rollout, VllmEngine) and rollout.is_part:
            with raised_on_every_rank(TrainingError):  # else others would wait; loading has no collectives
                needed = rollout.needed_regions()
            return hosted.engine.needed_weights(dtype, needed)
        return hosted.engine.named_weights(dtype)

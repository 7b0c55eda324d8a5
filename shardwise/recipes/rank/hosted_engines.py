"""The engines of one rank, and how they share its device."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.config import DataError, EngineConfig, FrozenEngineConfig, OptimizerConfig, UserError
from shardwise.data import ImageReader
from shardwise.engine import Part, TrainEngine, raised_on_every_rank
from shardwise.ops import release_cached_blocks
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.losses import SFT_LOSS, Loss, LossSource
from shardwise.rollout import EmbeddedEngine, RolloutEngine
from shardwise.types import TokenBatch

POLICY = "policy"
"""The role of the engine whose weights the rollout engine serves."""
OF_MAIN_SECTION = (POLICY, "student", "reward model")
"""Roles whose engine has its options under `engine`, where its errors say they are."""


@dataclass(slots=True)
class HostedEngine:
    """An engine of this rank, its loss, and how it shares the device with the others."""

    engine: TrainEngine
    source: EngineSource
    reader: ImageReader | None = None
    """Reads images for the model; None if it sees none."""
    loss: Loss = SFT_LOSS
    loss_source: LossSource = field(default_factory=LossSource)

    @property
    def config(self) -> EngineConfig | FrozenEngineConfig:
        return self.source.layout

    @property
    def options(self) -> dict[str, Any]:
        """Options of a forward pass that the loss needs."""
        return {
            "temperature": self.source.temperature,
            "with_logprobs": self.loss.with_logprobs,
            "with_entropy": self.loss.with_entropy,
        }

    def read(self, batches: list[TokenBatch], *, whole: bool = False) -> list[TokenBatch]:
        """Collective. Returns the batches with those of their images read that this rank looks at.

        Args:
            whole: reads all images.
        Raises:
            DataError: on every rank: a rank has an image that cannot be decoded.
        """
        if self.reader is None:
            return batches
        with raised_on_every_rank(DataError):
            return [self._read(self.reader, batch, whole) if batch.image_refs else batch for batch in batches]

    def read_in_turn(self, batches: list[TokenBatch]) -> Iterator[TokenBatch]:
        """Yields what `read` returns, and reads each batch when it is asked for: of many, two are held at
        a time."""
        return (read for batch in batches for read in self.read([batch]))

    def _read(self, reader: ImageReader, batch: TokenBatch, whole: bool) -> TokenBatch:
        own = range(len(batch.image_refs)) if whole else self.engine.own_images(batch.image_refs)
        images = reader.read(batch.image_refs[own.start : own.stop]) if own else None
        return replace(batch, images=images, image_refs=[] if len(own) == len(batch.image_refs) else batch.image_refs)

    @property
    def parts_to_offload(self) -> list[Part]:
        """The parts that leave the device while the engine does not work."""
        parts: list[Part] = ["params"] if self.config.param_offload else []
        if isinstance(self.config, EngineConfig) and self.config.optimizer_offload:
            parts.append("optimizer")
        return parts


class HostedEngines:
    """One rank's engines, each with a role: policy, critic, reference and so on; and its rollout engine.

    While one of them works, the parts named by param_offload and optimizer_offload are off the device: those of all
    other engines, and its own that it does not need.

    Example: `engines.take_device("critic", "params").engine.forward(batches)`
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rollout_engine: RolloutEngine | None = None
        """None on a rank that does not sample."""
        self.synced_version: int | None = None
        """Version of the last sync into this rank's own rollout engine; None once the policy is trained further."""
        self._by_role: dict[str, HostedEngine] = {}

    def __getitem__(self, role: str) -> HostedEngine:
        return self._by_role[role]

    def build_engine(
        self,
        role: str,
        source: str,
        optimizer: str = "",
        total_steps: int = 1,
        with_trained: bool = True,
    ) -> tuple[int, ...]:
        """Builds the engine that an EngineSource describes.

        Args:
            optimizer: an OptimizerConfig for a trained engine; "" for a frozen one.
            total_steps: optimizer steps of the whole run, for the learning-rate schedule.
            with_trained: as for `TrainEngine.build`.
        Returns:
            The number of its parameters, the number of trained ones, and the bytes of weights that this rank read.
        """
        self.clear_device()
        opened = EngineSource.model_validate_json(source)
        with _naming(role):
            built = opened.build(
                self.device,
                optimizer=OptimizerConfig.model_validate_json(optimizer) if optimizer else None,
                total_steps=total_steps,
                with_trained=with_trained,
            )
        self._by_role[role] = HostedEngine(built, opened, ImageReader.load_unless_unusable(Path(opened.model.path)))
        return built.num_parameters, built.num_trained_parameters, built.num_bytes_read

    def load_initial_weights(self, role: str) -> int:
        """See `TrainEngine.load_initial_weights`. Returns the bytes of weights that this rank has read."""
        engine = self.take_device(role, "params").engine
        with _naming(role):
            engine.load_initial_weights()
        return engine.num_bytes_read

    def take_device(self, role: str, *parts: Part) -> HostedEngine:
        """Makes room for an engine that works with these parts of it, and brings them to the device."""
        self.clear_device(role, *parts)
        if self.rollout_engine is not None:
            self.rollout_engine.sleep()
        hosted = self._by_role[role]
        hosted.engine.onload(*parts)
        return hosted

    def clear_device(self, working: str = "", *parts: Part) -> None:
        """Offloads everything but these parts of the working engine. Also releases cached memory if the rollout engine
        has its own allocator, though not before training, which would allocate it again at once."""
        for role, hosted in self._by_role.items():
            leaving = [part for part in hosted.parts_to_offload if role != working or part not in parts]
            if leaving:
                hosted.engine.offload(*leaving)
        if "optimizer" not in parts and not isinstance(self.rollout_engine, EmbeddedEngine | None):
            release_cached_blocks()

    def close(self) -> None:
        """Drops every engine, so that another recipe can build its own."""
        if self.rollout_engine is not None:
            self.rollout_engine.close()
        self._by_role, self.rollout_engine, self.synced_version = {}, None, None


@contextmanager
def _naming(role: str) -> Iterator[None]:
    """Inside, errors name this role's engine if it may have its options from `engine` without being of that section."""
    try:
        yield
    except UserError as error:
        if role not in OF_MAIN_SECTION:
            error.args = (f"the {role}, which has the options of `engine` unless it is given its own: {error}",)
        raise

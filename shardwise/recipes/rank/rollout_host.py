"""The rollout engine of one rank: built, kept awake while it samples, and asked."""

import threading
from dataclasses import replace
from pathlib import Path

import torch

from shardwise.config import LoraConfig, ModelConfig, SamplingConfig
from shardwise.controller.watchdog import go_on
from shardwise.data import ImageReader
from shardwise.fault_plan import fault_point
from shardwise.ops import release_cached_blocks
from shardwise.recipes.rank.hosted_engines import HostedEngines
from shardwise.recipes.rank.rollout_engines import build_rollout
from shardwise.recipes.rank.weight_transfer import WeightTransfer
from shardwise.recipes.sampling.sampled_tokens import with_spans
from shardwise.rollout import EmbeddedEngine, RolloutEngine, SupervisedEngine
from shardwise.types import Completion, GenerateRequest, ImageRef, Images


class RolloutHost:
    """Samples on this rank, and scores with what samples."""

    def __init__(self, engines: HostedEngines, weights: WeightTransfer, *, interruption: threading.Event) -> None:
        """
        Args:
            weights: brings the weights again that sleeping has dropped.
            interruption: once another thread sets it, `generate` returns the tokens it has.
        """
        self._engines = engines
        self._weights = weights
        self._interruption = interruption
        self._reader: ImageReader | None = None

    def build_rollout(
        self, model: str, rollout: str, param_dtype: str, lora: str = "", shares_memory: bool = False
    ) -> None:
        """Builds this rank's rollout engine from the model folder, as a SamplingConfig says.

        Args:
            lora: a LoraConfig if weight syncs bring the adapter alone; "" if they bring the whole model.
            shares_memory: the rank that sends weights may write straight into the engine's memory, if the engine can
                share it.
        """
        self._engines.clear_device()
        release_cached_blocks()  # an engine in another process takes free memory
        config, device = ModelConfig.model_validate_json(model), self._engines.device
        self._reader = ImageReader.load_unless_unusable(Path(config.path))
        engine = build_rollout(
            config,
            SamplingConfig.model_validate_json(rollout),
            dtype=getattr(torch, param_dtype),
            device=device,
            lora=LoraConfig.model_validate_json(lora) if lora else None,
        )
        self._engines.rollout_engine = engine
        if shares_memory and isinstance(engine, EmbeddedEngine) and device.type == "cpu":
            self._weights.memory = engine.share_weights()

    def generate(self, requests: list[GenerateRequest]) -> list[list[Completion]]:
        """Returns completions of this rank's share of the requests; some are unfinished if `interruption` was set."""
        fault_point("rollout")
        requests = [self._seen(request) for request in requests]
        groups = self._awake().generate(
            requests, on_finished=lambda _: go_on(), is_interrupted=self._interruption.is_set
        )
        return [with_spans(request, group) for request, group in zip(requests, groups, strict=True)]

    def take_restarts(self) -> int:
        """Returns how often the rollout engine's process was replaced since the last call; 0 if it has no process of
        its own."""
        engine = self._engines.rollout_engine
        return engine.take_restarts() if isinstance(engine, SupervisedEngine) else 0

    def rollout_logprobs(self, sequences: list[list[int]], image_refs: list[list[ImageRef]]) -> list[list[float]]:
        """Returns the rollout engine's logprobs, at temperature 1, of the tokens after the first of each sequence.

        Args:
            image_refs: the images of each sequence.
        """
        return self._awake().logprobs(sequences, [self._images(refs) for refs in image_refs])

    def _seen(self, request: GenerateRequest) -> GenerateRequest:
        """Returns the request with its images read."""
        if not request.image_refs:
            return request
        return replace(request, images=self._images(request.image_refs), image_refs=[])

    def _images(self, image_refs: list[ImageRef]) -> Images | None:
        if not image_refs:
            return None
        assert self._reader is not None, f"{image_refs[0].name}: nothing here reads images"
        return self._reader.read(image_refs)

    def _awake(self) -> RolloutEngine:
        """Returns the rollout engine, after giving it the device. If sleeping has dropped the weights of the last sync,
        they are synced again, on all ranks alike."""
        engine, version = self._engines.rollout_engine, self._engines.synced_version
        assert engine is not None
        if engine.lacks_weights and version is not None:
            self._weights.bring(version)
        self._engines.clear_device()
        engine.wake("weights", "kv_cache")
        return engine

"""What an engine is built from, as plain data that is sent to ranks and kept in bundles of skipped steps."""

from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from shardwise.config import EngineConfig, FrozenEngineConfig, ModelConfig, OptimizerConfig
from shardwise.engine import HeadName, TrainEngine


class EngineSource(BaseModel):
    """A model folder, its layout over the ranks, and what is computed with it.

    Example: `EngineSource(model=ModelConfig(path="Qwen/Qwen3-0.6B"), layout=EngineConfig())`
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig
    layout: EngineConfig | FrozenEngineConfig
    """An EngineConfig is trained, a FrozenEngineConfig is not."""
    head: HeadName = "logprobs"
    pad_token_id: int | None = None
    """The tokenizer's, for the head sequence_scores."""
    turn_end_id: int | None = None
    """A token that the model learns to end turns with and that its configs do not let end a completion; those of
    exports do."""
    seed: int = 0
    """Seeds new adapters, and the rounding of bfloat16 masters."""
    temperature: float = 1.0
    """Temperature of the distribution that logprobs are taken from."""

    def build(
        self,
        device: torch.device,
        *,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 1,
        require_finite: bool = True,
        with_trained: bool = True,
    ) -> TrainEngine:
        """Builds the engine; see `TrainEngine.build`."""
        engine = TrainEngine.build(
            Path(self.model.path),
            self.layout,
            device=device,
            optimizer=optimizer,
            total_steps=total_steps,
            head=self.head,
            pad_token_id=self.pad_token_id,
            seed=self.seed,
            require_finite=require_finite,
            with_trained=with_trained,
        )
        if self.turn_end_id is not None:
            engine.end_completions_at(self.turn_end_id)
        return engine

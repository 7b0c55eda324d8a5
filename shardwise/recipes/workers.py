"""What lives on every rank: engines, and the methods the controller calls on them."""

from pathlib import Path

import torch

from shardwise.config import (
    AlgorithmConfig,
    EngineConfig,
    FrozenEngineConfig,
    GenerationConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
)
from shardwise.data import load_tokenizer
from shardwise.engine import LossFn, Part, TrainEngine, convert_folder
from shardwise.recipes.losses import policy_loss, sft_loss
from shardwise.rollout import EmbeddedEngine, RolloutEngine
from shardwise.transfer import sync_local
from shardwise.types import Completion, Denominators, GenerateRequest, Metrics, TokenBatch, TokenOutputs


class Worker:
    """One rank's engines. Configs arrive as the JSON of their pydantic classes, because commands are plain data.

    Methods of engines are collective: the controller calls them on every rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._policy: TrainEngine | None = None
        self._reference: TrainEngine | None = None
        self._rollout: RolloutEngine | None = None
        self._policy_parts: list[Part] = []
        self._lora: LoraConfig | None = None
        self._reference_parts: list[Part] = []
        self._loss_fn: LossFn = sft_loss
        self._dtype = torch.float32
        self._temperature = 1.0

    def build_policy(self, model: str, engine: str, optimizer: str, total_steps: int, seed: int) -> tuple[int, ...]:
        """Builds the trained policy.

        Returns:
            Its parameters, those of them that are trained, and the bytes of weights that this rank read.
        """
        config = EngineConfig.model_validate_json(engine)
        self._policy = TrainEngine.build(
            Path(ModelConfig.model_validate_json(model).path),
            config,
            device=self._device,
            optimizer=OptimizerConfig.model_validate_json(optimizer),
            total_steps=total_steps,
            seed=seed,
        )
        self._dtype = getattr(torch, config.param_dtype)
        self._policy_parts = _parts_to_offload(config)
        self._lora = config.lora
        return self._policy.num_parameters, self._policy.num_trained_parameters, self._policy.num_bytes_read

    def build_reference(self, model: str, engine: str) -> None:
        """Builds the frozen reference policy."""
        config = FrozenEngineConfig.model_validate_json(engine)
        self._reference = TrainEngine.build(
            Path(ModelConfig.model_validate_json(model).path), config, device=self._device
        )
        self._reference_parts = _parts_to_offload(config)
        self._reference.offload(*self._reference_parts)

    def build_rollout(self, model: str, rollout: str, param_dtype: str) -> None:
        """Builds this rank's rollout engine from the model folder, as a GenerationConfig says."""
        folder = Path(ModelConfig.model_validate_json(model).path)
        config = GenerationConfig.model_validate_json(rollout)
        match config.engine:
            case "embedded":
                self._rollout = EmbeddedEngine.from_folder(
                    folder,
                    dtype=getattr(torch, param_dtype),
                    max_rows=config.max_concurrent_sequences,
                    device=self._device,
                )

    def use_policy_loss(self, algorithm: str, temperature: float) -> None:
        """Trains with the policy loss of an AlgorithmConfig instead of cross-entropy, on logprobs at `temperature`."""
        self._loss_fn = policy_loss(AlgorithmConfig.model_validate_json(algorithm))
        self._temperature = temperature

    def train(self, batches: list[TokenBatch], denominators: Denominators) -> Metrics:
        """One optimizer step on this rank's micro-batches."""
        assert self._policy is not None
        self._policy.onload("params", "optimizer")
        metrics = self._policy.forward_backward(
            batches,
            self._loss_fn,
            denominators,
            temperature=self._temperature,
            with_entropy=self._loss_fn is not sft_loss,
        )
        return metrics | self._policy.optim_step()

    def policy_logprobs(self, batches: list[TokenBatch]) -> list[torch.Tensor]:
        """[T] logprobs of every micro-batch under the current policy."""
        assert self._policy is not None
        self._policy.onload("params")
        return _logprobs(self._policy.forward(batches, temperature=self._temperature))

    def reference_logprobs(self, batches: list[TokenBatch]) -> list[torch.Tensor]:
        """[T] logprobs of every micro-batch under the reference policy: an engine of its own, or the policy without its
        adapters."""
        if self._reference is None:
            assert self._policy is not None
            self._policy.onload("params")
            return _logprobs(self._policy.forward(batches, temperature=self._temperature, with_adapters=False))
        self._release_policy()
        self._reference.onload("params")
        logprobs = _logprobs(self._reference.forward(batches, temperature=self._temperature))
        self._reference.offload(*self._reference_parts)
        return logprobs

    def generate(self, requests: list[GenerateRequest]) -> list[list[Completion]]:
        """Completions of this rank's share of the requests."""
        assert self._rollout is not None
        self._release_policy()
        return self._rollout.generate(requests)

    def sync_weights(self, version: int) -> int:
        """Brings the policy's weights into the rollout engine, verified. Returns the bytes moved on this rank."""
        assert self._policy is not None
        assert self._rollout is not None
        self._policy.onload("params")
        receipt = sync_local(self._policy, self._rollout, version=version, dtype=self._dtype)
        return receipt.num_bytes

    def save_weights(self, checkpoint: str, model: str) -> None:
        """Writes the policy into a checkpoint folder: hf/, and adapter/ where it has one."""
        assert self._policy is not None
        self._policy.onload("params")
        config, folder = ModelConfig.model_validate_json(model), Path(checkpoint)
        if self._lora is None or self._lora.save_merged:
            self._policy.export_hf(folder / "hf", load_tokenizer(config))
        if self._lora is not None:
            self._policy.export_adapter(folder / "adapter", config.path)

    def export_model(self, model: str, adapter: str, target: str, dtype: str, max_shard_size: str) -> None:
        """Loads a model folder, and an adapter folder if one is named, and writes them in `dtype`; builds no engine."""
        config = ModelConfig.model_validate_json(model)
        convert_folder(
            Path(config.path),
            Path(target),
            load_tokenizer(config),
            getattr(torch, dtype),
            max_shard_size=max_shard_size,
            device=self._device,
            adapter=Path(adapter) if adapter else None,
        )

    def _release_policy(self) -> None:
        """What engine.param_offload and engine.optimizer_offload name leaves the device while another engine works."""
        if self._policy is not None:
            self._policy.offload(*self._policy_parts)

    def close(self) -> None:
        """Drops every engine, so that another recipe can build its own."""
        self._policy = self._reference = self._rollout = self._lora = None
        self._policy_parts, self._reference_parts = [], []
        self._loss_fn, self._temperature = sft_loss, 1.0


def _parts_to_offload(config: EngineConfig | FrozenEngineConfig) -> list[Part]:
    """What leaves the device while another engine works."""
    parts: list[Part] = ["params"] if config.param_offload else []
    return [*parts, "optimizer"] if isinstance(config, EngineConfig) and config.optimizer_offload else parts


def _logprobs(outputs: list[TokenOutputs]) -> list[torch.Tensor]:
    return [out.logprobs for out in outputs if out.logprobs is not None]

"""One model, sharded with fully_shard, and its optimizer. Knows nothing of algorithms, rollouts or controllers."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from shardwise.config import EngineConfig, OptimizerConfig
from shardwise.engine.mesh import ParallelDims
from shardwise.engine.model import PolicyModel, build_sharded
from shardwise.engine.optimizer import ShardedOptimizer
from shardwise.engine.weights import export_folder, full_weights, num_parameters
from shardwise.ops import PackedLayout
from shardwise.types import Denominators, Metrics, MetricValue, TokenBatch, TokenOutputs, merge_metrics

LossFn = Callable[[TokenOutputs, TokenBatch, Denominators], tuple[Tensor, Metrics]]
"""Maps one micro-batch to its share of the step's loss (already divided by the global denominators)."""


class TrainEngine:
    """A sharded causal language model. Without an optimizer it is a frozen engine (a reference or a reward model).

    Every method is collective: all ranks of the mesh call it with the same number of micro-batches.
    """

    def __init__(
        self,
        model: PolicyModel,
        optimizer: ShardedOptimizer | None,
        *,
        device: torch.device,
        export_dtype: torch.dtype,
        num_bytes_read: int,
    ) -> None:
        self._model = model
        self._root_unit = cast(FSDPModule, model)
        """The same object: fully_shard adds methods to it that its class does not show."""
        self._optimizer = optimizer
        self._device = device
        self._export_dtype = export_dtype
        self.num_bytes_read = num_bytes_read
        """Bytes of weights that this rank read from disk."""
        self.num_parameters = num_parameters(model)

    @classmethod
    def build(
        cls,
        folder: Path,
        config: EngineConfig,
        *,
        device: torch.device,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 1,
    ) -> Self:
        """Builds the engine from a model folder on an initialized process group.

        Args:
            optimizer: None builds a frozen engine.
            total_steps: optimizer steps of the whole run, for the learning-rate schedule.
        Raises:
            ConfigError: the layout does not fit the world size. ModelError: the folder cannot be loaded.
        """
        dims = ParallelDims.from_sizes(
            world_size=dist.get_world_size(), fsdp_size=config.fsdp_size, ulysses_size=config.ulysses_size
        )
        model, num_bytes = build_sharded(
            folder, config, dims.mesh(device.type), device=device, trainable=optimizer is not None
        )
        return cls(
            model,
            ShardedOptimizer(model, optimizer, total_steps=total_steps) if optimizer is not None else None,
            device=device,
            export_dtype=getattr(torch, config.param_dtype),
            num_bytes_read=num_bytes,
        )

    @torch.no_grad()
    def forward(
        self, batches: Sequence[TokenBatch], *, temperature: float = 1.0, with_entropy: bool = False
    ) -> list[TokenOutputs]:
        """Logprobs of every micro-batch, on the host; entropy (else 0) costs another pass over the logits."""
        outputs = []
        for batch in batches:
            result = self._run(batch, batch.to(self._device), temperature, with_entropy)
            outputs.append(TokenOutputs(logprobs=result.logprobs.cpu(), entropy=result.entropy.cpu()))
        self._root_unit.reshard()  # the root keeps its weights gathered for a backward pass that does not follow
        return outputs

    def forward_backward(
        self,
        batches: Sequence[TokenBatch],
        loss_fn: LossFn,
        denominators: Denominators,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> Metrics:
        """Accumulates the gradient of one optimizer step.

        Gradients are reduced over ranks after every micro-batch, so that a rank never holds more than its shard of them
        between two; waiting for the last one would spare communication at the price of the whole gradient on each rank.
        A batch without samples still runs forward and backward: every rank must enter every collective.

        Returns:
            The metrics of `loss_fn` merged over the micro-batches of this rank, and its share of train/loss.
        """
        parts: list[Metrics] = []
        for index, batch in enumerate(batches):
            self._root_unit.set_is_last_backward(index == len(batches) - 1)
            on_device = batch.to(self._device)
            outputs = self._run(batch, on_device, temperature, with_entropy)
            loss, metrics = loss_fn(outputs, on_device, denominators)
            loss.backward()
            parts.append({**metrics, "train/loss": MetricValue.sum(loss.detach())})
        return {name: value.host() for name, value in merge_metrics(parts).items()}

    def optim_step(self) -> Metrics:
        """Clips, steps, clears the gradients; skips the update where a gradient is not finite."""
        assert self._optimizer is not None, "a frozen engine has no optimizer"
        return self._optimizer.step()

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, full tensor) on every rank, one tensor at a time, in the same order everywhere."""
        return full_weights(self._model.causal_lm, dtype)

    def export_hf(self, path: Path, tokenizer: Any) -> None:
        """Writes a folder that `AutoModelForCausalLM.from_pretrained` loads, in the compute dtype."""
        export_folder(self._model.causal_lm, tokenizer, path, self._export_dtype)

    def _run(self, batch: TokenBatch, on_device: TokenBatch, temperature: float, with_entropy: bool) -> TokenOutputs:
        """`batch` is the host's copy: what is counted is counted there, so that nothing waits for the device."""
        scored = batch.loss_mask.nonzero()[:, 0]
        logprobs, entropy = self._model(
            on_device.input_ids,
            on_device.position_ids,
            PackedLayout.from_cu_seqlens(batch.cu_seqlens, device=self._device),
            scored.to(self._device, non_blocking=True),
            temperature=temperature,
            with_entropy=with_entropy,
        )
        return TokenOutputs(logprobs=logprobs, entropy=entropy)

"""AdamW on sharded parameters: groups, learning-rate schedule, clipping, and the guard against non-finite gradients."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shardwise.config import OptimizerConfig, TrainingError
from shardwise.types import Metrics, MetricValue


def learning_rate_at(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step` (from 0) out of `total_steps`.

    Warm-up rises as (step + 1) / (warmup_steps + 1), so that the first step already learns; linear and cosine then fall
    to min_lr_ratio at the last step; wsd stays and falls linearly over the last lr_decay_steps (Hu et al. 2024).
    """
    peak, floor = config.learning_rate, config.learning_rate * config.min_lr_ratio
    if step < config.warmup_steps:
        return peak * (step + 1) / (config.warmup_steps + 1)
    match config.lr_schedule:
        case "constant":
            return peak
        case "wsd":
            progress = (step - (total_steps - 1 - config.lr_decay_steps)) / config.lr_decay_steps
            return peak - (peak - floor) * min(1.0, max(0.0, progress))
        case "linear" | "cosine":
            progress = (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps)
            progress = min(1.0, progress)
            shape = progress if config.lr_schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
            return peak - (peak - floor) * shape


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices are decayed; embeddings, norms and biases are not."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in trained if p.dim() >= 2 and id(p) not in embeddings]
    kept = [p for p in trained if p.dim() < 2 or id(p) in embeddings]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


class ShardedOptimizer:
    """AdamW over the shards of a model, with everything that belongs to one step."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, *, total_steps: int) -> None:
        self._config = config
        self._total_steps = total_steps
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._adamw = torch.optim.AdamW(
            parameter_groups(model, config.weight_decay),
            lr=config.learning_rate,
            betas=config.adam_betas,
            eps=config.adam_eps,
            fused=True,
        )
        self.loss_scale = 1.0
        self.num_steps = 0
        """Steps asked for so far, skipped ones included."""
        self._num_nonfinite_in_a_row = 0

    def step(self) -> Metrics:
        """Clips, updates unless a gradient is not finite on any rank, and clears the gradients.

        Raises:
            TrainingError: `max_nonfinite_steps` steps in a row were skipped.
        """
        learning_rate = learning_rate_at(self._config, self.num_steps, self._total_steps)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        norm = global_grad_norm(self._parameters)
        finite = math.isfinite(norm)
        if finite:
            self._clip(norm)
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.num_steps += 1
        self._num_nonfinite_in_a_row = 0 if finite else self._num_nonfinite_in_a_row + 1
        if self._num_nonfinite_in_a_row >= self._config.max_nonfinite_steps:
            raise TrainingError(
                f"the gradient norm was {norm} in {self._num_nonfinite_in_a_row} optimizer steps in a row "
                f"(trainer.max_nonfinite_steps={self._config.max_nonfinite_steps}); no weight was changed by them. "
                "Lower trainer.learning_rate, or look at the data of these steps"
            )
        return {
            "train/grad_norm": MetricValue.mean(norm if finite else 0.0, float(finite)),
            "train/learning_rate": MetricValue.max(learning_rate),
            "train/nonfinite_fraction": MetricValue.mean(float(not finite), 1),
        }

    def _clip(self, norm: float) -> None:
        limit = self._config.max_grad_norm
        if limit is not None and norm > limit:
            local = [_local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
            torch._foreach_mul_(local, limit / norm)


def global_grad_norm(parameters: list[nn.Parameter]) -> float:
    """Collective. The L2 norm of the whole gradient, the same number on every rank; not finite if any element is not.

    One all-reduce over the axis that shards; replicas hold equal gradients already.
    """
    local = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    norms = torch.stack(torch._foreach_norm(local, 2, dtype=torch.float32))
    square = norms.double().square().sum()
    sharded = parameters[0]
    if isinstance(sharded, DTensor):
        for axis, placement in enumerate(sharded.placements):
            if isinstance(placement, Shard):
                dist.all_reduce(square, group=sharded.device_mesh.get_group(axis))
    return math.sqrt(square.item()) if torch.isfinite(square) else square.sqrt().item()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

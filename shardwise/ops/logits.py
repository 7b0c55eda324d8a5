"""From hidden states to logits: the projection in float32, and what a model family does to logits afterwards."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

_FACTORS = ("logit_scale", "lm_head_multiplier")
_DIVISOR = "logits_scaling"
_CAP = "final_logit_softcapping"


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """logits -> softcap * tanh(logits * scale / softcap), as the model's config asks for it."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Reads the attributes Hugging Face configs use: final_logit_softcapping (Gemma 2), logit_scale (Cohere, a
        factor), lm_head_multiplier (Falcon-H1, a factor) and logits_scaling (Granite, a divisor; HyperCLOVA X, a
        factor)."""
        scale = next((value for key in _FACTORS if (value := getattr(config, key, None))), 1.0)
        scaling = getattr(config, _DIVISOR, None) or 1.0
        scale *= scaling if config.model_type == "hyperclovax" else 1 / scaling
        return cls(scale, getattr(config, _CAP, None))

    @classmethod
    def keys_of(cls, config: Any) -> list[str]:
        """Returns the attributes that `from_config` reads and that change the logits of this config."""
        values = {key: getattr(config, key, None) for key in (*_FACTORS, _DIVISOR, _CAP)}
        return [key for key, value in values.items() if value and (key == _CAP or value != 1)]

    def forward_(self, logits: Tensor) -> Tensor:
        """Transforms logits [..., V] float32 in place."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            torch.tanh_(logits.div_(self.softcap)).mul_(self.softcap)
        return logits

    def backward_(self, grad: Tensor, transformed: Tensor) -> Tensor:
        """Turns the gradient of the transformed logits, in place, into that of the logits; `transformed` is what
        `forward_` returned."""
        if self.softcap is not None:
            grad.mul_(1 - (transformed / self.softcap).square_())
        return grad.mul_(self.scale) if self.scale != 1.0 else grad


def project_float32(states: Tensor, weight: Tensor) -> Tensor:
    """states [N, D] @ weight [V, D]^T -> [N, V] float32, never rounded to the compute dtype: bfloat16 logits would cost
    0.03 nats at a logit of 8, and trainer and rollout would disagree by as much."""
    if states.is_cuda and states.dtype != torch.float32:
        return torch.mm(states, weight.t(), out_dtype=torch.float32)
    return states.float() @ weight.float().t()


def repeated_projection(weight: Tensor) -> Tensor:
    """Returns a weight for many calls of `project_float32`, with the same result: it is converted to float32 once,
    where each call would convert it. Does not follow later changes of `weight`."""
    return weight if weight.is_cuda else weight.float()

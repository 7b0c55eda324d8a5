"""Rotary frequencies that depend on the batch, and up to which length they do not.

With rope_type longrope (Ding et al. 2024) and dynamic (NTK scaling), transformers chooses the frequencies of all
positions by the largest one that it is given: of a pack in training, of the rows that are decoded together in the
rollout. A sequence beyond the limit would change the numbers of its neighbours; up to it the frequencies (and the scale
of longrope) are always the same.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RotaryLimit:
    """The longest sequence that is computed the same in every batch."""

    num_tokens: int
    key: str
    """Of config.json, what sets it."""
    rope_type: str

    @property
    def reason(self) -> str:
        return (
            f"with rope_type {self.rope_type} the rotary frequencies of longer sequences depend on the longest one of "
            "a batch"
        )

    def refusal(self, num_tokens: int) -> str | None:
        """A sentence against a sequence of `num_tokens`, None for one within the limit."""
        if num_tokens <= self.num_tokens:
            return None
        return (
            f"a sequence of {num_tokens} tokens is longer than the {self.num_tokens} of {self.key} in config.json, and "
            f"{self.reason}; use shorter ones"
        )


def rotary_limit(config: Any) -> RotaryLimit | None:
    """The lowest limit of all kinds of layers; None where no frequency depends on the batch.

    Args:
        config: transformers' config of the language model.
    """
    limits = []
    for kind in _rope_parameters(config):
        match kind.get("rope_type"):
            case "longrope":
                key = "original_max_position_embeddings"
                limits.append(RotaryLimit(kind[key], key, "longrope"))
            case "dynamic":
                limits.append(RotaryLimit(config.max_position_embeddings, "max_position_embeddings", "dynamic"))
    return min(limits, key=lambda limit: limit.num_tokens, default=None)


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Some families have one set of parameters for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]

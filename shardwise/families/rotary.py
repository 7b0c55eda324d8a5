"""Rotary frequencies that depend on the batch, and the length up to which they do not.

With rope_type longrope (Ding et al. 2024) and dynamic (NTK scaling), transformers chooses the frequencies of all
positions by the largest position it is given: in training that of a pack, in the rollout that of the rows decoded
together. A sequence beyond the limit would change the numbers of its neighbors; up to the limit the frequencies (and
the scale of longrope) are always the same.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RotaryLimit:
    """The length up to which a sequence is computed the same in every batch."""

    num_tokens: int
    key: str
    """The key of config.json that sets the limit."""
    rope_type: str

    @property
    def reason(self) -> str:
        return (
            f"with rope_type {self.rope_type} the rotary frequencies of longer sequences depend on the longest one of "
            "a batch"
        )

    def refusal(self, num_tokens: int) -> str | None:
        """Returns a sentence that refuses a sequence of `num_tokens`, None if it is within the limit."""
        if num_tokens <= self.num_tokens:
            return None
        return (
            f"a sequence of {num_tokens} tokens is longer than the {self.num_tokens} of {self.key} in config.json, and "
            f"{self.reason}; use shorter ones"
        )


def rotary_limit(config: Any) -> RotaryLimit | None:
    """Returns the lowest limit of all kinds of layers; None if no frequency depends on the batch.

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


def context_of(config: Any) -> tuple[int | None, str]:
    """Returns (the longest sequence that a language model was made for, the key of config.json that says so); None if
    none does. With rope_type yarn it is at least what the frequencies were made for: who adds it to a config.json as
    Qwen's model cards say leaves max_position_embeddings as it was.

    Args:
        config: transformers' config of the language model.
    """
    key = "max_position_embeddings"
    limits = {key: getattr(config, key, None)}
    for kind in _rope_parameters(config):
        made_for = kind.get(f"original_{key}", 0) * kind.get("factor", 0)
        if kind.get("rope_type") == "yarn" and made_for and limits[key] is not None:
            limits[f"original_{key} x factor"] = int(made_for)
    longest = max(limits, key=lambda name: limits[name] or 0)
    return limits[longest], longest


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """All sets of rotary parameters: some families have one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]

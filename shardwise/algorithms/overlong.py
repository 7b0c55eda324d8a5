"""The penalty for completions that come close to the token limit.

Shape letters: N samples of a step.
"""

from torch import Tensor


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float) -> Tensor:
    """Returns what is added to the reward of a long completion: 0 up to max_tokens - buffer_tokens, then falling
    linearly to -factor at max_tokens: min(-(length - (max_tokens - buffer_tokens)) / buffer_tokens * factor, 0).

    Args:
        lengths: [N] int64, response tokens of each completion, including what was answered between its turns.
        max_tokens: the most tokens a completion can have.
        buffer_tokens: over how many tokens the penalty grows, 1..max_tokens.
        factor: the penalty at max_tokens, positive.
    Returns:
        [N] float32, -factor..0; -factor for completions longer than max_tokens.
    Raises:
        ValueError: buffer_tokens out of range.
    Source: Yu et al. 2025 (DAPO), eq. 13, with a factor of 1.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens={buffer_tokens} with max_tokens={max_tokens}: use 1 to {max_tokens}")
    excess = (lengths - (max_tokens - buffer_tokens)).float() / buffer_tokens
    return -factor * excess.clamp(0.0, 1.0)

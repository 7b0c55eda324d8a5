"""Rewards for the length of a completion."""

from typing import Any, Literal

Unit = Literal["tokens", "words", "characters"]


def overlong_penalty(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    max_length: int,
    buffer: int,
    factor: float = 1.0,
    unit: Unit = "tokens",
) -> float:
    """Returns 0 up to max_length - buffer; from there it falls linearly, to -factor at max_length and on beyond it.

    Args:
        max_length: where the penalty is -factor; for DAPO, rollout.max_response_tokens.
        buffer: how far below max_length the penalty begins.
        unit: tokens are those of the policy, the end-of-sequence token included.
    Source: Yu et al. 2025 (DAPO), eq. 13, as in verl: min(-(length - (max_length - buffer)) / buffer * factor, 0).
        Differs from the equation: it falls on beyond max_length, where only words and characters can get.
    Raises:
        ValueError: a buffer that is not from 1 to max_length, or an unknown unit.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer={buffer} must be from 1 to max_length={max_length}")
    return min(-(length_of(solution_str, extra_info, unit) - (max_length - buffer)) / buffer * factor, 0.0)


def target_length(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    target: int,
    tolerance: int,
    unit: Unit = "tokens",
) -> float:
    """Returns 1.0 at the target length, falling linearly to 0.0 where the length is `tolerance` away from it.

    Raises:
        ValueError: a tolerance below 1, or an unknown unit.
    """
    if tolerance < 1:
        raise ValueError(f"tolerance={tolerance} must be at least 1")
    return max(0.0, 1.0 - abs(length_of(solution_str, extra_info, unit) - target) / tolerance)


def length_of(text: str, extra_info: dict[str, Any] | None, unit: Unit) -> int:
    """Returns the length of a completion, in `unit`.

    Raises:
        ValueError: an unknown unit, or tokens where extra_info holds no num_response_tokens, which recipes put there.
    """
    match unit:
        case "characters":
            return len(text)
        case "words":
            return len(text.split())
        case "tokens":
            if not extra_info or "num_response_tokens" not in extra_info:
                raise ValueError("unit=tokens needs num_response_tokens in extra_info; use words or characters")
            return int(extra_info["num_response_tokens"])
        case _:
            raise ValueError(f"unit={unit!r} is not known; use tokens, words or characters")

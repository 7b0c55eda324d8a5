"""A reward against completions that say the same again and again."""

from typing import Any


def ngram_repetition(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    n: int = 4,
    penalty: float = 1.0,
) -> float:
    """Returns -penalty times the share of n-grams that occurred earlier in the text; 0 where there is no n-gram.

    Args:
        n: number of words in an n-gram; words are in lower case, split at white space.
    Raises:
        ValueError: n is below 1.
    Source: Yeo et al. 2025 (Demystifying Long Chain-of-Thought), section 4.3, as one number for the whole text:
        1 - distinct n-grams / n-grams.
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1")
    words = solution_str.lower().split()
    ngrams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    return -penalty * (1 - len(set(ngrams)) / len(ngrams)) if ngrams else 0.0

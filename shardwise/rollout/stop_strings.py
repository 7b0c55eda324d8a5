"""Where completions end because of what they say."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

Decode = Callable[[list[int]], str]

_MAX_TOKENS_PER_CHAR = 4
"""Byte-level tokens may be single bytes of a character."""


def brings_stop(token_ids: Sequence[int], stop: Sequence[str], decode: Decode) -> bool:
    """Whether the text of the last tokens holds one of the stop strings."""
    tail = decode(list(token_ids[-_num_holding(reversed(token_ids), stop, decode) :]))
    return any(text in tail for text in stop)


def first_stop_across(
    begun: Sequence[int], token_ids: Sequence[int], stop: Sequence[str], decode: Decode
) -> int | None:
    """How many of `token_ids` are there when the text has a stop string that may have begun before them; None: it does
    not. Those that begin later are an engine's to find."""
    for count in range(1, _num_holding(token_ids, stop, decode) + 1):
        if brings_stop([*begun, *token_ids[:count]], stop, decode):
            return count
    return None


def before_stop(text: str, stop: Sequence[str]) -> str:
    """What was said before the first stop string; all of it where there is none."""
    return text[: min((place for string in stop if (place := text.find(string)) >= 0), default=len(text))]


def _num_holding(token_ids: Iterable[int], stop: Sequence[str], decode: Decode) -> int:
    """How many of these tokens, from the first on, hold all of a stop string that begins or ends there. Decoding skips
    special tokens, which therefore do not count."""
    num_left, count = _MAX_TOKENS_PER_CHAR * max(map(len, stop)), 0
    for token_id in token_ids:
        count += 1
        num_left -= _has_text(decode, token_id)
        if num_left == 0:
            break
    return count


@lru_cache(1 << 18)
def _has_text(decode: Decode, token_id: int) -> bool:
    return decode([token_id]) != ""

"""Where completions end because of what they say."""

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

_MAX_TOKENS_PER_CHAR = 4
"""Byte-level tokens may be single bytes of a character."""


def brings_stop(token_ids: Sequence[int], stop: Sequence[str], decode: Decode) -> bool:
    """Whether the text of the last tokens holds one of the stop strings."""
    tail = decode(list(token_ids[-_num_tail(stop) :]))
    return any(text in tail for text in stop)


def first_stop_across(
    begun: Sequence[int], token_ids: Sequence[int], stop: Sequence[str], decode: Decode
) -> int | None:
    """How many of `token_ids` are there when the text has a stop string that may have begun before them; None: it does
    not. Those that begin later are an engine's to find."""
    for count in range(1, min(len(token_ids), _num_tail(stop)) + 1):
        if brings_stop([*begun, *token_ids[:count]], stop, decode):
            return count
    return None


def _num_tail(stop: Sequence[str]) -> int:
    """Tokens that hold all of a stop string."""
    return _MAX_TOKENS_PER_CHAR * max(map(len, stop))

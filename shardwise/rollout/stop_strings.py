"""Stop strings: where completions end because of their text."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain

Decode = Callable[[list[int]], str]

_MAX_TOKENS_PER_CHAR = 4
"""A UTF-8 character has up to 4 bytes, and a byte-level token may be a single one."""


def brings_stop(token_ids: Sequence[int], stop: Sequence[str], decode: Decode, *, begun: Sequence[int] = ()) -> bool:
    """Whether the text of the last tokens contains one of the stop strings, which may have begun in `begun`, the tokens
    before them. The time that it takes depends on the strings, and not on how many tokens there are."""
    count = _num_holding(chain(reversed(token_ids), reversed(begun)), stop, decode)
    before = max(0, count - len(token_ids))
    tail = decode([*begun[len(begun) - before :], *token_ids[-count:]])
    return any(text in tail for text in stop)


def first_stop(
    token_ids: Sequence[int], stop: Sequence[str], decode: Decode, *, begun: Sequence[int] = ()
) -> int | None:
    """Returns after how many of `token_ids` their text contains one of the stop strings, which may have begun in
    `begun`, the tokens before them; None if it never does."""
    tail = list(begun[len(begun) - _num_holding(reversed(begun), stop, decode) :])

    def is_stopped(count: int) -> bool:
        text = decode([*tail, *token_ids[:count]])
        return any(string in text for string in stop)

    counts = range(1, len(token_ids) + 1)
    return bisect_left(counts, True, key=is_stopped) + 1 if counts and is_stopped(len(token_ids)) else None


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Returns the text before the first stop string; all of it if there is none."""
    return text[: min((place for string in stop if (place := text.find(string)) >= 0), default=len(text))]


def _num_holding(token_ids: Iterable[int], stop: Sequence[str], decode: Decode) -> int:
    """Returns how many of these tokens, counted from the first, are enough to contain any stop string that begins or
    ends there. Decoding skips special tokens, so they do not count towards its length."""
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

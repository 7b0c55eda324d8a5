"""Rewards for the form of a completion, whatever it says."""

import functools
import re
from typing import Any


def pattern_match(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    pattern: str | None = None,
    tags: list[str] | None = None,
) -> float:
    """Returns 1.0 where the whole solution has a form, given as a regular expression or as tags.

    A pattern that backtracks without end is ended by reward.timeout_seconds, as a failure.

    Args:
        pattern: must match the whole text, up to white space around it; `.` matches line breaks too.
        tags: names; the score is the share of them that occur exactly once as `<name>` and, after it, as `</name>`.
    Raises:
        ValueError: both or neither of the two are given, tags are no list, or the pattern is no regular expression.
    """
    if isinstance(tags, str):
        raise ValueError(f"tags={tags!r} is a text, whose letters would be the tags; give a list")
    if (pattern is None) == (not tags):
        raise ValueError(f"pattern={pattern!r} and tags={tags!r}: give one of the two")
    if pattern is not None:
        return float(_compiled(pattern).fullmatch(solution_str.strip()) is not None)
    assert tags
    return sum(_stands_once(tag, solution_str) for tag in tags) / len(tags)


def _stands_once(tag: str, text: str) -> bool:
    opening, closing = f"<{tag}>", f"</{tag}>"
    return text.count(opening) == text.count(closing) == 1 and text.index(opening) < text.index(closing)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern={pattern!r} is no regular expression: {error}") from None

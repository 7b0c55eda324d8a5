"""Reads what user code returned as a score: finite numbers, whatever type they have."""

import math
import numbers
import reprlib
from collections.abc import Mapping
from typing import Any

from shardwise.rewards.user_code import one_line, writable


def read_score(returned: Any) -> dict[str, Any]:
    """Reads what a reward function returned: a finite number (bool and numpy scalars count), or a dict with "score".

    The other finite numbers of a dict become parts; entries that are no finite number are left out.
    """
    score, parts = returned, {}
    if isinstance(returned, dict):
        if "score" not in returned:
            keys = one_line(", ".join(map(str, returned)))
            return {"failure": f'returned a dict without "score" (its keys: {keys or "none"})'}
        score = returned["score"]
        parts = finite_numbers({key: value for key, value in returned.items() if key != "score"})
    number = finite_number(score)
    if number is None:
        where = ' as "score"' if isinstance(returned, dict) else ""
        return {"failure": f'returned {_show(score)}{where}, expected a finite number or a dict with a finite "score"'}
    return {"score": number, "parts": parts}


def finite_numbers(values: Mapping[Any, Any]) -> dict[str, float]:
    """Returns those of the values that are finite numbers, by name."""
    numbers_by_name = {writable(str(name)): finite_number(value) for name, value in values.items()}
    return {name: number for name, number in numbers_by_name.items() if number is not None}


def finite_number(value: Any) -> float | None:
    """Returns the value as a finite number (bool and numpy scalars count); None where it is none."""
    # numpy's bool and torch's 0-d tensors are numbers only through item().
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _show(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None and shape != ():
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    text = one_line(reprlib.repr(value))
    return text if value is None or isinstance(value, numbers.Real) else f"the {type(value).__name__} {text}"

"""Reward functions for answers that are a number or a formula. Each has verl's signature and gives 1.0 or 0.0."""

import re
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(
    r"""(?:(?<![\w)\].])(?P<sign>[-+\u2212]))?  # a sign, not the operator of 7-5 or 7 - 5
        \\?\$?                                 # $ or LaTeX's \$
        (?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)
        (?P<exponent>[eE][-+\u2212]?[0-9]{1,3}(?!\w))?""",
    re.VERBOSE,
)
_PLAIN = str.maketrans("\u2212", "-", ",")
"""Turns what _NUMBER finds into what Decimal reads: the typographic minus sign becomes a hyphen, commas are removed."""
_DELIMITED = re.compile(r"(?<!\\)\$.*(?<!\\)\$|\\boxed", re.DOTALL)
"""Finds out whether text itself marks where its formula is; \\$ is a currency."""
_MARKER = "####"
_MATH_VERIFY_SECONDS = 3
"""The limit on one parse or one comparison. A completion can hold a formula that sympy never finishes; that is a wrong
answer, not a broken reward function, so it must end before reward.timeout_seconds does."""


def gsm8k_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """Returns 1.0 where the final number is the right one, in the format of GSM8K.

    The answer is the first number after the last `####`, or the last number where there is no `####`; the same rule
    reads `ground_truth`. Commas, `$`, a final dot and which minus sign is written do not matter.

    Raises:
        ValueError: ground_truth holds no number.
    """
    expected = _gsm8k_answer(str(ground_truth))
    if expected is None:
        raise ValueError(f"ground_truth {ground_truth!r} holds no number, which gsm8k_score compares with")
    return float(_gsm8k_answer(solution_str) == expected)


def number_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """Returns 1.0 where the last number of the solution equals the last number of `ground_truth`.

    Raises:
        ValueError: ground_truth holds no number.
    """
    expected = _numbers(str(ground_truth))
    if not expected:
        raise ValueError(f"ground_truth {ground_truth!r} holds no number, which number_match compares with")
    return float(_numbers(solution_str)[-1:] == expected[-1:])


def exact_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """Returns 1.0 where the solution is `ground_truth`, up to white space around them."""
    return float(solution_str.strip() == str(ground_truth).strip())


def math_verify_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """Returns 1.0 where math-verify finds the solution's final formula equal to `ground_truth` (as 1/2 and 0.5 are).

    Must run in the main thread of a process, as it does in a RewardPool: math-verify bounds its time by signals.

    Args:
        ground_truth: LaTeX or plain, such as `\\frac{1}{2}`, `0.5` or `\\$18.90`, with `$...$` or `\\boxed{...}`
            around it or not.
    Raises:
        ValueError: ground_truth holds no formula that math-verify can read.
    """
    # math-verify imports sympy, half a second that only the users of this function should pay.
    from math_verify import parse, verify

    truth = str(ground_truth).strip()
    delimited = [one if _DELIMITED.search(one) else f"\\boxed{{{one}}}" for one in _spellings(truth)]
    expected = [one for text in delimited for one in parse(text, parsing_timeout=_MATH_VERIFY_SECONDS)]
    if not truth or not expected:
        raise ValueError(f"ground_truth {ground_truth!r} holds no formula that math-verify can read")
    answer = parse(solution_str, parsing_timeout=_MATH_VERIFY_SECONDS)
    return float(verify(expected, answer, timeout_seconds=_MATH_VERIFY_SECONDS))


def _spellings(truth: str) -> list[str]:
    """How math-verify is told a formula. In a number as Python writes 0.00001, 1e-05, it reads Euler's e; and it finds
    602 followed by 21 zeros equal to no product with a power of ten, so such a number is told in both ways."""
    number = _NUMBER.fullmatch(truth)
    if number is None or number["exponent"] is None:
        return [truth]
    digits, _, exponent = truth.lower().translate(_PLAIN).partition("e")
    return [_plain(_numbers(truth)[0]), f"{digits} \\times 10^{{{int(exponent)}}}"]


def final_answer(text: str) -> str:
    """Returns the answer that a completion settles on, in one spelling, so that equal ones can be counted (majority
    vote).

    It is the content of the last `\\boxed{...}`; without one, the number that `gsm8k_score` reads; without a number,
    the whole text, stripped. A number is written plainly: `1,234.50` becomes `1234.5`.
    """
    _, box, rest = text.rpartition("\\boxed{")
    if box:
        inside = _until_closing_brace(rest).strip()
        is_number = _NUMBER.fullmatch(inside) is not None
        return _plain(_numbers(inside)[0]) if is_number else inside
    number = _gsm8k_answer(text)
    return text.strip() if number is None else _plain(number)


def _until_closing_brace(text: str) -> str:
    depth = 1
    for place, char in enumerate(text):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth == 0:
            return text[:place]
    return text


def _plain(number: Decimal) -> str:
    whole, dot, fraction = f"{number.copy_abs():f}".partition(".")  # all digits; arithmetic would round to 28 of them
    digits = whole + (dot + fraction).rstrip("0").removesuffix(".")
    return f"-{digits}" if number < 0 else digits


def _gsm8k_answer(text: str) -> Decimal | None:
    _, marker, answer = text.rpartition(_MARKER)
    found = _numbers(answer)
    if not found:
        return None
    return found[0] if marker else found[-1]


def _numbers(text: str) -> list[Decimal]:
    return [
        Decimal(f"{match['sign'] or ''}{match['digits']}{match['exponent'] or ''}".translate(_PLAIN))
        for match in _NUMBER.finditer(text)
    ]

"""Rewards for programs: runs a completion's code against tests, in the sandbox."""

import re
import secrets
from collections.abc import Iterator
from typing import Any

from shardwise.rewards.sandbox import Limits, Outcome, run_python

_PYTHON = frozenset({"python", "python3", "py"})
_OPENING = re.compile(
    r"""(?P<indentation>[ \t]*(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)*)   # markers of list items too
        (?P<fence>`{3,}(?=[^`]*$)|~{3,})[ \t]*(?P<language>\S*).*""",
    re.VERBOSE,
)
_CLOSING = re.compile(r"(?P<indentation>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*")
_TAB_STOP = 4
"""CommonMark's tab stop, in columns; a closing fence that is indented by so much more than the opening one is text."""


def run_python_tests(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    partial: bool = False,
    timeout_seconds: float = 5.0,
    memory_mib: int = 1024,
    disk_mib: int = 64,
    num_processes: int = 16,
    output_kib: int = 1024,
    allow_unsafe: bool = False,
) -> dict[str, float]:
    """Runs the program in the last fenced block of Python in the solution (see `last_block`) against tests.

    To asserts the program is a module that was imported: what stands under `if __name__ == "__main__"` does not run.
    They run in its process, after its code: a program that reads its own memory can pretend to have passed them.
    Expected outputs never enter the sandbox. Set reward.timeout_seconds above timeout_seconds times the number of tests
    with an input (or 1), plus a second for each.

    Args:
        ground_truth: asserts as text or as a list of texts, each text one test; or a list of {stdin, stdout}, each a
            run of its own, whose output must be equal up to white space at the ends of lines and of the text.
        partial: whether the score is the share of tests that passed; else it is 1.0 where all passed, and 0.0 if not.
        timeout_seconds: the limit on one run.
        memory_mib, num_processes: address space of each process, and processes at a time.
        allow_unsafe: whether to run programs even where protections of the sandbox are missing.
    Returns:
        score; passed, the share of tests that passed; runs, 1.0 where the code itself ran to its end in time. A
        solution without such a block has no program and scores 0.
    Raises:
        ValueError: ground_truth is neither form of tests, or empty.
        ConfigError: the sandbox cannot be built here, and allow_unsafe is false.
    """
    limits = Limits(
        wall_seconds=timeout_seconds,
        cpu_seconds=max(1, int(timeout_seconds)),
        memory_bytes=memory_mib << 20,
        disk_bytes=disk_mib << 20,
        num_processes=num_processes,
        output_bytes=output_kib << 10,
    )
    asserts, pairs = read_tests(ground_truth)
    program = last_block(solution_str)
    if program is None:
        return {"score": 0.0, "passed": 0.0, "runs": 0.0}
    if asserts:
        runs, num_passed = _run_asserts(program, asserts, limits, allow_unsafe)
    else:
        outcomes = [run_python(program, stdin=given, limits=limits, allow_unsafe=allow_unsafe) for given, _ in pairs]
        runs = all(outcome.exit_code == 0 for outcome in outcomes)
        num_passed = sum(
            outcome.exit_code == 0 and _lines(outcome.stdout) == _lines(expected)
            for outcome, (_, expected) in zip(outcomes, pairs, strict=True)
        )
    passed = num_passed / len(asserts or pairs)
    return {"score": passed if partial else float(passed == 1.0), "passed": passed, "runs": float(runs)}


def read_tests(ground_truth: Any) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the tests as asserts and as pairs of input and output; one of the two lists is empty.

    Raises:
        ValueError: ground_truth holds neither, or is empty.
    """
    tests = [ground_truth] if isinstance(ground_truth, str) else ground_truth
    if isinstance(tests, list) and tests:
        if all(isinstance(test, str) and test.strip() for test in tests):
            return tests, []
        if all(isinstance(test, dict) and {"stdin", "stdout"} <= test.keys() for test in tests):
            return [], [(_text(test["stdin"]), _text(test["stdout"])) for test in tests]
    raise ValueError(
        "ground_truth holds no tests: run_python_tests needs asserts as text, a list of them, or a list of "
        '{"stdin": ..., "stdout": ...}'
    )


def _text(value: Any) -> str:
    return "" if value is None else str(value)  # parquet fills keys that a row lacks with null


def last_block(text: str) -> str | None:
    """Returns the content of the last closed block tagged python, python3 or py; without one, of the last block that
    has no language tag; None where there is neither.

    Fences are those of CommonMark: three or more backticks or tildes, closed by as many or more of the same. Unlike
    there, they may be indented by any amount, and a block that is not closed does not count. A block loses as much
    indentation as its opening fence has.
    """
    blocks = list(_blocks(text))
    tagged = [inside for language, inside in blocks if language in _PYTHON]
    programs = tagged or [inside for language, inside in blocks if not language]
    return programs[-1] if programs else None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yields (language in lower case, content) of every closed block."""
    opening, block = None, list[str]()
    for line in re.split(r"\r?\n", text):  # str.splitlines also splits at characters that string literals hold
        if opening is None:
            opening, block = _OPENING.fullmatch(line), []
        elif _closes(line, opening):
            yield opening["language"].lower(), "\n".join(block) + "\n"
            opening = None
        else:
            block.append(_dedented(line, _width(opening["indentation"])))


def _closes(line: str, opening: re.Match[str]) -> bool:
    closing = _CLOSING.fullmatch(line)
    return (
        closing is not None
        and closing["fence"].startswith(opening["fence"])
        and _width(closing["indentation"]) < _width(opening["indentation"]) + _TAB_STOP
    )


def _width(indentation: str) -> int:
    return len(indentation.expandtabs(_TAB_STOP))


def _dedented(line: str, columns: int) -> str:
    """Returns the line without so many columns of its indentation, or without all of it where it has fewer."""
    column = place = 0
    while column < columns and line[place : place + 1] in (" ", "\t"):
        column += _TAB_STOP - column % _TAB_STOP if line[place] == "\t" else 1
        place += 1
    return " " * (column - columns) + line[place:]  # what is left of a tab


def _run_asserts(program: str, asserts: list[str], limits: Limits, allow_unsafe: bool) -> tuple[bool, int]:
    # Only lines with a word that the program does not know count, so that ending early or printing passes no test.
    word = secrets.token_hex(16)
    lines = [
        "import sys, types",
        "program = sys.modules['program'] = types.ModuleType('program')",
        f"exec(compile({program!r}, 'program', 'exec'), program.__dict__)",
        f"print('\\n{word} ran', flush=True)",
    ]
    for number, test in enumerate(asserts):
        lines += [
            "try:",
            f"    exec({test!r}, program.__dict__)",
            "except BaseException as error:",
            "    pass",
            "else:",
            f"    print('\\n{word} {number}', flush=True)",
        ]
    outcome: Outcome = run_python("\n".join(lines) + "\n", limits=limits, allow_unsafe=allow_unsafe)
    said = set(_lines(outcome.stdout))
    return f"{word} ran" in said, sum(f"{word} {number}" in said for number in range(len(asserts)))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]

"""The main loop of a reward process: reads jobs from one pipe, answers on another, one JSON object per line.

    nothing  ->  {"ready": its process id}
    {"skip": 4}  ->  nothing, where job 4 has not begun
    {"job": 3, "function": 0, "arguments": {"data_source": ..., ...}}  ->  {"job": 3, "score": 1.0, "parts": {}}
                                                          {"job": 3, "failure": "ValueError: ... (rules.py line 12)"}

Where a function cannot work on this machine at all, it says {"error": "why"} and ends. Standard output is not part of
the protocol, so whatever user code prints cannot break it.
"""

import functools
import inspect
import io
import json
import math
import numbers
import os
import reprlib
import select
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.config import ConfigError
from shardwise.rewards.base import (
    RewardFunction,
    describe_error,
    kind_of_callable,
    load_function,
    one_line,
    writable,
)
from shardwise.rewards.format import pattern_match
from shardwise.rewards.length import overlong_penalty, target_length
from shardwise.rewards.repetition import ngram_repetition

_READ_BYTES = 1 << 16
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The keyword arguments that every function is called with."""
_INSTEAD = {
    "class": "name a function, or an object of the class that can be called",
    "coroutine function": "name a function (def) that runs it with asyncio.run",
    "generator": "return the score, do not yield it",
}
"""Kind of something that is no function -> what errors tell the user to do instead."""
_OF_THE_COMPLETION_ALONE = (pattern_match, overlong_penalty, target_length, ngram_repetition)
"""Built-in functions that score an empty completion too, whatever the row is, unless their parameters are wrong."""


def work(functions: Sequence[RewardFunction], job_fd: int, result_fd: int) -> None:
    """Serves jobs until the job pipe ends.

    Consumes: job lines. Waits for: the next one. Unblocked by: the parent closing the pipe.

    Args:
        job_fd, result_fd: the pipes to read from and to write to.
    """
    with os.fdopen(job_fd, "rb", buffering=0) as jobs, os.fdopen(result_fd, "wb") as results:

        def send(message: dict[str, Any]) -> None:
            results.write(json.dumps(message).encode() + b"\n")
            results.flush()

        send({"ready": os.getpid()})
        try:
            for message in _messages(jobs):
                send({"job": message["job"], **judge(functions[message["function"]], message["arguments"])})
        except ConfigError as error:
            send({"error": str(error)})


def load_with_parameters(spec: str, parameters: dict[str, Any]) -> RewardFunction:
    """Loads a function and binds `parameters` to it, beside the arguments that each call gives.

    Raises:
        ConfigError: as `load_function`, or a call of it would give no score (`kind_of_callable`), or it takes no such
            parameter, or needs one that is not given, or is a built-in that cannot score with these parameters.
    """
    function = load_function(spec)
    if (kind := kind_of_callable(function)) != "function":
        raise ConfigError(f"reward.functions={spec} is a {kind}, which returns no score; {_INSTEAD[kind]}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return functools.partial(function, **parameters)
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS), **parameters)
    except TypeError as error:
        raise ConfigError(
            f"reward.functions={spec}: cannot be called with {', '.join([*ARGUMENTS, *parameters])}: {error}; "
            f"it is {spec.rpartition(':')[2]}{signature}"
        ) from None
    bound = functools.partial(function, **parameters)
    if any(function is known for known in _OF_THE_COMPLETION_ALONE):
        empty = {"data_source": "", "solution_str": "", "ground_truth": None, "extra_info": {"num_response_tokens": 0}}
        if "failure" in (answer := judge(bound, empty)):
            raise ConfigError(f"reward.functions={spec} cannot work with parameters={parameters}: {answer['failure']}")
    return bound


def judge(function: RewardFunction, arguments: dict[str, Any]) -> dict[str, Any]:
    """Calls the function; returns {"score": ..., "parts": ...} or {"failure": why there is no score}.

    Raises:
        ConfigError: the function can score no completion at all on this machine.
    """
    try:
        return read_score(function(**arguments))
    except ConfigError:
        raise
    # sys.exit() in a reward function is the failure of one call, not the end of the process.
    except BaseException as error:
        return {"failure": describe_error(error)}


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


def _messages(jobs: io.FileIO) -> Iterator[dict[str, Any]]:
    """Yields the jobs to do. It reads all that has arrived before it yields the next: jobs may have to be skipped."""
    waiting: list[dict[str, Any]] = []
    unread = b""
    ready = select.poll()
    ready.register(jobs, select.POLLIN)
    while True:
        while not waiting or ready.poll(0):
            data = jobs.read(_READ_BYTES)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for message in map(json.loads, lines):
                if "skip" in message:
                    waiting = [job for job in waiting if job["job"] != message["skip"]]
                else:
                    waiting.append(message)
        yield waiting.pop(0)

"""Reward functions: loaded with their parameters, and called."""

import functools
import inspect
from typing import Any

from shardwise.config import ConfigError
from shardwise.rewards.base import RewardFunction
from shardwise.rewards.format import pattern_match
from shardwise.rewards.length import overlong_penalty, target_length
from shardwise.rewards.repetition import ngram_repetition
from shardwise.rewards.scores import read_score
from shardwise.rewards.user_code import describe_error, kind_of_callable, load_function

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
        if "failure" in (answer := call_function(bound, empty)):
            raise ConfigError(f"reward.functions={spec} cannot work with parameters={parameters}: {answer['failure']}")
    return bound


def call_function(function: RewardFunction, arguments: dict[str, Any]) -> dict[str, Any]:
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

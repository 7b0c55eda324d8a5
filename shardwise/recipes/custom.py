"""Functions of the user's own in place of built-in ones: the config keys that take them, and checks of what they
return.

Shape letters: those of the built-in functions, P pairs, and V' words of a vocabulary chunk.
"""

import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor

from shardwise.config import (
    Config,
    ConfigError,
    Custom,
    DistillConfig,
    PreferenceConfig,
    RewardModelConfig,
    RLConfig,
    TrainingError,
    UserError,
)
from shardwise.recipes.stragglers import without_busy
from shardwise.rewards import describe_error, kind_of_callable, load_function
from shardwise.types import Metrics, MetricValue

_CORRECTION = ("old_logprobs", "rollout_logprobs", "loss_mask")

ARGUMENTS: Mapping[type[Config], Mapping[str, tuple[str, ...]]] = {
    RLConfig: {
        "algorithm.advantage": ("token_rewards", "loss_mask", "group_ids"),
        "algorithm.policy_loss": ("logprobs", "old_logprobs", "advantages", "loss_mask", "cu_seqlens"),
        "algorithm.aggregation": ("losses", "loss_mask", "cu_seqlens", "denominators"),
        "algorithm.kl_estimator": ("logprobs", "ref_logprobs"),
        "algorithm.kl_controller": ("kl_coef", "kl", "num_samples"),
        "algorithm.rollout_correction.weights": _CORRECTION,
        "algorithm.rollout_correction.rejection": _CORRECTION,
        "critic.value_loss": ("values", "old_values", "returns", "loss_mask"),
    },
    PreferenceConfig: {"loss": ("sums", "ref_sums", "lengths")},
    RewardModelConfig: {"loss": ("scores", "margins")},
    DistillConfig: {"distillation.divergence": ("student_logprobs", "teacher_logprobs")},
}
"""Command -> key that takes an import path -> what the function is called with before its parameters."""

OF_LABELLED_ANSWERS = ("sums", "ref_sums", "lengths", "desirable", "kl")
"""What a preference loss is called with if answers are not paired."""

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "algorithm.advantage": ("values", "ref_logprobs", "old_logprobs", "rollout_logprobs", "reward_parts"),
    "algorithm.policy_loss": ("ref_logprobs", "rollout_logprobs"),
}
"""Key -> what a custom function also gets by keyword if its signature names it and the run has it."""

_OF_EVERY_RUN = "step|data|load|save|seconds|tokens_per_second|train|val"
_OF_RL = f"{_OF_EVERY_RUN}|advantage|reward|rollout|staleness|sync|tokens"
_TAKEN: Mapping[str, re.Pattern[str]] = {
    "algorithm.policy_loss": re.compile(
        rf"({_OF_RL}|critic)(/.*)?|policy/(entropy|kl_coef|logprob|perplexity|ref_kl|teacher_kl)"
    ),
    "critic.value_loss": re.compile(  # its engine's train/ metrics are under critic/
        rf"({_OF_RL}|policy)(/.*)?|critic/(empty_steps|explained_variance|grad_norm|learning_rate(/.*)?|loss|loss_scale"
        r"|nonfinite_fraction|nonfinite_loss_fraction|num_sequences|num_tokens|router/.*|\w+_imbalance|\w+_slowest_rank)"
    ),
    "loss": re.compile(rf"({_OF_EVERY_RUN})(/.*)?|(.*/)?loss"),  # val/ and the last part in validation, beside val/loss
}
"""Key of a loss -> names of metrics that others report in the same step."""

_HOW = (
    "values need critic, ref_logprobs algorithm.kl_coef, old_logprobs several optimizer steps for a rollout batch or "
    "algorithm.rollout_correction"
)


@dataclass(frozen=True, slots=True)
class CustomFunction:
    """A function of the user's own, bound to its parameters. What it returns goes through one of the checks below.

    Example: `CustomFunction.load(Custom(function="rules.py:mine"), key="algorithm.advantage")`
    """

    key: str
    """Its key in the config."""
    spec: str
    """Its import path."""
    function: Callable[..., Any]
    parameters: Mapping[str, Any]

    @classmethod
    def load(cls, chosen: Custom, *, key: str, expected: str = "a function") -> Self:
        """Imports it; raises ConfigError as `load_function` does."""
        function = load_function(chosen.function, key=key, expected=expected)
        return cls(key, chosen.function, function, chosen.parameters)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls the function. Raises TrainingError if the function raises anything but a UserError (names its line),
        changes a tensor that it was given (by one of torch's in-place operations), or returns a tensor that is not
        dense or is on another device."""
        given = dict(enumerate(arguments)) | named
        versions = {name: value._version for name, value in given.items() if isinstance(value, Tensor)}
        try:
            returned = self.function(*arguments, **named, **self.parameters)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise TrainingError(f"{self.key}={self.spec} failed: {describe_error(error)}") from error
        changed = [name for name, version in versions.items() if given[name]._version != version]
        if changed:
            raise TrainingError(
                f"{self.key}={self.spec} changed its argument {self._name_of(changed[0])} in place, and others read "
                "that too; change a clone of it"
            )
        devices = {str(value.device) for value in given.values() if isinstance(value, Tensor)}
        for part in returned if isinstance(returned, tuple) else (returned,):
            if not isinstance(part, Tensor):
                continue
            if part.layout != torch.strided or part.is_nested:
                kind = "nested" if part.is_nested else str(part.layout)
                raise self._error(f"a tensor of layout {kind}", "a dense one (torch.strided), as to_dense() makes")
            if devices and str(part.device) not in devices:
                raise self._error(f"a tensor on {part.device}", f"one on {min(devices)}, like what it was given")
        return returned

    def _name_of(self, argument: int | str) -> str:
        """Returns the function's name for an argument; its number if it has none."""
        if isinstance(argument, str):
            return argument
        parameters = []
        with suppress(ValueError):  # a C function without a signature
            parameters = list(inspect.signature(self.function).parameters.values())
        named = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        return named[argument] if argument < len(named) else f"number {argument + 1}"

    def asked(self, there: Collection[str]) -> list[str]:
        """Returns which of `EXTRAS` its signature names, except those that this run lacks and that have a default, or
        that the config gives.

        Args:
            there: those that this run has.
        Raises:
            ConfigError: it needs one that this run lacks.
        """
        try:
            signature = inspect.signature(self.function).parameters
        except ValueError:  # a C function without a signature asks for nothing
            return []
        extras = EXTRAS.get(self.key, ())
        named = [name for name in extras if name in signature and name not in self.parameters]
        for name in named:
            if name not in there and signature[name].default is inspect.Parameter.empty:
                raise ConfigError(
                    f"{self.key}={self.spec} asks for {name}, which this run does not have; it has "
                    f"{', '.join(extra for extra in extras if extra in there)} ({_HOW})"
                )
        return [name for name in named if name in there]

    def tensor(
        self,
        returned: Any,
        shape: torch.Size,
        *,
        meaning: str,
        is_mask: bool = False,
        graph_of: Tensor | None = None,
        finite_at: Tensor | None = None,
    ) -> Tensor:
        """Returns what the function returned, if it is a tensor of `shape`.

        Args:
            meaning: meaning of its elements, for errors.
            is_mask: requires bool.
            graph_of: if this tensor has a graph, the returned one must have one too.
            finite_at: bool of `shape`: where its elements must be finite.
        Raises:
            TrainingError: it is something else.
        """
        expected = f"a {'bool ' if is_mask else ''}tensor of shape {list(shape)}, {meaning}"
        if not isinstance(returned, Tensor):
            raise self._error(_kind(returned), expected)
        if returned.shape != shape:
            raise self._error(f"a tensor of shape {list(returned.shape)}", expected)
        if returned.is_complex() or (is_mask and returned.dtype != torch.bool):
            raise self._error(f"a tensor of {returned.dtype}", expected)
        if graph_of is not None and graph_of.requires_grad and not returned.requires_grad:
            raise self._error("a tensor without a graph back to what it was given", expected)
        if finite_at is not None and not returned[finite_at].isfinite().all():
            raise self._error("a tensor with elements that are not finite", expected)
        return returned

    def losses(self, returned: Any, *, like: Tensor, each: str) -> tuple[Tensor, Metrics]:
        """Returns what the function returned, if it is losses of the shape of `like`, [T] or [P], and metrics.

        Args:
            like: what the losses are computed from; if it has a graph, they must have one too.
            each: what each loss belongs to ("token", "pair" or "answer"), for errors.
        Raises:
            TrainingError: it is something else.
        """
        expected = f"(losses of shape {list(like.shape)}, one for each {each}, and a dict of MetricValues by name)"
        match returned:
            case tuple((losses, metrics)) if isinstance(losses, Tensor) and isinstance(metrics, Mapping):
                pass
            case _:
                raise self._error(_kind(returned), expected)
        if losses.shape != like.shape:
            raise self._error(f"losses of shape {list(losses.shape)}", expected)
        if losses.is_complex():
            raise self._error(f"losses of {losses.dtype}", expected)
        if like.requires_grad and not losses.requires_grad:
            raise self._error("losses without a graph back to what they were given", expected)
        checked: Metrics = {}
        for name, value in metrics.items():
            self._require_name(name)
            if not isinstance(value, MetricValue):
                raise self._error(f"the metric {name} as {_kind(value)}", expected)
            for part in (value.total, value.count):
                if not _is_number(part):
                    what = f"a tensor of shape {list(part.shape)}" if isinstance(part, Tensor) else _kind(part)
                    raise self._error(f"the metric {name} with {what} in it", "single numbers, such as mask.sum()")
            checked[name] = replace(value, total=_detached(value.total), count=_detached(value.count))
        if self.key == "loss":
            self._require_apart(checked)
        return losses, checked

    def number(self, returned: Any, *, meaning: str) -> float:
        """Returns what the function returned, if it is a finite number of at least 0; else raises TrainingError."""
        if not isinstance(returned, Real) or isinstance(returned, bool):
            raise self._error(_kind(returned), f"a finite number of at least 0, {meaning}")
        try:
            number = float(returned)
        except OverflowError:  # an int or a fraction beyond every float
            number = math.inf
        if not (math.isfinite(number) and number >= 0):
            raise self._error(str(number), f"a finite number of at least 0, {meaning}")
        return number

    def _require_name(self, metric: object) -> None:
        """Raises TrainingError: it is no name of a metric, or one of Shardwise's own."""
        if not isinstance(metric, str) or not metric.isprintable() or metric.strip() != metric or not metric:
            shown = repr(metric) if isinstance(metric, str) else f"by {_kind(metric)}"
            raise self._error(
                f"a metric named {shown}", "a name that is one line of text without spaces around, such as own/share"
            )
        is_busy = bool(without_busy({metric: MetricValue.sum(0)})[1])
        if is_busy or _TAKEN[self.key].fullmatch(metric):
            raise self._error(
                f"a metric named {metric!r}, which is for Shardwise's own metrics", "another name, such as own/share"
            )

    def _require_apart(self, metrics: Collection[str]) -> None:
        """Raises TrainingError: two metrics would have one name in validation, val/LAST_PART_OF_NAME."""
        by_last: dict[str, str] = {}
        for name in metrics:
            other = by_last.setdefault(name.rpartition("/")[2], name)
            if other != name:
                raise self._error(
                    f"the metrics {other} and {name}, which are one under val/", "another last part in one of the names"
                )

    def _error(self, given: str, expected: str) -> TrainingError:
        return TrainingError(f"{self.key}={self.spec} returned {given}, expected {expected}")


def require_callable(config: Config) -> None:
    """Checks that every function of the user's own in a command's config can be imported, and called as it will be.

    Raises:
        ConfigError: names the first that cannot, or that is a class, a coroutine function or a generator.
    """
    for key, usual in ARGUMENTS.get(type(config), {}).items():
        chosen = _at(config, key)
        if not isinstance(chosen, Custom):
            continue
        is_labelled = isinstance(config, PreferenceConfig) and not config.is_paired
        arguments = OF_LABELLED_ANSWERS if is_labelled else usual
        shown = f"({', '.join([*arguments, *chosen.parameters])})"
        expected = f"a function of {shown}"
        own = CustomFunction.load(chosen, key=key, expected=expected)
        if (kind := kind_of_callable(own.function)) != "function":
            raise ConfigError(f"{key}={chosen.function} is a {kind}, expected {expected}")
        asked = own.asked(extras_of(config)) if isinstance(config, RLConfig) else []
        if (error := _misfit(own.function, arguments, dict.fromkeys(asked) | chosen.parameters)) is not None:
            remedy = _other_kind(config, chosen, own.function)
            raise ConfigError(f"{key}={chosen.function} cannot be called with {shown}: {error}{remedy}")


def _misfit(function: Callable[..., Any], arguments: Sequence[str], keywords: Mapping[str, Any]) -> str | None:
    """Returns why a function cannot be called so, None if it can."""
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except (TypeError, ValueError) as error:  # ValueError: a C function without a signature
        return str(error)
    return None


def _other_kind(config: Config, chosen: Custom, function: Callable[..., Any]) -> str:
    """Returns what to set if a preference loss is one of the other kind."""
    if not isinstance(config, PreferenceConfig):
        return ""
    others = OF_LABELLED_ANSWERS if config.is_paired else ARGUMENTS[PreferenceConfig]["loss"]
    fits = _misfit(function, others, chosen.parameters) is None
    return f"; set loss.is_paired={str(not config.is_paired).lower()} for ({', '.join(others)})" if fits else ""


def extras_of(config: RLConfig) -> set[str]:
    """Returns which of `EXTRAS` the samples of a step have in this run."""
    algorithm = config.algorithm
    has = {
        "values": config.critic is not None,
        "ref_logprobs": algorithm.kl_coef > 0,
        "old_logprobs": algorithm.needs_old_logprobs or algorithm.rollout_correction.bypass,
    }
    return {name for names in EXTRAS.values() for name in names if has.get(name, True)}


def _at(config: Config, key: str) -> Any:
    """Returns the value at a dotted key; None if a group above it is absent."""
    value: Any = config
    for name in key.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _is_number(value: Any) -> bool:
    """Whether a metric can be made of it: of a number, or of a tensor that is one."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def _detached(value: float | Tensor) -> float | Tensor:
    return value.detach().reshape(()) if isinstance(value, Tensor) else float(value)


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in value) or 'nothing'}"
    return f"a {type(value).__name__}"

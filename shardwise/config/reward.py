"""How a completion is judged: the functions and judges whose weighted scores add up to its reward."""

import re
from collections import Counter
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shardwise.config.base import Arguments, Choice, Config, Deadline, PathText
from shardwise.config.engine import FrozenEngineConfig, ModelConfig

_AROUND = r"(?:(?![:=./\-\u2010-\u2015\u2212])[\W_])*"
"""Matches white space, quotes and Markdown around a colon; nothing that may belong to a number, and no second colon."""


class FunctionReward(Choice):
    """A Python function, called in a process of the pool."""

    tag: ClassVar[str] = "type"
    import_key: ClassVar[str] = "function"
    type: Literal["function"] = "function"
    """function: a Python function by its import path, also where an entry has no type; judge: a language model behind
    an endpoint."""
    function: PathText
    """`path/to/file.py:name` or `package.module:name`, called as
    compute_score(data_source, solution_str, ground_truth, extra_info); returns a number, or a dict with "score"."""
    name: str = ""
    """Names the entry in metrics and errors; by default the function's own name. It may not be acc."""
    weight: float = 1.0
    """The factor of this score in the reward."""
    parameters: Arguments = Field(default_factory=dict)
    """Further keyword arguments of every call."""

    @model_validator(mode="before")
    @classmethod
    def _named_like_its_function(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and isinstance(function := tree.get("function"), str) and not tree.get("name"):
            return {**tree, "name": function.rpartition(":")[2]}
        return tree


class JudgeReward(Choice):
    """A language model behind an OpenAI-compatible endpoint reads the completion and writes a score."""

    tag: ClassVar[str] = "type"
    type: Literal["judge"] = "judge"
    """judge: a language model that grades."""
    name: str = "judge"
    """Names the entry in metrics and errors."""
    weight: float = 1.0
    """The factor of this score in the reward."""
    base_url: str
    """`https://host/v1`; requests go to base_url/chat/completions."""
    model: str
    """The name of the model at that endpoint."""
    prompt_template: str
    """The user message; `{prompt}`, `{completion}` and `{ground_truth}` are replaced, other braces stay."""
    score_pattern: str = rf"(?i)score{_AROUND}[:=]{_AROUND}([-\u2212]?[0-9]*\.?[0-9]+(?:e[-+]?[0-9]+)?)"
    """A regular expression whose first group is the score; the last match in the answer counts."""
    score_scale: PositiveFloat = 1.0
    """The score is divided by this: 10 makes grades from 0 to 10 rewards from 0 to 1."""
    api_key_env: str | None = None
    """The environment variable that holds the key; null sends none."""
    temperature: NonNegativeFloat = 0.0
    """The temperature that the judge samples its answer at."""
    max_tokens: PositiveInt = 512
    """The most tokens of one answer of the judge."""
    requests_per_second: Annotated[float, Field(ge=0.001)] = 10.0
    """The highest rate at which requests are started, retries included; a second's worth may start at once."""
    max_concurrent_requests: PositiveInt = 16
    """The most requests under way at the same time."""
    timeout_seconds: Deadline = 60.0
    """The limit on one request, from connecting to the last byte."""
    max_retries: NonNegativeInt = 3
    """Further attempts after 408, 429, a 5xx status, a timeout or a broken connection, with growing random pauses or
    the server's Retry-After."""
    max_response_bytes: PositiveInt = 1_000_000
    """An answer that is larger is a failure and is not read to its end."""

    @model_validator(mode="after")
    def _can_work(self) -> Self:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url={self.base_url!r} must begin with http:// or https://")
        if "{completion}" not in self.prompt_template:
            raise ValueError("prompt_template holds no {completion}, so the judge would not see what it grades")
        try:
            num_groups = re.compile(self.score_pattern).groups
        except re.error as error:
            raise ValueError(f"score_pattern={self.score_pattern!r} is no regular expression: {error}") from None
        if num_groups == 0:
            raise ValueError(f"score_pattern={self.score_pattern!r} has no group (...) around the score")
        return self


class ModelReward(Choice):
    """A trained reward model scores the conversation, on the trainer's ranks."""

    tag: ClassVar[str] = "type"
    type: Literal["model"] = "model"
    """model: a reward model."""
    name: str = "reward_model"
    """Names the entry in metrics and errors."""
    weight: float = 1.0
    """The factor of this score in the reward."""
    classifier: ModelConfig
    """A folder of `shardwise reward-model`, or any sequence classifier with one label; it is given the messages in its
    own chat template."""
    engine: FrozenEngineConfig = FrozenEngineConfig.defaults()
    """Its layout. Keys that are not given have their defaults, whatever the policy's `engine` says."""


class EnvironmentReward(Choice):
    """The reward that the environment gives at the end of a completion."""

    tag: ClassVar[str] = "type"
    type: Literal["environment"] = "environment"
    """environment: the reward of rollout.environment."""
    name: str = "environment"
    """Names the entry in metrics and errors."""
    weight: float = 1.0
    """The factor of this score in the reward."""


RewardEntry = Annotated[FunctionReward | JudgeReward | ModelReward | EnvironmentReward, Field(discriminator="type")]


MIN_MEMORY_BYTES = 1 << 26
"""With less a process of reward functions can neither start a thread nor read a long completion."""


class RewardConfig(Config):
    """How a completion is judged."""

    functions: list[RewardEntry]
    """What judges a completion; its reward is the sum of weight x score. An entry is an import path or a group of keys;
    a single one needs no list. The first entry decides what counts as correct (see correct_at)."""
    manager: PathText | None = None
    """`path/to/file.py:Class` or `package.module:Class` of your own that judges instead: Class(config),
    score(jobs) -> list of RewardResult, close(). `functions`, which it may read, need not be given then."""
    num_workers: PositiveInt = 2
    """Processes that call the functions; without entries of type function there are none."""
    timeout_seconds: Deadline = 30.0
    """A call that takes longer is ended, together with its process."""
    memory_bytes: Annotated[int, Field(ge=MIN_MEMORY_BYTES)] | None = None
    """How much memory (address space) each worker process, and each process it starts, may use beyond what importing
    the functions took; a call that needs more fails, usually with a MemoryError. null sets no limit: the kernel may
    then kill any process of the machine."""
    on_failure: Literal["abort", "value", "mask"] = "abort"
    """What to do about a call that raises, hangs, dies or returns something that is not a finite number. abort: stop
    the run. value: use `failure_value` as its score, and count it. mask: leave the completion out of training and of
    its group's statistics, and count it."""
    failure_value: float = 0.0
    """The score of a failed call with on_failure=value."""
    max_failure_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """With on_failure=mask or value: the run stops where more than this share of the calls of one step (all rounds of
    sampling so far) fail; 1 never stops it."""
    correct_at: float = 1.0
    """A completion counts as correct in val/accuracy where the first entry's own score, before its weight, is at least
    this; a key "acc" in the dict it returned takes precedence. A failed call is never correct."""

    @property
    def reads_environment(self) -> bool:
        """Whether an entry is the reward of an environment."""
        return any(isinstance(entry, EnvironmentReward) for entry in self.functions)

    @property
    def masks_failed(self) -> bool:
        """Whether a completion whose reward failed is left out of training."""
        return self.on_failure == "mask"

    @model_validator(mode="before")
    @classmethod
    def _functions_are_a_list_of_groups(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or ("functions" not in tree and tree.get("manager") is None):
            return tree
        given = tree.get("functions", [])
        entries = given if isinstance(given, list) else [given]
        return {**tree, "functions": [_as_group(entry) for entry in entries]}

    @model_validator(mode="after")
    def _keys_have_effect(self) -> Self:
        if not self.functions and self.manager is None:
            raise ValueError("functions is empty; name at least one, e.g. rules.py:compute_score")
        if self.on_failure != "value" and self.failure_value:
            raise ValueError(
                f"failure_value={self.failure_value} has no effect with on_failure={self.on_failure}; "
                "remove it or set on_failure=value"
            )
        if self.memory_bytes is not None and not any(isinstance(entry, FunctionReward) for entry in self.functions):
            raise ValueError(
                f"memory_bytes={self.memory_bytes} bounds the processes of reward functions, and there are none; "
                "remove it"
            )
        if self.manager is None and not any(isinstance(entry, FunctionReward) for entry in self.functions):
            default = type(self).model_fields["timeout_seconds"].default
            if self.timeout_seconds != default:
                raise ValueError(
                    f"timeout_seconds={self.timeout_seconds} is of the processes of reward functions, and there are "
                    f"none; remove it or set timeout_seconds={default:g}, the default"
                )
        if self.on_failure == "abort" and self.max_failure_rate != type(self).model_fields["max_failure_rate"].default:
            raise ValueError(
                f"max_failure_rate={self.max_failure_rate} has no effect with on_failure=abort, which stops at the "
                "first failure; remove it or set on_failure=mask or value"
            )
        repeated = [name for name, count in Counter(entry.name for entry in self.functions).items() if count > 1]
        if repeated:
            raise ValueError(f"functions: {len(self.functions)} entries, but several are called {repeated[0]!r}; "
                             "set their `name`, by which metrics and errors tell them apart")  # fmt: skip
        for entry in self.functions:
            if entry.name.rpartition("/")[2] == "acc":
                which = f"function: {entry.function}" if isinstance(entry, FunctionReward) else f"type: {entry.type}"
                raise ValueError(
                    f"functions: an entry is called {entry.name!r}, but a part acc is the verdict that a function "
                    "returned (see correct_at); set its `name` to another one, as in "
                    f"functions={{{which}, name: accuracy}}"
                )
        return self


def _as_group(entry: Any) -> Any:
    if isinstance(entry, str):
        return {"type": "function", "function": entry}
    if isinstance(entry, dict) and "type" not in entry:
        return {"type": "function", **entry}
    return entry

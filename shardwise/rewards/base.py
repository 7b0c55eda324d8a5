"""What goes into a reward function or a judge, and what comes out of it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

RewardFunction = Callable[..., Any]
"""compute_score(data_source, solution_str, ground_truth, extra_info), called with keywords."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardJob:
    """One completion to score. Everything in it but images must be expressible in JSON; numpy values become lists and
    numbers.

    Example: `RewardJob(uid="train.jsonl:7", data_source="gsm8k", solution_str="#### 5", ground_truth="5")`
    """

    uid: str
    """Names the row in errors."""
    data_source: str
    solution_str: str
    """The completion as text, without the prompt."""
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    prompt: str = ""
    """The prompt as text; judges, models and managers read it, functions are not given it."""
    messages: list[dict[str, Any]] | None = None
    """The conversation that the prompt renders; None for plain text. A content is a string or a list of parts."""
    images: Sequence[str | bytes] = ()
    """The path of each image of the conversation, or the bytes of its file, in the order of their places: `<image>` in
    a string, which is text where there are no images, and `{"type": "image"}` in a list."""
    outcome: "Answer | None" = None
    """The environment's answer about the completion; where it is a failure, nothing else is asked. None without an
    environment."""

    @property
    def failure(self) -> str | None:
        """Why there is nothing to judge: the environment's failure, if any."""
        return None if self.outcome is None else self.outcome.failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one function or judge said of one completion: a score, or why there is none.

    Example: `Answer(score=1.0, parts={"acc": 1.0})`, `Answer(failure="ValueError: no number (rules.py line 12)")`
    """

    score: float = 0.0
    """Finite; without meaning where there is a failure."""
    parts: dict[str, float] = field(default_factory=dict)
    """The other finite numbers of a returned dict, by name."""
    failure: str | None = None
    """Why there is no score, in one line."""
    may_pass: bool = False
    """Whether a failure may be temporary: the same call may succeed at another time."""


class Scorer(Protocol):
    """Judges completions by other means than a function."""

    def score(self, jobs: Sequence[RewardJob]) -> Iterable[tuple[int, Answer]]:
        """Gives (index of the job, answer) for every job, in any order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """The reward of one job: the weighted sum over all functions and judges.

    Example: `RewardResult(score=1.1, parts={"gsm8k_score": 1.0, "length": 0.2})` with weights 1 and 0.5
    """

    score: float
    """Finite."""
    parts: dict[str, float] = field(default_factory=dict)
    """Every function's own score by its name, and the other numbers it returned: by their names where there is one
    function, as `<name>/<part>` where there are several."""
    failure: str | None = None
    """Why a score is missing, in one line: reward.failure_value stands in for it with on_failure=value, and with
    on_failure=mask the completion is to be left out of training."""

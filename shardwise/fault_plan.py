"""Injects faults on purpose: a rehearsal, on one's own machines, of what a job survives.

    SHARDWISE_FAULTS="rank=1 step=7 phase=backward action=kill; phase=write nth=40 action=enospc"

The environment variable, or trainer.faults, names what happens to which rank (every rank, if none is named) when it
enters a phase for the n-th time: in a step, or since it started. Without either a fault point costs
microseconds.
"""

import errno
import functools
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

VARIABLE = "SHARDWISE_FAULTS"
Phase = Literal[
    "rollout",
    "reward",
    "logprob",
    "forward",
    "backward",
    "allreduce",
    "optim",
    "sync",
    "serve",
    "load",
    "stage",
    "write",
    "commit",
    "prune",
]
"""rollout: before sampling. reward: when completions have been judged. logprob: when a rank has scored its share.
forward, backward: before that pass of a micro-batch. allreduce: before the norm of the gradients. optim: before the
update. sync: before weights go to the rollout engine. serve, load: when the engine's own process, where it has one, was
sent requests, or weights. stage: before a tensor is copied for a save. write: before a piece of a checkpoint is
written. commit: the first before a checkpoint gets its name, the second after it. prune: in the middle of removing a
checkpoint."""
Action = Literal["kill", "stop", "terminate", "hang", "slow", "raise", "enospc", "eio", "nan"]
"""kill, stop, terminate: SIGKILL, SIGSTOP, SIGTERM to this process; in serve and load, to the engine's. hang: sleep
forever. slow: a delay, from then on each time. raise: a RuntimeError. enospc, eio: the file system's errors. nan: NaN
in place of a number that the phase holds."""
NUMBERS: dict[str, str] = {
    "reward": "a reward",
    "logprob": "a logprob (value, score)",
    "forward": "a weight",
    "backward": "the loss",
    "allreduce": "a gradient",
}
"""Phase -> what the action nan replaces in it; the other phases hold no numbers."""
SLOW_SECONDS = 0.2
"""How long the action slow takes each time."""
_FOR_EVER_SECONDS = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens when a rank enters a phase for the n-th time.

    Example: `Fault(rank=1, step=7, phase="backward", action="kill")`
    """

    phase: str
    nth: int = 1
    """The entry into the phase at which it happens, counted within `step` or, if that is None, since the process
    started. slow goes on from there."""
    action: str = "kill"
    rank: int | None = None
    """The rank that it happens to; None: every rank."""
    step: int | None = None
    """The step of the run; None: any step."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a fault as SHARDWISE_FAULTS has it. Raises ValueError: the text is no fault; says what is allowed."""
        words = dict(word.partition("=")[::2] for word in text.split())
        allowed = {"phase": get_args(Phase), "action": get_args(Action)}
        numbers = {"rank": 0, "step": 1, "nth": 1}
        for key, value in words.items():
            if key not in allowed and key not in numbers:
                raise ValueError(f"{text!r} names {key!r}; a fault has rank, step, phase, nth and action")
            if key in allowed and value not in allowed[key]:
                raise ValueError(f"{text!r} has {key}={value}; choose one of {', '.join(allowed[key])}")
            if key in numbers and not (value.isdecimal() and int(value) >= numbers[key]):
                raise ValueError(f"{text!r} has {key}={value}; give a number ({key} counts from {numbers[key]})")
        if "phase" not in words:
            raise ValueError(f"{text!r} has no phase; choose one of {', '.join(allowed['phase'])}")
        if words.get("action") == "nan" and words["phase"] not in NUMBERS:
            raise ValueError(
                f"{text!r} has action=nan, and phase={words['phase']} holds no numbers; choose one of "
                f"{', '.join(NUMBERS)}"
            )
        given = {key: int(words[key]) for key in numbers if key in words}
        return cls(phase=words["phase"], action=words.get("action", "kill"), **given)

    def is_due(self, *, step: int | None, in_step: int, in_all: int) -> bool:
        """Whether it happens now, at the `in_step`-th entry in this step and the `in_all`-th since the start."""
        if self.step not in (None, step):
            return False
        times = in_all if self.step is None else in_step
        return times >= self.nth if self.action == "slow" else times == self.nth

    def happen(self, numbers: Any, pid: int) -> None:
        """Carries out the fault; signals go to the process `pid`. If that is this process, it returns only from `stop`,
        when somebody continues the process, and from `terminate`, `slow` and `nan`."""
        match self.action:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "stop":
                os.kill(pid, signal.SIGSTOP)
            case "terminate":
                os.kill(pid, signal.SIGTERM)
            case "hang":
                time.sleep(_FOR_EVER_SECONDS)
            case "slow":
                time.sleep(SLOW_SECONDS)
            case "enospc":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case "eio":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case "nan":
                numbers[0] = math.nan
            case _:
                raise RuntimeError(f"the fault plan raises in phase {self.phase}")


class FaultPlan:
    """The faults of this rank, and how often it has entered each phase."""

    def __init__(self, faults: Iterable[Fault], *, rank: int) -> None:
        self._rank = rank
        self._faults: list[Fault] = []
        self.entered: Counter[str] = Counter()
        self._entered_in_step: Counter[str] = Counter()
        self._step: int | None = None
        self._counting = threading.Lock()
        self.add(faults)

    @classmethod
    def from_environment(cls) -> Self:
        """Reads the plan from the environment variable. Raises ValueError as `Fault.parse`."""
        texts = [text.strip() for text in os.environ.get(VARIABLE, "").split(";")]
        try:
            named = [Fault.parse(text) for text in texts if text]
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: {error}") from None
        return cls(named, rank=int(os.environ.get("RANK", "0")))

    def add(self, faults: Iterable[Fault]) -> None:
        """Adds faults; those of other ranks are left out."""
        self._faults += [fault for fault in faults if fault.rank in (None, self._rank)]

    @property
    def step(self) -> int | None:
        """The step of the run that this process works on; None before the first."""
        return self._step

    @step.setter
    def step(self, step: int | None) -> None:
        if step != self._step:
            self._step = step
            self._entered_in_step.clear()

    def enter(self, phase: Phase, numbers: Any = None, *, pid: int | None = None) -> None:
        """Counts an entry into a phase, and carries out what is planned for it."""
        if not self._faults:
            return
        with self._counting:  # threads write at the same time
            self.entered[phase] += 1
            self._entered_in_step[phase] += 1
            times = {"in_step": self._entered_in_step[phase], "in_all": self.entered[phase]}
        for fault in self._faults:
            if fault.phase == phase and fault.is_due(step=self._step, **times):
                fault.happen(numbers, os.getpid() if pid is None else pid)


@functools.cache
def plan() -> FaultPlan:
    """Returns the plan of this process: what the environment variable names, and what `begin_plan` added. Raises
    ValueError."""
    return FaultPlan.from_environment()


def begin_plan(faults: Sequence[str]) -> None:
    """Plans these faults beside those of the environment variable. Entries before this call do not count.

    Raises:
        ValueError: as `Fault.parse`.
    """
    plan.cache_clear()
    plan().add(map(Fault.parse, faults))


def fault_point(phase: Phase, numbers: Any = None, *, pid: int | None = None) -> None:
    """Enters a phase: what is planned for it happens here.

    Args:
        numbers: in the phases of NUMBERS, a list, or a [n] tensor that shares the original's memory; nan replaces its
            first number.
        pid: the process that is sent signals; None: this one.
    """
    plan().enter(phase, numbers, pid=pid)

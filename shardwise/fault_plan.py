"""Faults on purpose: a rehearsal, on one's own machines, of what a job survives.

    SHARDWISE_FAULTS="rank=1 phase=backward nth=3 action=kill; phase=write nth=40 action=enospc"

The environment variable names what happens to which rank (every rank, if none is named) when it enters a phase for the
n-th time. Without it a fault point costs a look into a cache.
"""

import errno
import functools
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, get_args

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
    "stage",
    "write",
    "commit",
    "prune",
]
"""rollout: before sampling. reward: before completions are judged. logprob: before they are scored. forward, backward:
before that of a micro-batch. allreduce: before the norm of the gradients. optim: before the update. sync: before
weights go to the rollout engine. stage: before a tensor is copied for a save. write: before a piece of a checkpoint is
written. commit: the first before a checkpoint gets its name, the second after it. prune: in the middle of removing
one."""
Action = Literal["kill", "stop", "terminate", "hang", "raise", "enospc", "eio"]
"""kill, stop, terminate: SIGKILL, SIGSTOP, SIGTERM to this process. hang: sleep for ever. raise: a RuntimeError.
enospc, eio: the file system's errors."""
_FOR_EVER_SECONDS = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens when a rank enters a phase for the n-th time.

    Example: `Fault(rank=1, phase="backward", nth=3, action="kill")`
    """

    phase: str
    nth: int = 1
    action: str = "kill"
    rank: int | None = None
    """None: every rank."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError: it is no fault; says what is allowed."""
        words = dict(word.partition("=")[::2] for word in text.split())
        allowed = {"phase": get_args(Phase), "action": get_args(Action)}
        for key, value in words.items():
            if key not in ("rank", "phase", "nth", "action"):
                raise ValueError(f"{VARIABLE}: {text!r} names {key!r}; a fault has rank, phase, nth and action")
            if key in allowed and value not in allowed[key]:
                raise ValueError(f"{VARIABLE}: {text!r} has {key}={value}; choose one of {', '.join(allowed[key])}")
            if key in ("rank", "nth") and (not value.isdecimal() or value == "0" * (key == "nth")):
                raise ValueError(
                    f"{VARIABLE}: {text!r} has {key}={value}; give a number ({key} counts from {int(key == 'nth')})"
                )
        if "phase" not in words:
            raise ValueError(f"{VARIABLE}: {text!r} has no phase; choose one of {', '.join(allowed['phase'])}")
        rank = int(words["rank"]) if "rank" in words else None
        return cls(phase=words["phase"], nth=int(words.get("nth", "1")), action=words.get("action", "kill"), rank=rank)

    def happen(self) -> None:
        """Returns only from `stop`, when somebody continues the process, and from `terminate`."""
        match self.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            case "hang":
                time.sleep(_FOR_EVER_SECONDS)
            case "enospc":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case "eio":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case _:
                raise RuntimeError(f"the fault plan raises in phase {self.phase}")


class FaultPlan:
    """The faults of this rank, and how often it has entered each phase."""

    def __init__(self, faults: Sequence[Fault], *, rank: int) -> None:
        self._faults = [fault for fault in faults if fault.rank in (None, rank)]
        self.entered: Counter[str] = Counter()

    @classmethod
    def from_environment(cls) -> Self:
        """Raises ValueError as `Fault.parse`."""
        texts = [text.strip() for text in os.environ.get(VARIABLE, "").split(";")]
        return cls([Fault.parse(text) for text in texts if text], rank=int(os.environ.get("RANK", "0")))

    def enter(self, phase: Phase) -> None:
        """Counts, and does what is planned."""
        if not self._faults:
            return
        self.entered[phase] += 1
        for fault in self._faults:
            if (fault.phase, fault.nth) == (phase, self.entered[phase]):
                fault.happen()


@functools.cache
def plan() -> FaultPlan:
    """Of this process, read once. Raises ValueError."""
    return FaultPlan.from_environment()


def fault_point(phase: Phase) -> None:
    """What is planned for this phase happens here."""
    plan().enter(phase)

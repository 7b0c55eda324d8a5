"""When the rollouts of a step are sampled: in turn with training, or on ranks of their own while it goes on."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Self

import xxhash

from shardwise.config import TrainingError
from shardwise.console import counted, warn
from shardwise.data import PromptStream
from shardwise.recipes.sampling.sampler import Rollout, Sampler, lost_row
from shardwise.recipes.sampling.sync_gate import SyncGate


class Pipeline:
    """Schedules sampling against training and weight syncs. A context manager.

    Colocated (max_staleness=None): the rollouts of a step are sampled when the step begins.

    On ranks of their own: a thread samples ahead. Step s may begin sampling once the engines serve version
    s - 1 - max_staleness. What a weight sync waits for:
        max_staleness 0 or 1: every rollout that may begin. The order of events then does not depend on timing, so runs
            repeat bit for bit; it costs nothing, because training needs those rollouts next.
        max_staleness > 1: rollouts that have begun, no others. Which version samples a step depends on timing.
        with `sync_gate` (rollout.partial): nothing. Rollouts in flight are interrupted and go on under the new weights.

    A save waits as a weight sync does, with `sync_gate` for rollouts that have begun. From there none begin until the
    next step is taken: a run that stops at a save leaves no rank at work.

    Neither side has a deadline for the other: calls of ranks, rewards and environments have their own, and
    trainer.stall_timeout_seconds ends a run in which nothing new begins.
    """

    def __init__(
        self,
        sampler: Sampler,
        stream: PromptStream,
        *,
        total_steps: int,
        max_staleness: int | None = None,
        sync_gate: SyncGate | None = None,
    ) -> None:
        """
        Args:
            max_staleness: versions of the policy; None samples in turn.
            sync_gate: the sampler's, where new weights interrupt it.
        """
        self._sampler = sampler
        self._stream = stream
        self._total_steps = total_steps
        self._max_staleness = max_staleness
        self._sync_gate = sync_gate
        self._changed = threading.Condition()
        # What follows is read and written under the condition.
        self._ready: deque[Rollout] = deque()
        self._num_restored = 0
        """How many of the ready rollouts come from a checkpoint, for which another bound may have held."""
        self._version = 0
        self._next_step: int | None = None
        """What the thread begins next; None where nothing is left, or no thread."""
        self._is_sampling = self._is_held = self._is_over = False
        self._failure: BaseException | None = None
        self._idle = _StopWatch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Begins no further rollouts. Does not wait for those that have begun: after an error they may never end."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def start(self, step: int) -> None:
        """Begins with the rollouts of `step`; the engines serve the weights before it."""
        self._version = step - 1
        if self._max_staleness is not None:
            self._go_to(step + len(self._ready))
            threading.Thread(target=self._sample_ahead, name="rollouts", daemon=True).start()

    def take(self, step: int) -> Rollout:
        """Returns the rollouts that a step trains on. Steps are taken in order.

        Consumes: rollouts that are ready. Waits for: those of `step`. Unblocked by: the thread that samples them, whose
        failure is raised here.
        """
        if self._max_staleness is None:
            return self._ready.popleft() if self._ready else self._sampler.collect(step)
        self._go_on()
        with self._changed:
            self._wait_for(lambda: bool(self._ready))
            rollout, is_restored = self._ready.popleft(), self._num_restored > 0
            self._num_restored -= is_restored
        staleness = 0 if rollout.oldest_version is None else step - 1 - rollout.oldest_version
        if staleness > self._max_staleness and not is_restored:
            raise TrainingError(
                f"a completion of step {step} was sampled {staleness} versions ago, and rollout.max_staleness="
                f"{self._max_staleness}: an error of Shardwise's; please report it"
            )
        return rollout

    def takes_weights(self) -> bool:
        """Whether the engines should serve new weights now: always, unless they are busy, cannot be interrupted, and
        training has what to go on with."""
        with self._changed:
            return self._sync_gate is not None or not (self._is_sampling and self._ready)

    @contextmanager
    def serving(self, version: int, *, samples: bool) -> Iterator[None]:
        """Inside this context nothing is sampled ahead; the body makes the engines serve `version`.

        Args:
            samples: the body samples too, and waits until rollouts that have begun are whole.
        """
        with self._at_rest() if samples or self._sync_gate is None else self._sync_gate.weights():
            yield
            with self._changed:
                self._version = version
                self._changed.notify_all()

    def take_idle_seconds(self) -> float:
        """How long nothing was sampled ahead, since the last call; 0 where sampling has no ranks of its own."""
        with self._changed:
            return self._idle.take()

    def state_dict(self) -> dict[str, Any]:
        """Returns what determines the rollouts to come, JSON-serializable.

        Waits for: rollouts that have begun, or may begin, as the class says. Unblocked by: the thread that samples
        them. None begin until the next step is taken, for the run may stop here.
        """
        self._come_to_rest()
        ready = [rollout.to_json() for rollout in self._ready]
        return {"prompts": self._stream.state_dict(), "ready": ready, "rows_xxh3": self._rows_xxh3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the pipeline that gave the state was, in turn or ahead. Where rows may differ, rollouts of
        rows that are gone are sampled anew, and with them those that were sampled with them."""
        are_others = state.get("rows_xxh3", self._rows_xxh3) != self._rows_xxh3  # early checkpoints do not say it
        self._stream.load_state_dict(state["prompts"], are_others=are_others and self._stream.rows_may_differ)
        ready, examples = state["ready"], self._sampler.examples
        if self._stream.rows_may_differ and (gone := lost_row(ready, examples)) is not None:
            warn(
                f"the checkpoint holds rollouts of the row {gone!r}, which is gone or has another prompt; the rollouts "
                f"of {counted(len(ready), 'step')} that were sampled ahead are sampled anew, from the rows that come "
                "next"
            )
            ready = []
        self._ready = deque(Rollout.from_json(rollout, examples) for rollout in ready)
        self._num_restored = len(self._ready)

    @cached_property
    def _rows_xxh3(self) -> str:
        """Returns a hash of the names and prompts of all rows, in order."""
        digest = xxhash.xxh3_64()
        for example in self._sampler.examples:
            digest.update(f"{example.uid}\0{example.prompt}\0".encode(errors="replace"))
        return digest.hexdigest()

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Inside this context no rollouts begin."""
        self._come_to_rest()
        try:
            yield
        finally:
            self._go_on()

    def _come_to_rest(self) -> None:
        """Waits until nothing is sampled. Nothing begins from here to `_go_on`."""
        with self._changed:
            is_ordered = self._max_staleness in (0, 1) and self._sync_gate is None
            self._is_held = self._max_staleness is not None and not is_ordered
            self._wait_for(lambda: self._failure is None and not self._is_sampling and not self._may_begin())

    def _go_on(self) -> None:
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def _may_begin(self) -> bool:
        """Whether the next rollouts may begin now."""
        if self._next_step is None or self._is_held:
            return False
        assert self._max_staleness is not None
        return self._version >= self._next_step - 1 - self._max_staleness

    def _go_to(self, step: int) -> None:
        self._next_step = step if step <= self._total_steps else None

    def _sample_ahead(self) -> None:
        """Samples ahead; the body of the thread."""
        try:
            while (step := self._begin()) is not None:
                rollout = self._sampler.collect(step)
                with self._changed:
                    self._is_sampling = False
                    self._ready.append(rollout)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._is_sampling = False
                self._failure = error
                self._changed.notify_all()

    def _begin(self) -> int | None:
        """Waits until the next rollouts may begin. Returns their step; None where the run ends before."""
        with self._changed:
            self._idle.start()
            self._changed.wait_for(lambda: self._is_over or self._next_step is None or self._may_begin())
            self._idle.stop()
            if self._is_over or self._next_step is None:
                return None
            step, self._is_sampling = self._next_step, True
            self._go_to(step + 1)
            return step

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition. Raises what ended the thread, unless the condition holds."""
        self._changed.wait_for(lambda: condition() or self._failure is not None)
        if self._failure is not None and not condition():
            raise self._failure


class _StopWatch:
    """Seconds between starts and stops."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._started: float | None = None

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._add()
        self._started = None

    def take(self) -> float:
        """Returns the seconds so far, those of the running span included, and counts from zero again."""
        self._add()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add(self) -> None:
        now = time.perf_counter()
        if self._started is not None:
            self._seconds += now - self._started
            self._started = now

"""A rollout engine in its own process, which is replaced when it dies or hangs: its rank notices only a delay."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import Tensor

from shardwise.checksum import checksum
from shardwise.config import ConfigError, EngineLostError
from shardwise.console import tell
from shardwise.ops import ModuleTrace
from shardwise.rollout.process import EngineProcess, ProcessLost, RequestsLost
from shardwise.rollout.readiness import Readiness
from shardwise.rollout.shared_weights import Form, SharedWeights, unpacked
from shardwise.types import Completion, GenerateRequest, Images


class SupervisedEngine:
    """An engine behind an `EngineProcess`. A call to a process that is lost is repeated unchanged on the next one: the
    same batch, so the same tokens and logprobs to the bit.

    The weights of the last sync stay in memory that the process has mapped. Its replacement loads them, and proves by
    checksums that it serves them, before it gets any call.
    """

    def __init__(self, start: Callable[[int], EngineProcess], *, max_restarts: int, name: str) -> None:
        """Starts the first process and waits for its engine.

        Args:
            start: starts a process, given the descriptor of the memory for weights.
            max_restarts: how many processes may be lost and replaced.
            name: what messages call the engine.
        Raises:
            ConfigError, ModelError: as the engine raises them. EngineLostError: no process lived until its engine was
                ready.
        """
        self._start, self._max_restarts, self._name = start, max_restarts, name
        self._began = time.monotonic()
        self._failures: list[str] = []
        self._num_taken = 0
        self._process: EngineProcess | None = None
        self._forms: list[Form] = []
        self._weights = SharedWeights([])
        self._sent: dict[str, int] = {}
        """Name -> checksum, of what `_weights` holds."""
        self._readiness = Readiness(name, sleep_level=0)  # what sleeping drops, the memory still holds
        self._ready()

    @property
    def pid(self) -> int | None:
        """Id of the process; None while a lost one has not been replaced yet."""
        return None if self._process is None else self._process.pid

    def take_restarts(self) -> int:
        """Returns how many processes were lost since the last call; each was replaced or will be when next needed."""
        taken, self._num_taken = len(self._failures) - self._num_taken, len(self._failures)
        return taken

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        on_finished: Callable[[int], None] | None = None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> list[list[Completion]]:
        """See RolloutEngine.generate. `on_finished` is called once per request, even if the process is lost afterwards
        and the next one computes the request again; that one may then be interrupted before it finishes it.

        Raises:
            EngineLostError: too many processes were lost, or two got stuck on the same requests.
        """
        self._readiness.require()
        finished: set[int] = set()

        def tell_once(place: int) -> None:
            if on_finished is not None and place not in finished:
                finished.add(place)
                on_finished(place)

        found: list[list[Completion]] = self._ask(
            "generate",
            list(requests),
            uids=[request.uid for request in requests],
            on_finished=tell_once,
            is_interrupted=is_interrupted,
        )
        return found

    def logprobs(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> list[list[float]]:
        """See RolloutEngine.logprobs. Raises as `generate`."""
        self._readiness.require()
        scores: list[list[float]] = self._ask(
            "logprobs", [list(sequence) for sequence in sequences], None if images is None else list(images)
        )
        return scores

    def trace(self) -> AbstractContextManager[ModuleTrace]:
        """Always raises ConfigError: what modules compute stays in their process."""
        raise ConfigError(
            "rollout.engine.process: what an engine's modules compute cannot be traced from another process; remove it"
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Writes the tensors to the memory and, when all have come, has the process load them. A process that dies
        meanwhile is replaced by one that loads all of them; no process ever loads only a part."""
        arrived: dict[str, int] = {}
        self._readiness.begin_sync()  # what comes may be received in the memory before it is told of
        for name, tensor in weights:
            place = self._weights.tensor(name)
            if tensor.data_ptr() != place.data_ptr():
                place.copy_(tensor)
            self._sent[name] = arrived[name] = checksum(place)
            del tensor  # else it would stay while the next one is gathered
        self._readiness.arrived()  # without those that have not changed
        if arrived:
            self._ask("load", arrived)

    def served_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that the process was given. Those that it cannot read back, and all before the first sync,
        are on the meta device."""
        for form in self._forms:
            is_there = form.is_readable and form.name in self._sent
            yield form.name, self._weights.tensor(form.name) if is_there else form.on_meta()

    def served_checksums(self) -> Iterable[tuple[str, int | None]]:
        """Returns the checksums that the process computes over what it serves."""
        found: dict[str, int | None] = self._ask("checksums")
        return found.items()

    def commit_weights(self, version: int) -> None:
        """See WeightReceiver.commit_weights. Raises RuntimeError if the sync broke off."""
        self._readiness.commit(version)
        self._ask("commit", version)

    def sleep(self) -> None:
        """See RolloutEngine.sleep."""
        self._tell("sleep")

    def wake(self, *parts: Literal["weights", "kv_cache"]) -> None:
        """See RolloutEngine.wake. Weights that sleeping has dropped are loaded again before the engine generates. A
        process that is started later is awake from the start."""
        self._tell("wake", *parts)
        if "kv_cache" in parts and self._sent and self._readiness.is_ready and self._ask("lacks_weights"):
            self._ask("load", self._sent)
            self._ask("commit", self._readiness.version)

    @property
    def lacks_weights(self) -> bool:
        """False: the memory holds the weights of the last sync."""
        return False

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.close()
        self._process = None
        self._weights.close()

    def _ask(
        self,
        method: str,
        *arguments: Any,
        uids: Sequence[str] = (),
        on_finished: Callable[[int], None] = lambda place: None,
        is_interrupted: Callable[[], bool] | None = None,
    ) -> Any:
        """Returns the answer of the process, or of the next one if it is lost. Raises EngineLostError as `generate`."""
        is_second = False
        while True:
            process = self._ready()
            try:
                return process.call(
                    method, *arguments, uids=uids, on_finished=on_finished, is_interrupted=is_interrupted
                )
            except ProcessLost as lost:
                self._bury(process, method, lost, is_last=is_second)
                is_second = isinstance(lost, RequestsLost)

    def _tell(self, method: str, *arguments: Any) -> None:
        """Makes a call that only matters to a process that already exists: none is started for it."""
        if self._process is not None:
            try:
                self._process.call(method, *arguments)
            except ProcessLost as lost:
                self._bury(self._process, method, lost)

    def _ready(self) -> EngineProcess:
        """Returns a process whose engine serves the weights of the last sync; starts one if there is none."""
        while self._process is None:
            if self._failures:
                tell(f"{self._name}: restart {len(self._failures)} of {self._max_restarts}")
            process = self._start(self._weights.descriptor)
            try:
                self._meet(process)
            except ProcessLost as lost:
                self._bury(process, "start", lost)
            except BaseException:
                process.close()
                raise
            else:
                self._process = process
        return self._process

    def _meet(self, process: EngineProcess) -> None:
        forms = list(unpacked(process.start()))
        if not self._forms:
            self._forms, self._weights = forms, SharedWeights(forms, self._weights.descriptor)
        assert forms == self._forms, "two processes were built of the same model folder"
        if not self._sent:
            return
        process.call("load", self._sent)
        for name, found in process.call("checksums").items():
            if found is not None and found != self._sent.get(name, found):
                raise RuntimeError(
                    f"a new process of {self._name} serves other values of {name} than the last weight sync brought"
                )
        if self._readiness.is_ready:
            process.call("commit", self._readiness.version)

    def _bury(self, process: EngineProcess, method: str, lost: ProcessLost, *, is_last: bool = False) -> None:
        """Closes a lost process and records why. Raises EngineLostError unless another may take its place."""
        process.close()
        self._process = None
        self._failures.append(f"after {time.monotonic() - self._began:.0f} s, in `{method}`, it {lost}")
        is_stuck = is_last and isinstance(lost, RequestsLost)
        if not is_stuck and len(self._failures) <= self._max_restarts:
            return
        reason = (
            "did not get done with the same requests twice; look at these rows, or raise "
            "rollout.engine.process.request_timeout_seconds"
            if is_stuck
            else f"was lost {len(self._failures)} times, and rollout.engine.process.max_restarts={self._max_restarts}"
        )
        history = "".join(f"\n  {number}. {failure}" for number, failure in enumerate(self._failures, start=1))
        raise EngineLostError(f"{self._name} {reason}:{history}") from None

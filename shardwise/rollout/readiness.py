"""Whether an engine in another process may generate: which version it serves, what has arrived, what sleeps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from torch import Tensor

from shardwise.config import TrainingError

_FIT, _UNCOMMITTED = "", "weights have arrived that are not committed"
_DROPPED = "rollout.engine.sleep_level=2 dropped the weights, and no weight sync came since; use 1"


class Readiness:
    """Blocks generation from the first tensor of a weight sync to its commit, after a failed sync until a complete one,
    and while the weights that sleeping dropped have not been synced again."""

    def __init__(self, name: str, *, sleep_level: Literal[0, 1, 2]) -> None:
        """
        Args:
            name: what messages call the engine.
            sleep_level: what sleeping releases: 0 nothing; 1 the cache, and it moves the weights to the host; 2 both,
                and the weights are dropped.
        """
        self.version = 0
        """The version that was committed last."""
        self.sleep_level = sleep_level
        self._name = name
        self._asleep: set[str] = set()
        self._unfit = _FIT

    @property
    def lacks_weights(self) -> bool:
        """See RolloutEngine.lacks_weights."""
        return self._unfit == _DROPPED

    @property
    def is_ready(self) -> bool:
        """Whether the engine may generate."""
        return not self._unfit

    def require(self) -> None:
        """Raises RuntimeError if weights have arrived but are not committed, TrainingError if sleeping dropped them."""
        if not self.is_ready:
            error = TrainingError if self.lacks_weights else RuntimeError
            raise error(f"{self._name} cannot generate: {self._unfit}")

    def begin_sync(self) -> None:
        """Notes that from here on the engine may hold weights of two versions."""
        self._unfit = "the last weight sync broke off"

    def arriving(
        self, weights: Iterable[tuple[str, Tensor]], missing: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that a sync brings, and removes each from `missing`. The sync begins with the first."""
        for name, tensor in weights:
            self.begin_sync()
            del missing[name]
            yield name, tensor
            del tensor  # else it would stay while the next one is gathered

    def arrived(self, missing: Iterable[str] = ()) -> None:
        """Notes that the engine has all that came; `missing` names what did not come and should have."""
        names = ", ".join(missing)
        self._unfit = f"the last weight sync did not bring {names}" if names else _UNCOMMITTED

    def commit(self, version: int) -> None:
        """Makes `version` the one that is served. Raises RuntimeError if the weights are not complete."""
        if self._unfit not in (_FIT, _UNCOMMITTED):
            raise RuntimeError(f"version {version} cannot be committed to {self._name}: {self._unfit}")
        self._unfit, self.version = _FIT, version

    def sleep(self, release: Callable[[], object]) -> None:
        """Calls `release` if there is something to give back."""
        if self.sleep_level and not self._asleep:
            release()
            self._asleep = {"kv_cache", "weights"}
            if self.sleep_level == 2:
                self._unfit = _DROPPED

    def wake(self, parts: Sequence[str], resume: Callable[[list[str]], object]) -> None:
        """Calls `resume` with those of `parts` that are asleep."""
        tags = [part for part in parts if part in self._asleep]
        if tags:
            resume(tags)
            self._asleep.difference_update(tags)

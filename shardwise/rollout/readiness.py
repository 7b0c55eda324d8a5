"""Whether an engine that computes elsewhere may generate: which version it serves, what arrives, what sleeps."""

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
            sleep_level: what sleeping gives back: 0 nothing, 1 the cache, and the weights to the host, 2 both for good.
        """
        self.version = 0
        """That was committed last."""
        self.sleep_level = sleep_level
        self._name = name
        self._asleep: set[str] = set()
        self._unfit = _FIT

    @property
    def lacks_weights(self) -> bool:
        """See RolloutEngine.lacks_weights."""
        return self._unfit == _DROPPED

    def require(self) -> None:
        """Raises RuntimeError: weights have arrived and were not committed. TrainingError: sleeping dropped them."""
        if self._unfit:
            error = TrainingError if self.lacks_weights else RuntimeError
            raise error(f"{self._name} cannot generate: {self._unfit}")

    def arriving(
        self, weights: Iterable[tuple[str, Tensor]], missing: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Passes on what a sync brings, and takes it from `missing`."""
        for name, tensor in weights:
            self._unfit = "the last weight sync broke off"
            del missing[name]
            yield name, tensor

    def arrived(self, missing: Iterable[str]) -> None:
        """The engine has loaded all that came."""
        names = ", ".join(missing)
        self._unfit = f"the last weight sync did not bring {names}" if names else _UNCOMMITTED

    def commit(self, version: int) -> None:
        """Raises RuntimeError: the weights are not whole."""
        if self._unfit not in (_FIT, _UNCOMMITTED):
            raise RuntimeError(f"version {version} cannot be committed to {self._name}: {self._unfit}")
        self._unfit, self.version = _FIT, version

    def sleep(self, release: Callable[[], object]) -> None:
        """Calls `release` where there is something to give back."""
        if self.sleep_level and not self._asleep:
            release()
            self._asleep = {"kv_cache", "weights"}
            if self.sleep_level == 2:
                self._unfit = _DROPPED

    def wake(self, parts: Sequence[str], resume: Callable[[list[str]], object]) -> None:
        """Calls `resume` with those of the parts that sleep."""
        tags = [part for part in parts if part in self._asleep]
        if tags:
            resume(tags)
            self._asleep.difference_update(tags)

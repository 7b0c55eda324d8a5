"""What every rollout engine offers: tokens in, tokens with logprobs and a policy version out."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from shardwise.ops import ModuleTrace
from shardwise.types import Completion, GenerateRequest, Images, WeightReceiver


class RolloutEngine(WeightReceiver, Protocol):
    """Samples completions from the weights it was last given. Text never goes in: tokens are the interface."""

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        on_finished: Callable[[int], None] | None = None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> list[list[Completion]]:
        """`num_completions` completions for each request, in the order of the requests.

        The tokens drawn for a request depend on its seed, uid and the completion's index, not on the rest of the batch.

        Args:
            on_finished: called with the place of each request once all its completions are there.
            is_interrupted: is asked again and again; once it is true, completions return as they are, and those that
                have no end are `interrupted`. An engine may take no notice of it.
        Raises:
            DataError: a request that no engine could answer; see RequestLimits.
            RuntimeError: weights were loaded and never committed.
        """

    def logprobs(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> list[list[float]]:
        """Of every token after the first, at temperature 1, in nats.

        Args:
            images: of each sequence, whose tokens are in it.
        Raises:
            DataError: a sequence that no engine could score; see RequestLimits. ConfigError, ModelError, RuntimeError:
                as `generate`.
        """

    def trace(self) -> AbstractContextManager[ModuleTrace]:
        """Inside it what this engine's modules compute is kept, by the names that they have in transformers, as far as
        it has the same modules."""

    def sleep(self) -> None:
        """Gives device memory to the trainer, as far as the engine is set up to, until `wake`. May be called again."""

    def wake(self, *parts: Literal["weights", "kv_cache"]) -> None:
        """Takes memory back: that of the weights before a weight sync, both before `generate`. May be called again."""

    @property
    def lacks_weights(self) -> bool:
        """Whether sleeping has dropped the weights, so that nothing is generated before a weight sync."""
        ...

    def close(self) -> None:
        """Gives everything back; the engine cannot be used again."""

"""The interface of every rollout engine: tokens in, tokens with logprobs and a policy version out."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from shardwise.ops import ModuleTrace
from shardwise.types import Completion, GenerateRequest, Images, WeightReceiver


class RolloutEngine(WeightReceiver, Protocol):
    """Samples completions from the weights it was last given. The interface is tokens, never text."""

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        on_finished: Callable[[int], None] | None = None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> list[list[Completion]]:
        """Samples `num_completions` completions for each request; returns them in the order of the requests.

        The tokens drawn for a request depend on its seed, uid and the completion's index, not on the rest of the batch.

        Args:
            on_finished: called with the index of each request once all its completions are finished.
            is_interrupted: polled; once it returns true, `generate` returns the completions as they are, unfinished
                ones as `interrupted`. An engine may ignore it.
        Raises:
            DataError: a request that no engine could answer; see RequestLimits.
            RuntimeError: weights were loaded and never committed.
        """

    def logprobs(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> list[list[float]]:
        """Returns the logprob of every token after the first, at temperature 1, in nats.

        Args:
            images: the images of each sequence, whose tokens the sequence contains.
        Raises:
            DataError: a sequence that no engine could score; see RequestLimits. ConfigError, ModelError, RuntimeError:
                as `generate`.
        """

    def trace(self) -> AbstractContextManager[ModuleTrace]:
        """Records, inside the context, what this engine's modules compute, under their names in transformers, as far
        as the engine has the same modules."""

    def sleep(self) -> None:
        """Gives device memory to the trainer until `wake`, as much as the engine is set up to. May be called again."""

    def wake(self, *parts: Literal["weights", "kv_cache"]) -> None:
        """Takes memory back: "weights" before a weight sync, both parts before `generate`. May be called again."""

    @property
    def lacks_weights(self) -> bool:
        """Whether sleeping has dropped the weights, so that nothing can be generated before a weight sync."""
        ...

    def close(self) -> None:
        """Releases everything; the engine cannot be used again."""

"""Logits in chunks of the vocabulary, and what is summed over them: never all logits at once.

Shapes: N scored tokens, D hidden size, V vocabulary, C vocabulary chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.ops import LogitTransform, project_float32

CHUNK_ELEMENTS = 8 * 2**20
"""Logits that exist at a time: 32 MiB of float32, whatever the vocabulary and the batch. On an accelerator this is the
least."""
MAX_ACCELERATOR_ELEMENTS = 128 * 2**20
"""On an accelerator a 16th of all logits exists at a time, up to this: as many kernels as 32 MiB would need take longer
to launch than to run."""


def chunk_size(num_scored: int, vocab: int, device: torch.device) -> int:
    """Columns of logits at a time: the whole vocabulary, or a multiple of 128, which matrix products like best."""
    elements = CHUNK_ELEMENTS
    if device.type != "cpu":
        elements = max(elements, min(num_scored * vocab // 16, MAX_ACCELERATOR_ELEMENTS))
    columns = elements // max(1, num_scored)
    return vocab if columns >= vocab else min(vocab, max(128, columns // 128 * 128))


@dataclass(frozen=True, slots=True)
class VocabularyLogits:
    """The logits of some states: projected in float32, transformed, and divided by the temperature."""

    states: Tensor
    """[N, D]."""
    weight: Tensor
    """[V, D], the output projection."""
    temperature: float
    transform: LogitTransform

    def chunk(self, start: int, width: int) -> Tensor:
        """Returns the logits of the words from `start` on: [N, C] float32, in memory that the caller may overwrite."""
        logits = self.transform.forward_(project_float32(self.states, self.weight[start : start + width]))
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def before_temperature(self, logits: Tensor) -> Tensor | None:
        """Returns what the backward of a softcap needs of a chunk, in memory of its own; None without a softcap."""
        return None if self.transform.softcap is None else logits * self.temperature


class VocabularyGradients:
    """Gradients of the states and the weight behind some logits, from those of the logits, chunk by chunk."""

    def __init__(self, logits: VocabularyLogits, upstream: Tensor, needs_grad: Sequence[bool]) -> None:
        """
        Args:
            upstream: [N] float32, what every gradient of a row's logits is multiplied by.
            needs_grad: whether the gradients of the states and of the weight are needed.
        """
        self._logits = logits
        needs_states, needs_weight = needs_grad
        self._of_states = torch.zeros_like(logits.states, dtype=torch.float32) if needs_states else None
        self._of_weight = torch.empty_like(logits.weight) if needs_weight else None
        transform = logits.transform
        scale = 1.0 if transform.softcap is not None else transform.scale  # behind a softcap, backward_ applies it
        self._factor = upstream[:, None] * (scale / logits.temperature)

    def add_(self, start: int, grad: Tensor, before_temperature: Tensor | None) -> None:
        """Takes the gradient [N, C] float32 of the words from `start` on, and overwrites it."""
        states, words = self._logits.states, slice(start, start + grad.shape[1])
        weight = self._logits.weight[words]
        if before_temperature is not None:
            grad = self._logits.transform.backward_(grad, before_temperature)
        rounded = grad if weight.dtype == grad.dtype else torch.empty_like(grad, dtype=weight.dtype)
        grad = torch.mul(grad, self._factor, out=rounded)
        if self._of_states is not None:
            self._of_states += grad @ weight
        if self._of_weight is not None:
            torch.mm(grad.t(), states, out=self._of_weight[words])

    def results(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the gradients of the states and of the weight, each in its dtype; None where it is not needed."""
        of_states = self._of_states
        return (None if of_states is None else of_states.to(self._logits.states.dtype)), self._of_weight


class RunningSoftmax:
    """The softmax over a vocabulary that arrives in chunks: a running maximum and sum (online softmax, Milakov and
    Gimelshein 2018), and the mean of values under it."""

    def __init__(self, num_scored: int, device: torch.device) -> None:
        self._maximum = torch.full((num_scored,), float("-inf"), device=device)
        self.total, self._weighted = (torch.zeros(num_scored, device=device) for _ in range(2))

    def add_(self, logits: Tensor, values: Tensor | None = None) -> Tensor:
        """Takes one more chunk [N, C] of logits and of the values whose mean is wanted.

        Returns:
            exp(logits - the maximum so far), written over the logits unless they are the values too.
        """
        maximum = torch.maximum(self._maximum, logits.amax(dim=1))
        rescale = torch.exp(self._maximum - maximum)
        self._maximum = maximum
        shifted = logits - maximum[:, None] if values is logits else logits.sub_(maximum[:, None])
        exponentials = shifted.exp_()
        self.total = self.total * rescale + exponentials.sum(dim=1)
        if values is not None:
            self._weighted = self._weighted * rescale + torch.linalg.vecdot(exponentials, values)
        return exponentials

    def log_total(self) -> Tensor:
        """[N], the logarithm of the sum of exp(logits)."""
        return self._maximum + self.total.log()

    def mean(self) -> Tensor:
        """[N], the mean of the values, weighted with the probabilities."""
        return self._weighted / self.total

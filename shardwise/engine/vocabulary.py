"""Logits in chunks of the vocabulary, and what is summed over them: never all logits at once.

Shapes: N scored tokens, D hidden size, V vocabulary, C vocabulary chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.ops import LogitTransform, project_float32

CHUNK_ELEMENTS = 2 * 2**20
"""Logits that exist at a time: 8 MiB of float32, whatever the vocabulary and the batch. The caches of a CPU hold as
much, and the C library keeps memory of that size for the next chunk; 32 MiB would be new pages of the kernel each
time."""
LEAST_ON_ACCELERATOR, MOST_ON_ACCELERATOR = 8 * 2**20, 128 * 2**20
"""On an accelerator a 16th of all logits exists at a time, within these bounds: as many kernels as 8 MiB would need
take longer to launch than to run."""
KEPT_CHUNKS = 4
"""What is computed of so many chunks may be kept from forward to backward, which spares backward the projection."""


def chunk_size(num_scored: int, vocab: int, device: torch.device, *, may_keep: bool = False) -> int:
    """Columns of logits at a time: the whole vocabulary, or a multiple of 128, which matrix products like best.

    Args:
        may_keep: whether the caller keeps what it computes of the whole vocabulary (see KEPT_CHUNKS).
    """
    if may_keep and num_scored * vocab <= KEPT_CHUNKS * CHUNK_ELEMENTS:
        return vocab
    elements = CHUNK_ELEMENTS
    if device.type != "cpu":
        elements = min(max(num_scored * vocab // 16, LEAST_ON_ACCELERATOR), MOST_ON_ACCELERATOR)
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
        # Matrices in half precision: a GPU multiplies them fast, and most CPUs slowly.
        self._dtype = logits.weight.dtype if logits.weight.is_cuda else torch.float32
        self._states = logits.states.to(self._dtype)

    def add_(self, start: int, grad: Tensor, before_temperature: Tensor | None) -> None:
        """Takes the gradient [N, C] float32 of the words from `start` on, and overwrites it."""
        words = slice(start, start + grad.shape[1])
        if before_temperature is not None:
            grad = self._logits.transform.backward_(grad, before_temperature)
        rounded = grad if self._dtype == grad.dtype else torch.empty_like(grad, dtype=self._dtype)
        grad = torch.mul(grad, self._factor, out=rounded)
        if self._of_states is not None:
            self._of_states += grad @ self._logits.weight[words].to(self._dtype)
        if self._of_weight is not None:
            out = self._of_weight[words]
            if out.dtype == self._dtype:
                torch.mm(grad.t(), self._states, out=out)
            else:
                out.copy_(grad.t() @ self._states)

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

"""Logprobs and entropy from hidden states, without ever holding all logits.

Shapes: N scored tokens, D hidden size, V vocabulary, C vocabulary chunk.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.ops import LogitTransform, project_float32

CHUNK_ELEMENTS = 8 * 2**20
"""Logits that exist at a time: 32 MiB of float32, whatever the vocabulary and the batch. On an accelerator at least."""
MAX_ACCELERATOR_ELEMENTS = 128 * 2**20
"""On an accelerator a 16th of all logits exists at a time, up to this: as many kernels as 32 MiB would need take longer
to launch than to run."""


def selected_logprobs(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    transform: LogitTransform,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Logprobs of the tokens that states predict, and the entropy of the distributions they come from.

    Args:
        states: [N, D], hidden states; no other logits are computed. weight: [V, D], the output projection.
        targets: [N] int64, the token after each state.
        temperature: logits are divided by it, after the family's own transform.
        with_entropy: False leaves entropy at 0 and saves a pass over the logits.
    Returns:
        logprobs [N] float32 (differentiable) and entropy [N] float32 (not).
    """
    logprobs, entropy = _VocabularyLogprobs.apply(states, weight, targets, temperature, transform, with_entropy)
    return logprobs, entropy


class _VocabularyLogprobs(torch.autograd.Function):
    """log softmax at the targets, in vocabulary chunks with a running maximum and sum (online softmax, Milakov and
    Gimelshein 2018). Backward recomputes each chunk; with a single chunk it keeps the probabilities instead."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        transform: LogitTransform,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        num_scored, vocab = states.shape[0], weight.shape[0]
        chunk = _chunk_size(num_scored, vocab, states.device)
        maximum = torch.full((num_scored,), float("-inf"), device=states.device)
        total, weighted, target_logit = (torch.zeros(num_scored, device=states.device) for _ in range(3))
        for start in range(0, vocab, chunk):
            logits = _logits(states, weight[start : start + chunk], temperature, transform)
            inside, column = _find(targets, start, logits)
            target_logit = torch.where(inside, logits.gather(1, column)[:, 0], target_logit)
            new_maximum = torch.maximum(maximum, logits.amax(dim=1))
            rescale = torch.exp(maximum - new_maximum)
            maximum = new_maximum
            if with_entropy:
                exponentials = (logits - maximum[:, None]).exp_()
                weighted = weighted * rescale + torch.linalg.vecdot(exponentials, logits)
            else:
                exponentials = logits.sub_(maximum[:, None]).exp_()
            total = total * rescale + exponentials.sum(dim=1)
        log_total = maximum + total.log()
        logprobs = target_logit - log_total
        entropy = log_total - weighted / total if with_entropy else torch.zeros_like(log_total)
        # One chunk holds every probability already: keeping them spares backward the projection.
        keeps = chunk == vocab and any(ctx.needs_input_grad) and transform.softcap is None
        kept = exponentials.div_(total[:, None]) if keeps else None
        ctx.save_for_backward(states, weight, targets, logprobs, log_total, kept)
        ctx.settings = (temperature, transform, chunk)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, _grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, targets, logprobs, log_total, kept = ctx.saved_tensors
        temperature, transform, chunk = ctx.settings
        needs_states, needs_weight = ctx.needs_input_grad[:2]
        grad_states = torch.zeros_like(states, dtype=torch.float32) if needs_states else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        scale = 1.0 if transform.softcap is not None else transform.scale  # behind a softcap, backward_ applies it
        factor = grad_logprobs[:, None] * (-scale / temperature)
        at_target = torch.expm1(logprobs)  # probability - 1
        for start in range(0, weight.shape[0], chunk):
            part = weight[start : start + chunk]
            transformed = None
            if kept is not None:
                grad = kept.clone()
            else:
                scaled = _logits(states, part, temperature, transform)
                transformed = scaled * temperature if transform.softcap is not None else None
                grad = scaled.sub_(log_total[:, None]).exp_()
            inside, column = _find(targets, start, grad)
            grad.scatter_(1, column, torch.where(inside, at_target, grad.gather(1, column)[:, 0])[:, None])
            if transformed is not None:
                grad = transform.backward_(grad, transformed)
            rounded = grad if weight.dtype == grad.dtype else torch.empty_like(grad, dtype=weight.dtype)
            grad = torch.mul(grad, factor, out=rounded)
            if grad_states is not None:
                grad_states += grad @ part
            if grad_weight is not None:
                torch.mm(grad.t(), states, out=grad_weight[start : start + chunk])
        return (None if grad_states is None else grad_states.to(states.dtype)), grad_weight, None, None, None, None


def _chunk_size(num_scored: int, vocab: int, device: torch.device) -> int:
    """Columns of logits at a time: the whole vocabulary, or a multiple of 128, which matrix products like best."""
    elements = CHUNK_ELEMENTS
    if device.type != "cpu":
        elements = max(elements, min(num_scored * vocab // 16, MAX_ACCELERATOR_ELEMENTS))
    columns = elements // max(1, num_scored)
    return vocab if columns >= vocab else min(vocab, max(128, columns // 128 * 128))


def _find(targets: Tensor, start: int, chunk: Tensor) -> tuple[Tensor, Tensor]:
    """Which targets [N] lie in a chunk [N, C] of the vocabulary, and their columns [N, 1] (any column where not)."""
    width = chunk.shape[1]
    return (targets >= start) & (targets < start + width), (targets - start).clamp(0, width - 1)[:, None]


def _logits(states: Tensor, weight: Tensor, temperature: float, transform: LogitTransform) -> Tensor:
    """[N, C] float32, transformed and divided by the temperature."""
    logits = transform.forward_(project_float32(states, weight))
    return logits if temperature == 1.0 else logits.div_(temperature)

"""Logprobs and entropy from hidden states, without ever holding all logits.

Shapes: N scored tokens, D hidden size, V vocabulary, C vocabulary chunk.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.ops import LogitTransform, project_float32

CHUNK_ELEMENTS = 8 * 2**20
"""Logits that exist at a time: 32 MiB of float32, whatever the vocabulary and the batch."""


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
        chunk = min(vocab, max(128, CHUNK_ELEMENTS // max(1, num_scored)))
        maximum = torch.full((num_scored,), float("-inf"), device=states.device)
        total, weighted, target_logit = (torch.zeros(num_scored, device=states.device) for _ in range(3))
        for start in range(0, vocab, chunk):
            logits = _logits(states, weight[start : start + chunk], temperature, transform)
            inside = (targets >= start) & (targets < start + chunk)
            picked = logits.gather(1, (targets - start).clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
            target_logit = torch.where(inside, picked, target_logit)
            new_maximum = torch.maximum(maximum, logits.amax(dim=1))
            rescale = torch.exp(maximum - new_maximum)
            maximum = new_maximum
            if with_entropy:
                exponentials = torch.exp(logits - maximum[:, None])
                weighted = weighted * rescale + torch.linalg.vecdot(exponentials, logits)
            else:
                exponentials = logits.sub_(maximum[:, None]).exp_()
            total = total * rescale + exponentials.sum(dim=1)
        log_total = maximum + total.log()
        entropy = log_total - weighted / total if with_entropy else torch.zeros_like(log_total)
        # One chunk holds every probability already: keeping them spares backward the projection.
        kept = exponentials.div_(total[:, None]) if chunk == vocab and any(ctx.needs_input_grad) else None
        softcap_chunk = kept is not None and transform.softcap is not None
        ctx.save_for_backward(states, weight, targets, log_total, None if softcap_chunk else kept)
        ctx.settings = (temperature, transform, chunk)
        ctx.mark_non_differentiable(entropy)
        return target_logit - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, _grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, targets, log_total, kept = ctx.saved_tensors
        temperature, transform, chunk = ctx.settings
        needs_states, needs_weight = ctx.needs_input_grad[:2]
        grad_states = torch.zeros_like(states, dtype=torch.float32) if needs_states else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        for start in range(0, weight.shape[0], chunk):
            part = weight[start : start + chunk]
            if kept is not None:
                transformed, grad = None, kept * -grad_logprobs[:, None]
            else:
                scaled = _logits(states, part, temperature, transform)
                transformed = scaled * temperature if transform.softcap is not None else None
                grad = scaled.sub_(log_total[:, None]).exp_().mul_(-grad_logprobs[:, None])
            inside = (targets >= start) & (targets < start + chunk)
            column = (targets - start).clamp(0, part.shape[0] - 1)[:, None]
            grad.scatter_add_(1, column, torch.where(inside, grad_logprobs, 0.0)[:, None])
            grad.div_(temperature)
            if transformed is not None:
                grad = transform.backward_(grad, transformed)
            elif transform.scale != 1.0:
                grad.mul_(transform.scale)
            grad = grad.to(weight.dtype)
            if grad_states is not None:
                grad_states += grad @ part
            if grad_weight is not None:
                torch.mm(grad.t(), states, out=grad_weight[start : start + chunk])
        return (None if grad_states is None else grad_states.to(states.dtype)), grad_weight, None, None, None, None


def _logits(states: Tensor, weight: Tensor, temperature: float, transform: LogitTransform) -> Tensor:
    """[N, C] float32, transformed and divided by the temperature."""
    logits = transform.forward_(project_float32(states, weight))
    return logits if temperature == 1.0 else logits.div_(temperature)

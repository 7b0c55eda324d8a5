"""Logprobs and entropy from hidden states, without ever holding all logits.

Shapes: N scored tokens, D hidden size, V vocabulary, C vocabulary chunk.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.engine.vocabulary import RunningSoftmax, VocabularyGradients, VocabularyLogits, chunk_size
from shardwise.ops import LogitTransform


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
    """log softmax at the targets, in vocabulary chunks. Backward recomputes each chunk; with a single chunk it keeps
    the probabilities instead."""

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
        source = VocabularyLogits(states, weight, temperature, transform)
        num_scored, vocab = states.shape[0], weight.shape[0]
        may_keep = any(ctx.needs_input_grad) and transform.softcap is None
        chunk = chunk_size(num_scored, vocab, states.device, may_keep=may_keep)
        softmax = RunningSoftmax(num_scored, states.device)
        target_logit = torch.zeros(num_scored, device=states.device)
        for start in range(0, vocab, chunk):
            logits = source.chunk(start, chunk)
            inside, column = _find(targets, start, logits)
            target_logit = torch.where(inside, logits.gather(1, column)[:, 0], target_logit)
            exponentials = softmax.add_(logits, logits if with_entropy else None)
        log_total = softmax.log_total()
        logprobs = target_logit - log_total
        entropy = log_total - softmax.mean() if with_entropy else torch.zeros_like(log_total)
        kept = exponentials.div_(softmax.total[:, None]) if may_keep and chunk == vocab else None
        ctx.save_for_backward(states, weight, targets, logprobs, log_total, kept)
        ctx.settings = (temperature, transform, chunk)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, _grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, targets, logprobs, log_total, kept = ctx.saved_tensors
        temperature, transform, chunk = ctx.settings
        source = VocabularyLogits(states, weight, temperature, transform)
        gradients = VocabularyGradients(source, -grad_logprobs, ctx.needs_input_grad[:2])
        at_target = torch.expm1(logprobs)  # probability - 1
        for start in range(0, weight.shape[0], chunk):
            before_temperature = None
            if kept is not None:
                grad = kept.clone()
            else:
                logits = source.chunk(start, chunk)
                before_temperature = source.before_temperature(logits)
                grad = logits.sub_(log_total[:, None]).exp_()
            inside, column = _find(targets, start, grad)
            grad.scatter_(1, column, torch.where(inside, at_target, grad.gather(1, column)[:, 0])[:, None])
            gradients.add_(start, grad, before_temperature)
        return *gradients.results(), None, None, None, None


def _find(targets: Tensor, start: int, chunk: Tensor) -> tuple[Tensor, Tensor]:
    """Which targets [N] lie in a chunk [N, C] of the vocabulary, and their columns [N, 1] (any column where not)."""
    width = chunk.shape[1]
    return (targets >= start) & (targets < start + width), (targets - start).clamp(0, width - 1)[:, None]

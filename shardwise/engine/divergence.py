"""How far a student's distributions over the vocabulary are from a teacher's, without ever holding all logits.

Shapes: N scored tokens, D hidden size of the student, E of the teacher, V vocabulary, C vocabulary chunk.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.engine.vocabulary import RunningSoftmax, VocabularyGradients, VocabularyLogits, chunk_size
from shardwise.ops import LogitTransform

DivergenceKind = Literal["forward_kl", "reverse_kl", "jensen_shannon"]
"""forward_kl: KL(teacher || student). reverse_kl: KL(student || teacher). jensen_shannon: between both, by beta."""

VocabularyTerms = Callable[[Tensor, Tensor], Tensor]
"""A custom divergence, as what is summed over the vocabulary: (student_logprobs [N, C], teacher_logprobs [N, C])
-> terms [N, C], with a graph where student_logprobs have one. A term may depend on its own word alone: which others are
in its chunk depends on memory. Probabilities may be 0 in float32, and their logarithms large and negative."""


def vocabulary_divergence(
    states: Tensor,
    weight: Tensor,
    teacher_states: Tensor,
    teacher_weight: Tensor,
    *,
    kind: DivergenceKind | VocabularyTerms,
    beta: float,
    temperature: float,
    transform: LogitTransform,
    teacher_transform: LogitTransform,
) -> Tensor:
    """Divergence of the student's distribution from the teacher's, for every token that states predict.

    Args:
        states, weight: [N, D] and [V, D], the student's hidden states and output projection.
        teacher_states, teacher_weight: [N, E] and [V, E]; carry no gradient.
        kind: one of the names above, or the terms of a custom divergence.
        beta: in (0, 1), used by jensen_shannon: beta KL(teacher || M) + (1 - beta) KL(student || M) with the mixture
            M = beta teacher + (1 - beta) student. Divided by beta it nears forward_kl as beta goes to 0, divided by
            1 - beta it nears reverse_kl as beta goes to 1.
        temperature: the logits of both are divided by it. The gradient falls with its square (Hinton et al. 2015); it
            is not scaled back here.
        transform, teacher_transform: what each family does to its logits before that.
    Returns:
        [N] float32, nats; differentiable in states and weight.
    Source: generalized Jensen-Shannon divergence of Agarwal et al. 2024 (GKD), eq. 1.
    """
    assert weight.shape[0] == teacher_weight.shape[0], (weight.shape, teacher_weight.shape)
    assert states.shape[0] == teacher_states.shape[0], (states.shape, teacher_states.shape)
    assert not teacher_states.requires_grad, "a teacher learns nothing"
    assert not teacher_weight.requires_grad, "a teacher learns nothing"
    assert kind != "jensen_shannon" or 0.0 < beta < 1.0, f"beta={beta}"
    tensors, settings = (states, weight, teacher_states, teacher_weight), (temperature, transform, teacher_transform)
    divergence: Tensor = (
        _SumOfTerms.apply(*tensors, kind, *settings)
        if callable(kind)
        else _VocabularyDivergence.apply(*tensors, kind, beta, *settings)
    )
    return divergence


class _VocabularyDivergence(torch.autograd.Function):
    """Sums in vocabulary chunks. The two KL divergences take one pass over the logits; the mixture of jensen_shannon
    needs both totals first, so it takes two. Backward computes the logits once more."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        teacher_states: Tensor,
        teacher_weight: Tensor,
        kind: DivergenceKind,
        beta: float,
        temperature: float,
        transform: LogitTransform,
        teacher_transform: LogitTransform,
    ) -> Tensor:
        student = VocabularyLogits(states, weight, temperature, transform)
        teacher = VocabularyLogits(teacher_states, teacher_weight, temperature, teacher_transform)
        num_scored, vocab = states.shape[0], weight.shape[0]
        chunk = chunk_size(2 * num_scored, vocab, states.device)  # the logits of both models are held
        softmax, teacher_softmax = (RunningSoftmax(num_scored, states.device) for _ in range(2))
        for start in range(0, vocab, chunk):
            logits, teacher_logits = student.chunk(start, chunk), teacher.chunk(start, chunk)
            difference = None if kind == "jensen_shannon" else logits - teacher_logits
            softmax.add_(logits, difference if kind == "reverse_kl" else None)
            teacher_softmax.add_(teacher_logits, difference if kind == "forward_kl" else None)
        log_total, teacher_log_total = softmax.log_total(), teacher_softmax.log_total()
        match kind:
            case "forward_kl":
                divergence = (log_total - teacher_log_total) - teacher_softmax.mean()
                center = None
            case "reverse_kl":
                divergence = softmax.mean() - (log_total - teacher_log_total)
                center = divergence
            case "jensen_shannon":
                divergence, center = torch.zeros_like(log_total), torch.zeros_like(log_total)
                for start in range(0, vocab, chunk):
                    log_probs = student.chunk(start, chunk).sub_(log_total[:, None])
                    teacher_log_probs = teacher.chunk(start, chunk).sub_(teacher_log_total[:, None])
                    log_mixture = _log_mixture(log_probs, teacher_log_probs, beta)
                    center += (1 - beta) * _expected(log_probs, log_mixture)
                    divergence += beta * _expected(teacher_log_probs, log_mixture)
                divergence += center
        ctx.save_for_backward(states, weight, teacher_states, teacher_weight, log_total, teacher_log_total, center)
        ctx.settings = (kind, beta, temperature, transform, teacher_transform, chunk)
        return divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_divergence: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, teacher_states, teacher_weight, log_total, teacher_log_total, center = ctx.saved_tensors
        kind, beta, temperature, transform, teacher_transform, chunk = ctx.settings
        student = VocabularyLogits(states, weight, temperature, transform)
        teacher = VocabularyLogits(teacher_states, teacher_weight, temperature, teacher_transform)
        gradients = VocabularyGradients(student, grad_divergence, ctx.needs_input_grad[:2])
        for start in range(0, weight.shape[0], chunk):
            logits = student.chunk(start, chunk)
            before_temperature = student.before_temperature(logits)
            log_probs = logits.sub_(log_total[:, None])
            teacher_log_probs = teacher.chunk(start, chunk).sub_(teacher_log_total[:, None])
            match kind:
                case "forward_kl":
                    grad = log_probs.exp_().sub_(teacher_log_probs.exp_())
                case "reverse_kl":
                    grad = teacher_log_probs.neg_().add_(log_probs).sub_(center[:, None]).mul_(log_probs.exp_())
                case "jensen_shannon":
                    log_mixture = _log_mixture(log_probs, teacher_log_probs, beta)
                    grad = log_mixture.neg_().add_(log_probs).mul_(1 - beta).sub_(center[:, None])
                    grad.mul_(log_probs.exp_())
            gradients.add_(start, grad, before_temperature)
        return *gradients.results(), *[None] * 7


class _SumOfTerms(torch.autograd.Function):
    """Sums custom terms in vocabulary chunks. The normalization of both models comes first, so forward takes two passes
    over the logits; backward computes them once more.

    With l the student's log probabilities, p = exp(l), z its logits and f' the terms' derivatives with respect to l,
    d sum_v f(l_v) / d z_j = f'_j - p_j sum_v f'_v, because d l_v / d z_j = 1[v = j] - p_j. sum_v f'_v is divided by
    sum_v p_v, which rounding keeps from 1: so the gradient of a row sums to 0, as that of anything normalized does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        teacher_states: Tensor,
        teacher_weight: Tensor,
        terms: VocabularyTerms,
        temperature: float,
        transform: LogitTransform,
        teacher_transform: LogitTransform,
    ) -> Tensor:
        student = VocabularyLogits(states, weight, temperature, transform)
        teacher = VocabularyLogits(teacher_states, teacher_weight, temperature, teacher_transform)
        num_scored, vocab = states.shape[0], weight.shape[0]
        chunk = chunk_size(2 * num_scored, vocab, states.device)  # the logits of both models are held
        softmax, teacher_softmax = (RunningSoftmax(num_scored, states.device) for _ in range(2))
        for start in range(0, vocab, chunk):
            softmax.add_(student.chunk(start, chunk))
            teacher_softmax.add_(teacher.chunk(start, chunk))
        log_total, teacher_log_total = softmax.log_total(), teacher_softmax.log_total()
        divergence, slope, total = (torch.zeros_like(log_total) for _ in range(3))
        for start in range(0, vocab, chunk):
            log_probs = student.chunk(start, chunk).sub_(log_total[:, None])
            teacher_log_probs = teacher.chunk(start, chunk).sub_(teacher_log_total[:, None])
            if not any(ctx.needs_input_grad):
                divergence += terms(log_probs, teacher_log_probs).sum(1)
                continue
            values, slopes = _terms_and_slopes(terms, log_probs, teacher_log_probs)
            divergence += values.sum(1)
            slope += slopes.sum(1)
            total += log_probs.exp_().sum(1)
        slope /= total
        ctx.save_for_backward(states, weight, teacher_states, teacher_weight, log_total, teacher_log_total, slope)
        ctx.settings = (terms, temperature, transform, teacher_transform, chunk)
        return divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_divergence: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, teacher_states, teacher_weight, log_total, teacher_log_total, slope = ctx.saved_tensors
        terms, temperature, transform, teacher_transform, chunk = ctx.settings
        student = VocabularyLogits(states, weight, temperature, transform)
        teacher = VocabularyLogits(teacher_states, teacher_weight, temperature, teacher_transform)
        gradients = VocabularyGradients(student, grad_divergence, ctx.needs_input_grad[:2])
        for start in range(0, weight.shape[0], chunk):
            logits = student.chunk(start, chunk)
            before_temperature = student.before_temperature(logits)
            log_probs = logits.sub_(log_total[:, None])
            teacher_log_probs = teacher.chunk(start, chunk).sub_(teacher_log_total[:, None])
            _, slopes = _terms_and_slopes(terms, log_probs, teacher_log_probs)
            gradients.add_(start, slopes - log_probs.exp_().mul_(slope[:, None]), before_temperature)
        return *gradients.results(), *[None] * 6


def _terms_and_slopes(terms: VocabularyTerms, log_probs: Tensor, teacher_log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """The terms of a chunk, and their derivatives with respect to the student's log probabilities, [N, C] each."""
    with torch.enable_grad():
        leaf = log_probs.detach().requires_grad_()
        values = terms(leaf, teacher_log_probs)
        (slopes,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), slopes


def _log_mixture(log_probs: Tensor, teacher_log_probs: Tensor, beta: float) -> Tensor:
    """[N, C]: log(beta teacher + (1 - beta) student)."""
    return torch.logaddexp(teacher_log_probs + math.log(beta), log_probs + math.log1p(-beta))


def _expected(log_probs: Tensor, log_others: Tensor) -> Tensor:
    """[N]: sum of p (log p - log q) over a chunk [N, C]; overwrites `log_probs`."""
    difference = log_probs - log_others
    return torch.linalg.vecdot(log_probs.exp_(), difference)

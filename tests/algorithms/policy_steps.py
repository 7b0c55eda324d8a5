"""Random steps for the tests of policy losses, and each loss as a loop over the paper's formula.

A step is a list of sequences, a sequence a list of tokens (logprob, old logprob, advantage, trained, selected). The
loops give value and gradient of one sequence's tokens and share no code with what they check.
"""

from typing import get_args

import numpy as np
import torch
from hypothesis import strategies as st

from shardwise.algorithms.masked import Aggregation, aggregate
from shardwise.types import Denominators, merge_metrics

MODES = get_args(Aggregation)
NOTHING = (
    torch.zeros(1),
    torch.zeros(1),
    torch.tensor([False]),
    torch.tensor([0, 1], dtype=torch.int32),
    torch.tensor([False]),
)
"""What follows logprobs in a micro-batch that holds no sample: one masked token."""

near = st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-5, 5), st.booleans(), st.booleans())
far = st.tuples(st.floats(-60, 0), st.floats(-60, 0), st.floats(-5, 5), st.booleans(), st.booleans())
steps = st.lists(st.lists(near, min_size=1, max_size=5) | st.lists(far, min_size=1, max_size=3), min_size=1, max_size=5)


def random_step(seed, lengths, *, spread=0.5, one_advantage=False):
    """A step in float64; with `one_advantage` the tokens of a sequence share it."""
    rng = np.random.default_rng(seed)
    step = []
    for length in lengths:
        old = rng.uniform(-3, -0.5, length)
        new = np.minimum(old + spread * rng.standard_normal(length), -1e-3)
        advantages = rng.standard_normal(1 if one_advantage else length) * np.ones(length)
        flags = rng.random((2, length)) < [[0.8], [0.3]]
        step.append(
            [(*map(float, row), bool(t), bool(s)) for *row, t, s in zip(new, old, advantages, *flags, strict=True)]
        )
    return step


def packed(step):
    """logprobs (a leaf), old_logprobs, advantages, loss_mask, cu_seqlens, selected."""
    new, old, advantages, mask, selected = zip(*(token for sequence in step for token in sequence), strict=True)
    logprobs, old, advantages = (torch.tensor(a, dtype=torch.float64) for a in (new, old, advantages))
    cu_seqlens = torch.tensor([0, *np.cumsum([len(s) for s in step])], dtype=torch.int32)
    return logprobs.requires_grad_(), old, advantages, torch.tensor(mask), cu_seqlens, torch.tensor(selected)


def counts(step):
    lengths = [sum(token[3] for token in sequence) for sequence in step]
    return Denominators(num_tokens=sum(lengths), num_sequences=sum(n > 0 for n in lengths))


def aggregated(loss_fn, arrays, denominators, mode):
    """The scalar of one micro-batch, as the engine makes it, and the metrics."""
    losses, metrics = loss_fn(*arrays)
    divisor = 7.0 if mode == "seq-mean-token-sum-norm" else None
    arguments = {"loss_mask": arrays[3], "cu_seqlens": arrays[4], "denominators": denominators}
    return aggregate(losses, mode=mode, divisor=divisor, **arguments), metrics


def assert_invariant_to_splits(loss_fn, step, micro_batches, mode):
    """Trap 1: value, gradient and metrics of the whole step in one micro-batch are those of any split, in any order."""
    denominators = counts(step)
    arrays = packed(step)
    whole, whole_metrics = aggregated(loss_fn, arrays, denominators, mode)
    whole.backward()
    expected = arrays[0].grad.split([len(s) for s in step])
    total, parts = 0.0, []
    for indices in micro_batches:
        members = [step[i] for i in indices] or [[(0.0, 0.0, 0.0, False, False)]]
        arrays = packed(members)
        share, metrics = aggregated(loss_fn, arrays, denominators, mode)
        share.backward()
        total, parts = total + share.item(), [*parts, metrics]
        for i, gradient in zip(indices, arrays[0].grad.split([len(m) for m in members]), strict=False):
            np.testing.assert_allclose(gradient, expected[i], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(total, whole.item(), rtol=1e-9, atol=1e-9)
    for name, value in merge_metrics(parts).items():
        np.testing.assert_allclose(value.result(), whole_metrics[name].result(), rtol=1e-9, atol=1e-12, err_msg=name)


def assert_equals_loops(loss_fn, loop, step):
    """`loop(tokens, selected)` gives (loss, gradient) of each trained token of a sequence; tokens are
    (logprob, clamped log ratio, advantage, old logprob) and the gradient is the one with respect to the logprob where
    the ratio is not clamped."""
    arrays = packed(step)
    losses, metrics = loss_fn(*arrays)
    losses.sum().backward()
    expected, gradients = [], []
    for sequence in step:
        trained = [token for token in sequence if token[3]]
        tokens = [(new, min(max(new - old, -20.0), 20.0), a, old) for new, old, a, _, _ in trained]
        values = iter(loop(tokens, [token[4] for token in trained]) if trained else [])
        for token in sequence:
            loss, gradient = next(values) if token[3] else (0.0, 0.0)
            expected.append(loss)
            gradients.append(gradient)
    np.testing.assert_allclose(losses.detach(), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(arrays[0].grad, gradients, rtol=1e-9, atol=1e-12)
    num_clamped = sum(abs(new - old) > 20 for s in step for new, old, _, trained, _ in s if trained)
    assert metrics["policy/log_ratio_clamped"].result() == num_clamped
    return metrics


def assert_gradcheck(loss_fn, step):
    """Every token's loss, differentiated numerically."""
    logprobs, *rest = packed(step)
    assert torch.autograd.gradcheck(lambda p: loss_fn(p, *rest)[0], logprobs)


def assert_gradcheck_of_sequences(loss_fn, step, mode):
    """The loss of the step, differentiated numerically: where a sequence's tokens share their value without a gradient,
    only the sum over them has the right one."""
    logprobs, *rest = packed(step)
    assert torch.autograd.gradcheck(lambda p: aggregated(loss_fn, (p, *rest), counts(step), mode)[0], logprobs)


def passes(token):
    """Whether a path through the token's ratio has a gradient: its log ratio is not clamped."""
    new, _, _, old = token
    return abs(new - old) <= 20


def split_at_random(data, step):
    """Up to three micro-batches, some perhaps empty, with the sequences in any order."""
    order = data.draw(st.permutations(range(len(step))))
    place = data.draw(st.lists(st.integers(0, 2), min_size=len(order), max_size=len(order)))
    return [[i for i, p in zip(order, place, strict=True) if p == k] for k in range(3)]

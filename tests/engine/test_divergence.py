"""Divergences over the vocabulary against float64 and all logits: values, gradients, memory."""

import math

import pytest
import torch
from tensor_shapes import TensorShapes

from shardwise.engine import vocabulary
from shardwise.engine.divergence import vocabulary_divergence
from shardwise.ops import LogitTransform

NUM_SCORED, DIM, TEACHER_DIM, VOCAB = 5, 6, 9, 517


def own_forward_kl(student_logprobs, teacher_logprobs):
    return teacher_logprobs.exp() * (teacher_logprobs - student_logprobs)


def own_reverse_kl(student_logprobs, teacher_logprobs):
    return student_logprobs.exp() * (student_logprobs - teacher_logprobs)


def squared_hellinger(student_logprobs, teacher_logprobs):
    return ((student_logprobs / 2).exp() - (teacher_logprobs / 2).exp()).square()


KINDS = {
    "forward": ("forward_kl", 0.5),
    "reverse": ("reverse_kl", 0.5),
    "js-0.5": ("jensen_shannon", 0.5),
    "js-0.1": ("jensen_shannon", 0.1),
    "js-0.9": ("jensen_shannon", 0.9),
    "own-forward": (own_forward_kl, 0.5),
    "own-reverse": (own_reverse_kl, 0.5),
    "own-hellinger": (squared_hellinger, 0.5),
}
TRANSFORMS = {
    "plain": (LogitTransform(), LogitTransform()),
    "scaled": (LogitTransform(scale=0.25), LogitTransform(scale=1.3)),
    "student-softcap": (LogitTransform(scale=1.7, softcap=2.0), LogitTransform()),
    "both-softcap": (LogitTransform(softcap=3.0), LogitTransform(scale=0.5, softcap=4.0)),
}
PLAIN = TRANSFORMS["plain"]


def inputs(num_scored=NUM_SCORED, dim=DIM, teacher_dim=TEACHER_DIM, vocab=VOCAB):
    """Student's states and weight, teacher's states and weight."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_scored, dim), (vocab, dim), (num_scored, teacher_dim), (vocab, teacher_dim)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def divergence(tensors, kind, beta, transforms=PLAIN, temperature=1.0):
    transform, teacher_transform = transforms
    return vocabulary_divergence(
        *tensors,
        kind=kind,
        beta=beta,
        temperature=temperature,
        transform=transform,
        teacher_transform=teacher_transform,
    )


def log_probs(states, weight, temperature, transform):
    logits = states @ weight.t() * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    return (logits / temperature).log_softmax(dim=1)


def kl(first, second):
    """KL(first || second) of two arrays of log probabilities [N, V]."""
    return (first.exp() * (first - second)).sum(dim=1)


def reference(tensors, kind, beta, transforms=PLAIN, temperature=1.0):
    """From all logits, in the dtype of the tensors."""
    states, weight, teacher_states, teacher_weight = tensors
    student = log_probs(states, weight, temperature, transforms[0])
    teacher = log_probs(teacher_states, teacher_weight, temperature, transforms[1])
    if callable(kind):
        return kind(student, teacher).sum(dim=1)
    if kind == "forward_kl":
        return kl(teacher, student)
    if kind == "reverse_kl":
        return kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log(1 - beta))
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def with_student_leaves(tensors, dtype=None):
    """Copies of which the student's two want a gradient."""
    copies = [tensor.detach().clone() if dtype is None else tensor.detach().to(dtype) for tensor in tensors]
    return [copy.requires_grad_(place < 2) for place, copy in enumerate(copies)]


def compared(tensors, kind, beta, transforms=PLAIN, temperature=1.0):
    """(found, float64 reference) of the values, the gradient of the states and that of the weight."""
    upstream = torch.linspace(-1.5, 2.0, len(tensors[0]))
    ours, exact = with_student_leaves(tensors), with_student_leaves(tensors, torch.float64)
    found = divergence(ours, kind, beta, transforms, temperature)
    expected = reference(exact, kind, beta, transforms, temperature)
    (found * upstream).sum().backward()
    (expected * upstream).sum().backward()
    return (found.detach(), expected.detach()), *((a.grad, b.grad) for a, b in zip(ours[:2], exact[:2], strict=True))


@pytest.fixture(params=["one-chunk", "chunks-of-256", "chunks-of-128"])
def num_chunks(request, monkeypatch):
    """517 words: neither size divides them."""
    columns = {"one-chunk": VOCAB, "chunks-of-256": 256, "chunks-of-128": 128}[request.param]
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 2 * NUM_SCORED * columns)
    return math.ceil(VOCAB / columns)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize(("kind", "beta"), KINDS.values(), ids=KINDS.keys())
def test_values_and_gradients_equal_all_logits_in_float64(num_chunks, kind, beta, transforms, temperature):
    values, *gradients = compared(inputs(), kind, beta, transforms, temperature)
    assert values[0].dtype == torch.float32
    torch.testing.assert_close(values[0].double(), values[1], rtol=1e-6, atol=3e-6)
    for found, expected in gradients:
        assert found.dtype == torch.float32
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert error < 5e-6


@pytest.mark.parametrize(("kind", "beta"), KINDS.values(), ids=KINDS.keys())
def test_the_gradient_is_the_slope_of_the_value(num_chunks, kind, beta):
    """Central differences along the gradient itself, with no formula in common."""
    tensors = with_student_leaves(inputs())
    divergence(tensors, kind, beta).sum().backward()
    step = 2e-3
    for place in range(2):
        direction = tensors[place].grad / tensors[place].grad.norm()
        ends = []
        for sign in (1, -1):
            moved = [tensor.detach() for tensor in tensors]
            moved[place] = moved[place] + sign * step * direction
            ends.append(divergence(moved, kind, beta).double().sum())
        slope = (ends[0] - ends[1]) / (2 * step)
        assert slope.item() == pytest.approx(tensors[place].grad.norm().item(), rel=5e-3)


@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize(("own", "built_in"), [(own_forward_kl, "forward_kl"), (own_reverse_kl, "reverse_kl")])
def test_terms_of_ones_own_that_sum_to_a_built_in_divergence_have_its_values_and_gradients(
    num_chunks, own, built_in, transforms
):
    found, expected = ([*with_student_leaves(inputs())] for _ in range(2))
    values = [divergence(t, kind, 0.5, transforms, 1.5) for t, kind in ((found, own), (expected, built_in))]
    torch.testing.assert_close(*values, rtol=1e-6, atol=1e-6)
    for value in values:
        (value * torch.linspace(-1.5, 2.0, NUM_SCORED)).sum().backward()
    for a, b in zip(found[:2], expected[:2], strict=True):
        assert (a.grad - b.grad).abs().max() <= 1e-6 * b.grad.abs().max().clamp(min=1)


def test_terms_of_a_frozen_student_are_evaluated_without_a_graph():
    """Validation needs no derivatives, and a function that has none will do."""
    tensors = inputs()
    found = divergence(tensors, lambda student, teacher: (student > teacher).float(), 0.5)
    student, teacher = (log_probs(*tensors[i : i + 2], 1.0, LogitTransform()) for i in (0, 2))
    assert found.tolist() == (student > teacher).sum(1).tolist()


@pytest.mark.parametrize(("kind", "beta"), KINDS.values(), ids=KINDS.keys())
def test_bfloat16_inputs_are_projected_and_summed_in_float32(num_chunks, kind, beta):
    """Only the gradients, which leave in bfloat16, are rounded."""
    values, *gradients = compared([tensor.bfloat16() for tensor in inputs()], kind, beta)
    torch.testing.assert_close(values[0].double(), values[1], rtol=1e-6, atol=3e-6)
    for found, expected in gradients:
        assert found.dtype == torch.bfloat16
        assert (found.double() - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize(("kind", "beta"), KINDS.values(), ids=KINDS.keys())
def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient(num_chunks, kind, beta):
    states, weight, *_ = inputs()
    tensors = with_student_leaves([states, weight, states, weight])
    found = divergence(tensors, kind, beta, temperature=0.7)
    found.sum().backward()
    torch.testing.assert_close(found.detach(), torch.zeros(NUM_SCORED), rtol=0, atol=1e-6)
    for leaf in tensors[:2]:
        torch.testing.assert_close(leaf.grad, torch.zeros_like(leaf), rtol=0, atol=1e-6)


def test_jensen_shannon_nears_the_two_kl_divergences(num_chunks):
    """Divided by beta it is forward KL at beta = 0; by 1 - beta, reverse KL at beta = 1."""
    states, weight, teacher_states, teacher_weight = inputs()
    tensors = [0.3 * states, weight, 0.3 * teacher_states, teacher_weight]
    forward, reverse = divergence(tensors, "forward_kl", 0.5), divergence(tensors, "reverse_kl", 0.5)
    torch.testing.assert_close(divergence(tensors, "jensen_shannon", 1e-3) / 1e-3, forward, rtol=0.02, atol=0)
    torch.testing.assert_close(divergence(tensors, "jensen_shannon", 1 - 1e-3) / 1e-3, reverse, rtol=0.02, atol=0)


@pytest.mark.parametrize(("kind", "beta"), KINDS.values(), ids=KINDS.keys())
def test_huge_logits_stay_finite(num_chunks, kind, beta):
    """Logits of thousands, and probabilities that are 0 for one model where they are 1 for the other."""
    states, weight, teacher_states, teacher_weight = inputs()
    (found, expected), *gradients = compared([1000 * states, weight, 1000 * teacher_states, teacher_weight], kind, beta)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-3)
    assert all(torch.isfinite(found).all() for found, _ in gradients)


def test_jensen_shannon_is_bounded_where_the_models_disagree(num_chunks):
    """By the entropy of (beta, 1 - beta): log 2 at one half."""
    states, weight, teacher_states, teacher_weight = inputs()
    tensors = [1000 * states, weight, -1000 * teacher_states, teacher_weight]
    found = divergence(tensors, "jensen_shannon", 0.5)
    torch.testing.assert_close(found, torch.full((NUM_SCORED,), math.log(2)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "beta"), KINDS.values(), ids=KINDS.keys())
def test_gradients_of_a_frozen_side_are_left_out(num_chunks, kind, beta):
    both = with_student_leaves(inputs())
    divergence(both, kind, beta).sum().backward()
    for place in range(2):
        tensors = inputs()
        tensors[place].requires_grad_()
        divergence(tensors, kind, beta).sum().backward()
        torch.testing.assert_close(tensors[place].grad, both[place].grad, rtol=0, atol=0)
        assert tensors[1 - place].grad is None


@pytest.mark.parametrize(("kind", "beta"), KINDS.values(), ids=KINDS.keys())
def test_nothing_to_score_gives_nothing_with_a_graph(kind, beta):
    """An idle rank still runs backward."""
    tensors = with_student_leaves(inputs(num_scored=0))
    found = divergence(tensors, kind, beta, TRANSFORMS["both-softcap"], 0.5)
    found.sum().backward()
    assert found.tolist() == []
    assert not tensors[0].grad.any()
    assert not tensors[1].grad.any()


@pytest.mark.parametrize(
    "transforms",
    [pytest.param(PLAIN, id="plain", marks=pytest.mark.full), pytest.param(TRANSFORMS["both-softcap"], id="softcap")],
)
@pytest.mark.parametrize(
    ("kind", "beta"),
    [
        pytest.param(*KINDS[k], id=k, marks=() if k in ("forward", "js-0.1", "own-reverse") else pytest.mark.full)
        for k in KINDS
    ],
)
def test_large_vocabulary_never_materialises_all_logits_of_either_model(monkeypatch, kind, beta, transforms):
    """Trap 28: 32 tokens x 151,936 words are 4.9 million logits of each model; no tensor is larger than the weight
    gradient, and no logits larger than half of what a chunk may be."""
    num_scored, vocab, dim = 32, 151_936, 2
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 2**18)
    tensors = with_student_leaves(inputs(num_scored, dim, dim, vocab))
    with TensorShapes() as made:
        found = divergence(tensors, kind, beta, transforms, 0.9)
        forward_size = made.largest
        found.sum().backward()
    assert 2**16 < forward_size <= 2**17, "the logits of one chunk"
    assert made.largest == vocab * dim < num_scored * vocab / 10
    exact = with_student_leaves(tensors, torch.float64)
    expected = reference(exact, kind, beta, transforms, 0.9)
    expected.sum().backward()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(tensors[1].grad.double(), exact[1].grad, rtol=0, atol=1e-5)

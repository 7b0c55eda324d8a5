import math

import pytest
import torch
from tensor_shapes import TensorShapes

from shardwise.engine import vocabulary as module
from shardwise.engine.logprobs import selected_logprobs
from shardwise.ops import LogitTransform

DIM, VOCAB = 6, 517
TRANSFORMS = {
    "plain": LogitTransform(),
    "scale": LogitTransform(scale=0.25),
    "softcap": LogitTransform(softcap=3.0),
    "softcap-scale": LogitTransform(scale=1.7, softcap=2.0),
}
TARGETS_AT_CHUNK_EDGES = [0, 127, 128, 516, 300]


def inputs():
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(len(TARGETS_AT_CHUNK_EDGES), DIM, generator=generator)
    weight = torch.randn(VOCAB, DIM, generator=generator)
    return states, weight, torch.tensor(TARGETS_AT_CHUNK_EDGES)


def reference(states, weight, targets, temperature, transform):
    """log_softmax and entropy over all logits."""
    logits = states @ weight.t() * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    logs = (logits / temperature).log_softmax(dim=1)
    return logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(dim=1)


@pytest.fixture(params=["one-chunk", "chunks-of-128"])
def num_chunks(request, monkeypatch):
    if request.param == "one-chunk":
        return 1
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1)
    return 5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_equal_log_softmax_in_float64(num_chunks, transform, temperature, with_entropy):
    states, weight, targets = inputs()
    coefficients = torch.linspace(-1.5, 2.0, len(targets))

    leaves = [states.clone().requires_grad_(), weight.clone().requires_grad_()]
    logprobs, entropy = selected_logprobs(
        *leaves, targets, temperature=temperature, transform=transform, with_entropy=with_entropy
    )
    (logprobs * coefficients).sum().backward()

    exact = [states.double().requires_grad_(), weight.double().requires_grad_()]
    expected, expected_entropy = reference(*exact, targets, temperature, transform)
    (expected * coefficients).sum().backward()

    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=3e-6)
    for leaf, truth in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == torch.float32
        torch.testing.assert_close(leaf.grad.double(), truth.grad, rtol=0, atol=1e-5)
    assert not entropy.requires_grad
    expected_entropy = expected_entropy if with_entropy else torch.zeros(len(targets))
    torch.testing.assert_close(entropy.double(), expected_entropy.double(), rtol=0, atol=1e-5)


def test_gradients_of_a_frozen_side_are_left_out(num_chunks):
    states, weight, targets = inputs()
    settings = {"temperature": 1.0, "transform": LogitTransform(), "with_entropy": False}
    both = [states.clone().requires_grad_(), weight.clone().requires_grad_()]
    selected_logprobs(*both, targets, **settings)[0].sum().backward()
    only_states = states.clone().requires_grad_()
    selected_logprobs(only_states, weight, targets, **settings)[0].sum().backward()
    only_weight = weight.clone().requires_grad_()
    selected_logprobs(states, only_weight, targets, **settings)[0].sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(only_states.grad, both[0].grad, rtol=0, atol=0)
    torch.testing.assert_close(only_weight.grad, both[1].grad, rtol=0, atol=0)


def test_huge_logits_stay_finite(num_chunks):
    """A running maximum: logits of thousands neither overflow nor lose the likely token."""
    states, weight, targets = inputs()
    leaves = [(1000 * states).requires_grad_(), weight.requires_grad_()]
    logprobs, entropy = selected_logprobs(
        *leaves, targets, temperature=1.0, transform=LogitTransform(), with_entropy=True
    )
    logprobs.sum().backward()
    expected, expected_entropy = reference(*(leaf.detach().double() for leaf in leaves), targets, 1.0, LogitTransform())
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=0, atol=1e-3)
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)


def test_nothing_to_score_gives_nothing_with_a_graph(num_chunks):
    states, weight, _ = inputs()
    states.requires_grad_(), weight.requires_grad_()
    logprobs, entropy = selected_logprobs(
        states[:0],
        weight,
        torch.zeros(0, dtype=torch.int64),
        temperature=0.5,
        transform=LogitTransform(),
        with_entropy=True,
    )
    logprobs.sum().backward()
    assert logprobs.tolist() == entropy.tolist() == []
    assert not states.grad.any()
    assert not weight.grad.any()


def test_uniform_distribution_has_logprob_and_entropy_of_log_vocabulary(num_chunks):
    _, weight, targets = inputs()
    logprobs, entropy = selected_logprobs(
        torch.zeros(len(targets), DIM),
        weight,
        targets,
        temperature=1.0,
        transform=LogitTransform(),
        with_entropy=True,
    )
    assert logprobs.tolist() == pytest.approx([-math.log(VOCAB)] * 5, abs=1e-6)
    assert entropy.tolist() == pytest.approx([math.log(VOCAB)] * 5, abs=1e-5)


def test_bfloat16_inputs_are_projected_and_summed_in_float32(num_chunks):
    """The logits of bfloat16 weights are exact: only the gradients, which leave in bfloat16, are rounded."""
    states, weight, targets = inputs()
    leaves = [states.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()]
    logprobs, _ = selected_logprobs(*leaves, targets, temperature=1.0, transform=LogitTransform(), with_entropy=False)
    logprobs.sum().backward()
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected, _ = reference(*exact, targets, 1.0, LogitTransform())
    expected.sum().backward()
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=3e-6)
    for leaf, truth in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == torch.bfloat16
        torch.testing.assert_close(leaf.grad.double(), truth.grad, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(softcap=3.0)], ids=["plain", "softcap"])
def test_large_vocabulary_never_materialises_all_logits(monkeypatch, transform):
    """Trap 28: 32 tokens x 151,936 words are 4.9 million logits; no tensor is larger than the weight gradient."""
    num_scored, vocab, dim = 32, 151_936, 2
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 2**18)
    states = torch.randn(num_scored, dim).requires_grad_()
    weight = torch.randn(vocab, dim).requires_grad_()
    targets = torch.randint(0, vocab, (num_scored,))
    with TensorShapes() as made:
        logprobs, _ = selected_logprobs(
            states, weight, targets, temperature=0.9, transform=transform, with_entropy=True
        )
        forward_size = made.largest
        logprobs.sum().backward()
    assert 2**17 < forward_size <= 2**18, "the logits of one chunk"
    assert made.largest <= vocab * dim < num_scored * vocab / 10
    exact = [leaf.detach().double().requires_grad_() for leaf in (states, weight)]
    expected, _ = reference(*exact, targets, 0.9, transform)
    expected.sum().backward()
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), exact[1].grad, rtol=0, atol=1e-5)

"""Logprobs and entropy at a vocabulary of 151,936 on the GPU: values, gradients, peak memory."""

import pytest
import torch

from shardwise.engine.logprobs import selected_logprobs
from shardwise.ops import LogitTransform

VOCAB = 151_936
TRANSFORMS = {"plain": LogitTransform(), "softcap": LogitTransform(scale=0.5, softcap=20.0)}


def inputs(num_states, hidden, device, dtype):
    generator = torch.Generator(device).manual_seed(0)
    states = torch.randn(num_states, hidden, device=device, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(VOCAB, hidden, device=device, generator=generator) / hidden**0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (num_states,), device=device, generator=generator)
    return states, weight, targets


def from_all_logits(states, weight, targets, transform, temperature=1.0):
    logits = transform.forward_(states.float() @ weight.float().t()) / temperature
    logs = logits.log_softmax(dim=-1)
    with torch.no_grad():
        entropy = -(logs.exp() * logs).sum(dim=-1)
    return logs.gather(1, targets[:, None])[:, 0], entropy


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_equal_those_of_all_logits_in_float64(device, dtype, transform):
    states, weight, targets = inputs(257, 128, device, dtype)
    logprobs, entropy = selected_logprobs(
        states, weight, targets, temperature=0.8, transform=transform, with_entropy=True
    )
    coefficients = torch.linspace(-1, 2, len(targets), device=device)
    (logprobs * coefficients).sum().backward()
    exact = [leaf.detach().double().requires_grad_() for leaf in (states, weight)]
    logits = exact[0] @ exact[1].t() * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    logs = (logits / 0.8).log_softmax(dim=-1)
    expected = logs.gather(1, targets[:, None])[:, 0]
    (expected * coefficients).sum().backward()
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(entropy.double(), -(logs.exp() * logs).sum(dim=-1), rtol=0, atol=1e-4)
    bound = 1e-4 if dtype == torch.float32 else 1e-2
    for leaf, truth in zip((states, weight), exact, strict=True):
        assert (leaf.grad.double() - truth.grad).norm() < bound * truth.grad.norm()


@pytest.mark.parametrize("num_states", [1024, 8192])
def test_peak_memory_is_a_fifth_of_all_logits_or_less(device, num_states):
    def peak(function):
        states, weight, targets = inputs(num_states, 256, device, torch.bfloat16)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        logprobs, _entropy = function(states, weight, targets)
        logprobs.sum().backward()
        return torch.cuda.max_memory_allocated() - before

    plain = LogitTransform()
    ours = peak(lambda *x: selected_logprobs(*x, temperature=1.0, transform=plain, with_entropy=True))
    assert ours <= 0.2 * peak(lambda *x: from_all_logits(*x, plain))

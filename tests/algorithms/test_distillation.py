import torch

from shardwise.algorithms.distillation import reverse_kl_advantages
from shardwise.algorithms.policy_loss import reinforce


def test_advantage_is_the_teachers_lead_on_trained_tokens():
    nan = float("nan")
    logprobs = torch.tensor([[nan, -1.0, -2.0]], requires_grad=True)
    advantages = reverse_kl_advantages(logprobs, torch.tensor([[nan, -0.5, -4.0]]), torch.tensor([[False, True, True]]))
    assert advantages.tolist() == [[0.0, 0.5, -2.0]]
    assert not advantages.requires_grad


def test_expected_gradient_is_that_of_the_reverse_kl():
    """Over a whole vocabulary, weighted by the student's probabilities: what sampling gives on average."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(6, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    mask, cu_seqlens = torch.ones(6, dtype=torch.bool), torch.arange(7, dtype=torch.int32)
    advantages = reverse_kl_advantages(logprobs[None], teacher[None], mask[None])[0]
    losses, _ = reinforce(logprobs, logprobs.detach(), advantages, mask, cu_seqlens)
    found = torch.autograd.grad((logprobs.detach().exp() * losses).sum(), logits, retain_graph=True)[0]
    expected = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits)[0]
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)

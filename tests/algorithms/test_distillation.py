import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.algorithms.distillation import reverse_kl_advantages
from shardwise.algorithms.policy_loss import reinforce


def test_advantage_is_the_teachers_lead_on_trained_tokens():
    nan = float("nan")
    logprobs = torch.tensor([[nan, -1.0, -2.0]], requires_grad=True)
    advantages = reverse_kl_advantages(logprobs, torch.tensor([[nan, -0.5, -4.0]]), torch.tensor([[False, True, True]]))
    assert advantages.tolist() == [[0.0, 0.5, -2.0]]
    assert not advantages.requires_grad


@given(data=st.data(), num_samples=st.integers(1, 5), width=st.integers(1, 4), left=st.integers(0, 2))
def test_order_and_padding_do_not_matter(data, num_samples, width, left):
    shape = (num_samples, width)
    numbers = st.lists(st.floats(-20, 0, width=32), min_size=num_samples * width, max_size=num_samples * width)
    student, teacher = (torch.tensor(data.draw(numbers)).view(shape) for _ in range(2))
    mask = student > data.draw(st.floats(-20, 0))
    order = torch.tensor(data.draw(st.permutations(range(num_samples))))
    changed = [torch.nn.functional.pad(array[order], (left, 2)) for array in (student, teacher, mask)]
    expected = torch.nn.functional.pad(reverse_kl_advantages(student, teacher, mask)[order], (left, 2))
    assert reverse_kl_advantages(*changed).tolist() == expected.tolist()


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

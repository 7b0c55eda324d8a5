import torch

from shardwise.algorithms.masked import aggregate
from shardwise.algorithms.sft_loss import cross_entropy
from shardwise.types import Denominators


def test_cross_entropy_is_torchs_on_trained_tokens():
    torch.manual_seed(0)
    logits = torch.randn(6, 9, dtype=torch.float64)
    labels = torch.randint(9, (6,))
    loss_mask = torch.tensor([False, True, True, False, False, True])
    logprobs = logits.log_softmax(1).gather(1, labels[:, None]).squeeze(1)
    losses = cross_entropy(logprobs, loss_mask)
    loss = aggregate(
        losses,
        loss_mask=loss_mask,
        cu_seqlens=torch.tensor([0, 3, 6]),
        denominators=Denominators(num_tokens=3, num_sequences=2),
        mode="token-mean",
        divisor=None,
    )
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, labels.where(loss_mask, -100)))
    assert not losses[~loss_mask].any()


def test_gradient_reaches_trained_tokens_only():
    logprobs = torch.tensor([float("nan"), -1.0], requires_grad=True)
    cross_entropy(logprobs, torch.tensor([False, True])).sum().backward()
    assert logprobs.grad.tolist() == [0.0, -1.0]

"""On-policy distillation: the student samples, the teacher scores every token.

Shape letters: N samples of a step, L width of the padded arrays.
"""

import torch
from torch import Tensor


def reverse_kl_advantages(logprobs: Tensor, teacher_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """-(logp - teacher logp) per token: with a policy-gradient loss its expectation is minus the gradient of each
    token's KL(student || teacher), the later tokens taken as given.

    Args:
        logprobs: [N, L] float32, nats, of the student that sampled the tokens.
        teacher_logprobs: [N, L] float32, nats, of the same tokens.
        loss_mask: [N, L] bool, True = trained; the other arrays are ignored elsewhere, NaN included.
    Returns:
        [N, L] float32, nats, 0 where not trained; carries no graph.
    Source: Agarwal et al. 2024 (GKD) with reverse KL; Gu et al. 2024 (MiniLLM), the single-step part.
    """
    return torch.where(loss_mask, teacher_logprobs - logprobs, 0.0).detach().float()

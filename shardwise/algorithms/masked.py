"""Sums over trained tokens: how per-token losses become one number that does not depend on the split of a step.

Shape letters: T tokens of one packed batch, S sequences of one packed batch.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from shardwise.types import Denominators, MetricValue

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"]


def sequence_sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sums per sequence of a packed batch; differentiable, the same bits on every call.

    Args:
        values: [T] floating point.
        cu_seqlens: [S + 1] int32 or int64, where each sequence starts, and T.
    Returns:
        [S] of the dtype of `values`; 0 for a sequence without tokens.
    """
    # index_add would work too, but it adds in random order on CUDA; unsafe skips a check that waits for the device.
    return torch.segment_reduce(values, "sum", lengths=cu_seqlens.diff(), unsafe=True, initial=0)


def sequence_means(values: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Means over the trained tokens of each sequence of a packed batch.

    Args:
        values: [T] floating point, 0 where not trained.
        loss_mask: [T] bool, True = trained.
        cu_seqlens: [S + 1] int32 or int64.
    Returns:
        [S] of the dtype of `values`; 0 for a sequence without a trained token.
    """
    return sequence_sums(values, cu_seqlens) / sequence_sums(loss_mask.to(values.dtype), cu_seqlens).clamp(min=1)


def spread(sequence_values: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[S] -> [T]: gives every token the value of its sequence; not differentiable.

    Its gradient would add the tokens of a sequence in random order on CUDA; the losses need none.
    """
    # With output_size nothing has to wait for the device.
    return sequence_values.detach().repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)


def aggregate(
    token_losses: Tensor,
    *,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    denominators: Denominators,
    mode: Aggregation,
    divisor: float | None,
) -> Tensor:
    """This micro-batch's share of the step's loss; the sum over micro-batches and ranks is the loss of the whole step.

    With l(s, t) the loss of trained token t of sequence s, n(s) the trained tokens of s, and over the whole step N
    trained tokens and S sequences that have one:

        token-mean               sum_s sum_t l(s, t) / N
        seq-mean-token-mean      sum_s (sum_t l(s, t) / n(s)) / S
        seq-mean-token-sum       sum_s sum_t l(s, t) / S
        seq-mean-token-sum-norm  sum_s sum_t l(s, t) / (S * divisor)
        token-sum                sum_s sum_t l(s, t)

    Args:
        token_losses: [T] float32, one loss per token; values where not trained are ignored, NaN included.
        loss_mask: [T] bool, True = trained.
        cu_seqlens: [S + 1] int32; a sequence lies in one micro-batch as a whole.
        denominators: global counts of the optimizer step.
        mode: one of the names above.
        divisor: a fixed number of tokens > 0 for seq-mean-token-sum-norm, else None.
    Returns:
        Scalar of the dtype of `token_losses`. Where nothing is trained it is 0 and still has a graph, so that backward,
        and with it every collective, runs on every rank.
    Raises:
        ValueError: an unknown mode, or a divisor where none belongs or missing where one does.
    Source: token-mean: Yu et al. 2025 (DAPO), eq. 8; seq-mean-token-mean: Shao et al. 2024 (DeepSeekMath), eq. 3;
        seq-mean-token-sum-norm: Liu et al. 2025 (Dr.GRPO). Differs: all divide by counts of the whole optimizer step,
        and a sequence without a trained token does not count.
    """
    if (mode == "seq-mean-token-sum-norm") != (divisor is not None):
        raise ValueError(
            f"mode={mode} with divisor={divisor}: seq-mean-token-sum-norm needs one, other modes have none"
        )
    losses = torch.where(loss_mask, token_losses, 0.0)
    num_tokens = max(denominators.num_tokens, 1)
    num_sequences = max(denominators.num_sequences, 1)
    match mode:
        case "token-mean":
            return losses.sum() / num_tokens
        case "seq-mean-token-mean":
            return sequence_means(losses, loss_mask, cu_seqlens).sum() / num_sequences
        case "seq-mean-token-sum":
            return losses.sum() / num_sequences
        case "seq-mean-token-sum-norm":
            assert divisor is not None
            return losses.sum() / (num_sequences * divisor)
        case "token-sum":
            return losses.sum()
        case _:
            raise ValueError(f"mode={mode} is no aggregation; use one of {', '.join(get_args(Aggregation))}")


def whitened(values: Tensor, loss_mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over trained tokens, with the unbiased variance.

    Args:
        values: [N, L] float64; ignored where not trained, NaN included.
        loss_mask: [N, L] bool, True = trained.
    Returns:
        [N, L] float64, 0 where not trained; all 0 for a single token, and where all values are equal.
    """
    num_tokens = loss_mask.sum()
    mean = torch.where(loss_mask, values, 0.0).sum() / num_tokens.clamp(min=1)
    centered = torch.where(loss_mask, values - mean, 0.0)
    variance = centered.square().sum() / (num_tokens - 1).clamp(min=1)
    return centered / (variance + 1e-8).sqrt()


def trained_mean(values: Tensor, loss_mask: Tensor) -> MetricValue:
    """The mean over trained tokens as a partial sum and a count, so that merging weights every token equally.

    Args:
        values: [T] floating point, or bool for the fraction of tokens where it holds.
        loss_mask: [T] bool, True = trained.
    """
    return MetricValue.mean(torch.where(loss_mask, values.detach(), 0).sum(), loss_mask.sum())

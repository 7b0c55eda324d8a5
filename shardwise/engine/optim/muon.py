"""Muon on sharded matrices: torch.optim.Muon does the mathematics, each matrix on one rank.

Shape letters: R rows and C columns of a matrix, r the rows of it that this rank holds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.exchange import send_rows
from shardwise.engine.shards import RowSharding, local_shard


@dataclass(frozen=True, slots=True)
class _Matrix:
    parameter: nn.Parameter
    momentum: Tensor
    """[r, C], this rank's rows of the momentum buffer."""
    group: dict[str, Any]
    """The parameter group, with its learning rate and weight decay."""

    def num_elements(self, sharding: RowSharding, rank: int) -> int:
        num_rows, num_columns = self.parameter.shape
        return sharding.num_rows(num_rows, rank) * num_columns


class ShardedMuon(torch.optim.Optimizer):
    """Momentum orthogonalized by Newton-Schulz iterations (Jordan et al. 2024), over shards of rows.

    Momentum is elementwise and stays on the shards, like weight decay; only the orthogonalization needs whole matrices.
    They are taken in rounds of one matrix for each rank, largest first: one all-to-all brings every rank the rows of
    its matrix, it computes the update, and a second all-to-all returns the rows. No matrix is computed twice within a
    shard group; under HSDP every replica repeats the work of the others inside its own group.

    Memory beyond the momentum (4 bytes for each element of the shard): a rank holds one whole matrix at a time, about
    24 bytes for each of its elements, whatever the number of matrices. Communication: 2 bytes out and 4 back for each
    element, since Newton-Schulz starts by rounding its input to bfloat16, while the step it returns is float32.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        momentum: float,
        num_iterations: int,
        adjust_lr: str,
    ) -> None:
        """
        Args:
            groups: each with params (float32 matrices, plain or sharded on dim 0), lr, weight_decay, and is_transposed
                for matrices [C, R].
            momentum: decay rate of the momentum (Nesterov).
            num_iterations: number of Newton-Schulz iterations, 1 to 99.
            adjust_lr: original or match_rms_adamw, as torch.optim.Muon's adjust_lr_fn.
        """
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "is_transposed": False})
        self._momentum = momentum
        self._num_iterations = num_iterations
        self._adjust_lr = adjust_lr

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Collective within each shard group: all ranks hold gradients of the same parameters."""
        by_sharding: dict[RowSharding, list[_Matrix]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    matrix = _Matrix(parameter, local_shard(self._momentum_of(parameter)), group)
                    by_sharding.setdefault(RowSharding.of(parameter), []).append(matrix)
        for sharding, matrices in by_sharding.items():
            for matrices_of_round in _rounds(matrices, sharding.num_ranks):
                self._step_round(matrices_of_round, sharding)

    def _momentum_of(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum_buffer"]
        return momentum

    def _step_round(self, matrices: Sequence[_Matrix], sharding: RowSharding) -> None:
        """Updates up to one matrix for each rank. Rank k of the group owns the k-th matrix; ranks beyond the last one
        only send and receive rows."""
        updates = [self._nesterov_update(matrix).to(sharding.device) for matrix in matrices]
        sent = [update.numel() for update in updates] + [0] * (sharding.num_ranks - len(matrices))
        owned = matrices[sharding.rank] if sharding.rank < len(matrices) else None
        received = [owned.num_elements(sharding, rank) if owned else 0 for rank in range(sharding.num_ranks)]
        rows = _exchange(torch.cat([update.flatten() for update in updates]), sent, received, sharding)
        step = self._orthogonalised_step(rows, owned) if owned else rows.float()
        steps = _exchange(step.flatten(), received, sent, sharding)
        for matrix, part in zip(matrices, steps.split(sent[: len(matrices)]), strict=True):
            weights = local_shard(matrix.parameter)
            weights.mul_(1 - matrix.group["lr"] * matrix.group["weight_decay"])
            weights.add_(part.view_as(weights).to(weights.device))

    def _nesterov_update(self, matrix: _Matrix) -> Tensor:
        """Updates the momentum and returns [r, C] bfloat16, this rank's rows of what is orthogonalized, by the formula
        of torch.optim.Muon."""
        assert matrix.parameter.grad is not None
        gradient = local_shard(matrix.parameter.grad)
        matrix.momentum.lerp_(gradient, 1 - self._momentum)
        return gradient.lerp(matrix.momentum, self._momentum).bfloat16()

    def _orthogonalised_step(self, update: Tensor, matrix: _Matrix) -> Tensor:
        """Returns [R, C] float32, what torch.optim.Muon adds to the whole matrix: its step from zero without momentum
        or decay; [C, R] for a transposed matrix, as it is stored.

        Args:
            update: [R * C] bfloat16.
        """
        gradient = update.view(matrix.parameter.shape).float()
        if matrix.group["is_transposed"]:
            gradient = gradient.T.contiguous()
        step = nn.Parameter(torch.zeros_like(gradient))
        step.grad = gradient
        torch.optim.Muon(
            [step],
            lr=matrix.group["lr"],
            weight_decay=0.0,
            momentum=0.0,
            nesterov=False,
            ns_steps=self._num_iterations,
            adjust_lr_fn=self._adjust_lr,
        ).step()
        return step.detach().T if matrix.group["is_transposed"] else step.detach()


def _rounds(matrices: Sequence[_Matrix], num_ranks: int) -> Iterator[list[_Matrix]]:
    """Yields as many matrices as ranks at a time, of sizes as alike as possible: the largest of a round sets its
    time."""
    largest_first = sorted(matrices, key=lambda matrix: matrix.parameter.numel(), reverse=True)
    for start in range(0, len(largest_first), num_ranks):
        yield largest_first[start : start + num_ranks]


def _exchange(values: Tensor, sent: list[int], received: list[int], sharding: RowSharding) -> Tensor:
    """Collective. Sends `sent[k]` of the flat values to rank k; returns `received[k]` from each, in order of rank."""
    return values if sharding.group is None else send_rows(values, sent, received, sharding.group)

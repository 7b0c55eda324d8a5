"""Merges adapters into the weights they adapt, on shards, one tensor at a time."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardwise.engine.gathering import gathered
from shardwise.engine.lora import ADAPTER, AdaptedWeight, adapted_weights, base_names, trained_copies
from shardwise.engine.quantized import quantized_weights
from shardwise.engine.shards import local_box, local_shard


class MergedState(Mapping[str, Tensor]):
    """Name in the transformers class -> the tensor that base and adapters make together.

    Sharded like the base's; float32 where an adapter is merged into it or the base is quantized. Looking one up is
    collective: every rank merges its own rows, for which A [rank, in] is gathered, and B too for experts and transposed
    weights.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._state: dict[str, Tensor] = model.state_dict()
        self._names = {base: name for name, base in base_names(model).items() if base is not None}
        self._copies = trained_copies(model)
        self._quantized = quantized_weights(model)
        self._adapted = adapted_weights(model)

    @torch.no_grad()
    def __getitem__(self, base_name: str) -> Tensor:
        name = self._names[base_name]
        quantized = self._quantized.get(base_name)
        base = self._state[self._copies.get(name, name)] if quantized is None else quantized.unpacked()
        if base_name not in self._adapted:
            return base
        adapted = self._adapted[base_name]
        merged = _merged_experts if adapted.is_experts else _merged_inputs if adapted.is_transposed else _merged_outputs
        return _sharded_as(base, merged(base, self._state, adapted))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _merged_outputs(base: Tensor, state: dict[str, Tensor], adapted: AdaptedWeight) -> Tensor:
    """This rank's rows of W + s B A in float32; with DoRA each is then scaled to its magnitude.

    W [out, in], B [out, rank] and the magnitudes [out] are sharded alike, by rows, so a row's norm is local.
    """
    lora_a = gathered(state[f"{adapted.path}.lora_A.{ADAPTER}.weight"], torch.float32)
    lora_b = local_shard(state[f"{adapted.path}.lora_B.{ADAPTER}.weight"])
    rows = torch.addmm(local_shard(base).float(), lora_b.float(), lora_a.to(lora_b.device), alpha=adapted.scaling)
    magnitude = state.get(f"{adapted.path}.lora_magnitude_vector.{ADAPTER}.weight")
    if magnitude is not None:
        rows *= (local_shard(magnitude) / torch.linalg.vector_norm(rows, dim=1))[:, None]
    return rows


def _merged_inputs(base: Tensor, state: dict[str, Tensor], adapted: AdaptedWeight) -> Tensor:
    """This rank's rows of W + s (B A)^T in float32, where W is [in, out]; with DoRA each column is then scaled to its
    magnitude.

    A row belongs to one input and has a part of every output, so B [out, rank] is gathered, and with DoRA also the
    merged weight, for the norms of its columns.
    """
    part, (rows, _) = local_shard(base), local_box(base)
    lora_a, lora_b = _whole_pair(state, adapted, part.device)
    merged = torch.addmm(part.float(), lora_a[:, rows].T, lora_b.T, alpha=adapted.scaling)
    magnitude = state.get(f"{adapted.path}.lora_magnitude_vector.{ADAPTER}.weight")
    if magnitude is not None:
        norms = torch.linalg.vector_norm(gathered(_sharded_as(base, merged), torch.float32), dim=0)
        merged *= (gathered(magnitude, torch.float32) / norms).to(part.device)
    return merged


def _merged_experts(base: Tensor, state: dict[str, Tensor], adapted: AdaptedWeight) -> Tensor:
    """This rank's part of W_e + s B_e A_e of every expert e, in float32.

    W [E, out, in], or [E, in, out] where the family calls that transposed; A [E rank, in] holds the experts one after
    the other; every E-th column of B [out, rank E] belongs to the same expert.
    """
    part, (experts, *inner) = local_shard(base), local_box(base)
    num_experts = base.shape[0]
    lora_a, lora_b = _whole_pair(state, adapted, part.device)
    ins = lora_a.unflatten(0, (num_experts, -1))[experts]  # [e, rank, in]
    outs = lora_b.unflatten(1, (-1, num_experts)).permute(2, 0, 1)[experts]  # [e, out, rank]
    if adapted.is_transposed:
        ins, outs = outs.mT, ins.mT
    return torch.baddbmm(part.float(), outs[:, inner[0]], ins[:, :, inner[1]], alpha=adapted.scaling)


def _whole_pair(state: dict[str, Tensor], adapted: AdaptedWeight, device: torch.device) -> tuple[Tensor, Tensor]:
    """Collective. Gathers A and B in float32."""
    lora_a, lora_b = (state[f"{adapted.path}.lora_{kind}.{ADAPTER}.weight"] for kind in "AB")
    return gathered(lora_a, torch.float32).to(device), gathered(lora_b, torch.float32).to(device)


def _sharded_as(base: Tensor, rows: Tensor) -> Tensor:
    if not isinstance(base, DTensor):
        return rows
    return DTensor.from_local(
        rows, base.device_mesh, base.placements, run_check=False, shape=base.shape, stride=base.stride()
    )

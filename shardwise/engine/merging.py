"""Adapters merged into the weights they adapt, on shards, one tensor at a time."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardwise.engine.gathering import gathered
from shardwise.engine.lora import ADAPTER, base_names, lora_layers, trained_copies
from shardwise.engine.quantized import quantized_weights
from shardwise.engine.shards import local_shard


class MergedState(Mapping[str, Tensor]):
    """Name in the transformers class -> the tensor that base and adapters make together.

    Sharded like the base's; float32 where an adapter is merged into it or the base is quantised. Looking one up is
    collective: every rank merges its own rows, and A [rank, in] is gathered for it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._state: dict[str, Tensor] = model.state_dict()
        self._names = {base: name for name, base in base_names(model).items() if base is not None}
        self._copies = trained_copies(model)
        self._quantized = quantized_weights(model)
        self._scalings = {
            f"{path}.base_layer.weight": (path, layer.scaling[ADAPTER]) for path, layer in lora_layers(model)
        }

    @torch.no_grad()
    def __getitem__(self, base_name: str) -> Tensor:
        name = self._names[base_name]
        quantized = self._quantized.get(base_name)
        base = self._state[self._copies.get(name, name)] if quantized is None else quantized.unpacked()
        if name not in self._scalings:
            return base
        path, scaling = self._scalings[name]
        return _merged(base, self._state, path, scaling)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _merged(base: Tensor, state: dict[str, Tensor], path: str, scaling: float) -> Tensor:
    """W + s B A, float32 and sharded as W; with DoRA each row is then scaled to its magnitude.

    W [out, in], B [out, rank] and the magnitudes [out] are sharded alike, by rows, so a row's norm is local.
    """
    lora_a = gathered(state[f"{path}.lora_A.{ADAPTER}.weight"], torch.float32)
    lora_b = local_shard(state[f"{path}.lora_B.{ADAPTER}.weight"])
    rows = torch.addmm(local_shard(base).float(), lora_b.float(), lora_a.to(lora_b.device), alpha=scaling)
    magnitude = state.get(f"{path}.lora_magnitude_vector.{ADAPTER}.weight")
    if magnitude is not None:
        rows *= (local_shard(magnitude) / torch.linalg.vector_norm(rows, dim=1))[:, None]
    if not isinstance(base, DTensor):
        return rows
    return DTensor.from_local(
        rows, base.device_mesh, base.placements, run_check=False, shape=base.shape, stride=base.stride()
    )

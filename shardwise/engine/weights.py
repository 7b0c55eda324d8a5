"""The weights of a sharded model, one whole tensor or part of one at a time, and how many parameters it has."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.engine.gathering import gathered_regions
from shardwise.engine.quantized import quantized_weights
from shardwise.engine.runtime_state import merged_state, runtime_state
from shardwise.region import Region
from shardwise.stored_dtypes import stored_dtypes


def stream_weights(
    model: PreTrainedModel, dtype: torch.dtype, needed: Sequence[Mapping[str, Region]] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Collective. Yields (runtime name, full tensor), one at a time, adapters merged, tied copies left out.

    Runtime names are those of the transformers class: what another instance of that class takes without conversion.
    The shard is cast before it is gathered: half the bytes for bfloat16. The peak is that of `gathered_in_order`.

    Args:
        needed: by rank of the job: runtime name -> what the rank needs of the tensor, and then is given instead of all
            of it. Tensors that are named for no rank are whole.
    """
    merged = merged_state(model)
    dtypes = stored_dtypes(model, runtime_state(model), dtype)

    def asked() -> Iterator[tuple[Tensor, torch.dtype, list[Region] | None]]:
        for name, stored in dtypes.items():
            tensor = merged[name]
            is_cut = any(name in regions for regions in needed)
            whole = Region.whole(tensor.shape)
            yield tensor, stored, [regions.get(name, whole) for regions in needed] if is_cut else None

    found = gathered_regions(asked())
    for name in dtypes:
        yield name, next(found)


def num_parameters(model: nn.Module) -> int:
    """Number of parameters of the whole model; shared weights count once, quantized ones as the numbers they stand
    for."""
    num_added = sum(
        layer.in_features * layer.out_features - layer.weight.numel() for layer in quantized_weights(model).values()
    )
    return num_added + sum(parameter.numel() for parameter in model.parameters())


def num_trained_parameters(model: nn.Module) -> int:
    """Number of parameters that an optimizer step changes."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

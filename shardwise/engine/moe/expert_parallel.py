"""Expert parallelism: ranks share the fused experts of a layer. Tokens travel to the ranks of their experts and back
(Lepikhin et al. 2021, GShard), in three all-to-alls of a forward pass and two of a backward pass.

Shapes: t tokens of this rank, k experts that each goes to, n = t k, r tokens that arrive here, E experts, e = E / ep
those of this rank, D hidden size.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

from shardwise.config import ConfigError
from shardwise.engine.exchange import send_rows
from shardwise.engine.mesh import any_of, divisors
from shardwise.engine.names import CONTAINERS
from shardwise.families import EXPERTS
from shardwise.ops import name_without_copies


def spread_paths(model: nn.Module, ep_size: int) -> list[str]:
    """Returns the paths of the experts that `ep_size` ranks can share.

    Raises:
        ConfigError: the model has none, or not in a form that tokens can be sent to, or their number does not divide.
    """
    key = f"engine.ep_size={ep_size}"
    found = {path: module for path, module in model.named_modules() if path.rpartition(".")[2] == EXPERTS}
    if any(isinstance(module, CONTAINERS) for module in found.values()):
        raise ConfigError(
            f"{key}: the experts of {type(model).__name__} are modules of their own, and only fused ones can be shared "
            "between ranks; set it to 1"
        )
    if not found:
        raise ConfigError(f"{key} has no effect on {type(model).__name__}, which has no experts; set it to 1")
    for path, module in found.items():
        if not _is_dispatched(module):
            raise ConfigError(
                f"{key}: {path} ({type(module).__name__}) does not take tokens with the experts of each, so tokens "
                "cannot be sent to the rank of their expert; set it to 1 for this model"
            )
        if module.num_experts % ep_size:
            raise ConfigError(
                f"{key} does not divide the {module.num_experts} experts of {path}; use "
                f"{any_of(divisors(module.num_experts))}"
            )
    return list(found)


def require_shareable(model: nn.Module, paths: Sequence[str], ep_size: int) -> None:
    """Raises ConfigError: peft trains a copy of the experts at one of these paths."""
    for path, _ in model.named_modules():
        if (name := name_without_copies(path)) in paths and name != path:
            raise ConfigError(
                f"engine.ep_size={ep_size}: engine.lora.modules_to_save trains a copy of {name}, and ranks can only "
                "share experts that have none; save other modules, or set engine.ep_size to 1"
            )


def _is_dispatched(module: nn.Module) -> bool:
    """Whether transformers calls the experts with (tokens [t, D], experts [t, k], weights [t, k]) in every
    implementation."""
    num_experts = getattr(module, "num_experts", None)
    return hasattr(module, "is_transposed") and all(len(p) == num_experts for p in module.parameters())


def spread_experts(model: nn.Module, paths: Sequence[str], mesh: DeviceMesh) -> None:
    """Keeps this rank's part of the experts at `paths`, in place: their parameters become DTensors, split along dim 0
    over the mesh, for fully_shard to shard over others. On the meta device."""
    for path in paths:
        experts: Any = model.get_submodule(path)
        for name, whole in list(experts.named_parameters()):
            own = whole.detach().chunk(mesh.size())[mesh.get_local_rank()]
            split = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
            experts.register_parameter(name, nn.Parameter(split, requires_grad=whole.requires_grad))
        experts.num_experts //= mesh.size()
        model.set_submodule(path, SpreadExperts(experts, mesh.get_group()))


class SpreadExperts(ActivationWrapper):
    """Sends tokens to the ranks that hold their experts, and adds up what comes back."""

    def __init__(self, experts: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__(experts)
        self._group = group

    @torch.compiler.disable
    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Collective. tokens [t, D], chosen [t, k] of 0 to E - 1, weights [t, k] -> [t, D]."""
        experts = self._checkpoint_wrapped_module
        size, num_own = dist.get_world_size(self._group), experts.num_experts
        order = chosen.flatten().argsort(stable=True)
        leaving = torch.bincount(chosen.flatten(), minlength=size * num_own)
        arriving = torch.empty_like(leaving)  # from each rank, for each expert of this one
        dist.all_to_all_single(arriving, leaving, group=self._group)
        sent, received = torch.stack([leaving, arriving]).unflatten(1, (size, num_own)).sum(2).tolist()
        arrived = send_rows(tokens[order // chosen.shape[1]], sent, received, self._group)
        own = torch.arange(num_own, device=chosen.device).repeat(size)
        computed = self._compute(arrived, own.repeat_interleave(arriving, output_size=sum(received)), weights.dtype)
        returned = send_rows(computed, received, sent, self._group)
        outputs = torch.empty_like(returned).index_copy(0, order, returned)
        weighted = outputs.unflatten(0, chosen.shape) * weights[..., None]
        return weighted.sum(1).to(tokens.dtype)

    def _compute(self, arrived: Tensor, experts: Tensor, dtype: torch.dtype) -> Tensor:
        """Applies this rank's experts: tokens [r, D], experts [r] of 0 to e - 1 -> [r, D].

        A token of zeros is added, so that the parameters have a gradient of zeros even if no token arrived: other ranks
        wait for it.
        """
        rows = torch.cat([arrived, arrived.new_zeros(1, arrived.shape[1])])
        chosen = torch.cat([experts, experts.new_zeros(1)])[:, None]
        computed: Tensor = functional_call(
            self._checkpoint_wrapped_module,
            dict(self._own_parameters()),
            (rows, chosen, torch.ones_like(chosen, dtype=dtype)),
        )
        return computed[:-1]

    def _own_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._checkpoint_wrapped_module.named_parameters():
            assert isinstance(parameter, DTensor)
            yield name, parameter.to_local()

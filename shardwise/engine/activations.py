"""Activation checkpointing and offload: what a layer keeps between its forward and its backward.

Non-reentrant, and inside the FSDP unit: the backward pass has gathered the layer's weights by the time it is
recomputed.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # registers the operation that is kept below
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from shardwise.config import ConfigError, EngineConfig

_VARLEN = torch.ops.torch_attn._varlen_attn.default
ATTENTION_OPS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        _VARLEN,
    }
)
MATMUL_OPS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._grouped_mm.default,
    }
)


def checkpoint_layers(model: nn.Module, paths: Sequence[str], config: EngineConfig) -> None:
    """Puts the layers at `paths` (or every n-th of them) into checkpoint wrappers, in place.

    Raises:
        ConfigError: the model has fewer than n layers.
    """
    if config.activation_checkpointing == "none":
        return
    every = config.checkpoint_every_layers or 1
    if every > len(paths):
        raise ConfigError(
            f"engine.checkpoint_every_layers={every} would checkpoint none of the model's {len(paths)} layers; "
            f"use at most {len(paths)}"
        )
    kept: frozenset[Any] = frozenset()
    if config.checkpoints_by_operation:
        # The products of a compiled layer are inside its graphs, which are recomputed as a whole. Liger's rotary
        # embedding overwrites a product that it is given, and no dispatched operation shows it.
        hides_products = config.compile_layers or config.use_liger_kernels
        kept = ATTENTION_OPS if hides_products else ATTENTION_OPS | MATMUL_OPS
    run = partial(_run_checkpointed, kept=kept, offload=config.activation_offload)
    for path in paths[every - 1 :: every]:
        model.set_submodule(path, checkpoint_wrapper(model.get_submodule(path), checkpoint_fn=run))


def _run_checkpointed(layer: nn.Module, *args: Any, kept: frozenset[Any], offload: bool, **kwargs: Any) -> Any:
    options: dict[str, Any] = {"use_reentrant": False}
    if kept:
        options["context_fn"] = partial(_keep_by_operation, kept)
    if not offload:
        return checkpoint(layer, *args, **options, **kwargs)
    with saved_tensors_hooks(_to_host, _to_device):  # outside of checkpoint they see the layer's inputs, nothing else
        return checkpoint(layer, *args, **options, **kwargs)


def _keep_by_operation(operations: frozenset[Any]) -> tuple["_Keeps", "_GivesBack"]:
    """Returns the modes for a layer's forward and for its recomputation.

    torch's own selective checkpointing is no replacement: if a layer changes a kept tensor in place (a bias added to a
    product, a clamp), it refuses or finds the changed values on recomputation; behind an `_unsafe_view` it does not
    even notice.
    """
    results: list[Any] = []
    return _Keeps(operations, results), _GivesBack(operations, results)


class _Keeps(TorchDispatchMode):
    """Keeps the results of attention and of every second matrix product among `operations`, which cost the most to
    compute for their size. What the layer is about to change in place is copied first.

    Other operations are not counted: what FSDP does around a unit inside the layer differs in the recomputation. Nor is
    what is computed without gradients (the scores of an indexer).
    """

    def __init__(self, operations: frozenset[Any], results: list[Any]) -> None:
        """`results`: gets one entry for every operation, in order; None where the result is to be recomputed."""
        super().__init__()
        self._operations, self._results = operations, results
        self._place_of_storage: dict[int, int] = {}
        self._num_products = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, because otherwise nothing would be compiled under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self._operations or not _is_differentiated(func, args):
            for tensor in _changed_in_place(func, args, kwargs):
                self._copy_if_kept(tensor)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        is_kept = func in ATTENTION_OPS
        if not is_kept:
            self._num_products += 1
            is_kept = self._num_products % 2 == 0
        kept = None
        if is_kept:
            kept = tree_map_only(Tensor, torch.ops.aten.detach.default, result)
            self._place_of_storage |= {_storage(part): len(self._results) for part in _tensors(kept)}
        self._results.append(kept)
        return result

    def _copy_if_kept(self, tensor: Tensor) -> None:
        storage = _storage(tensor)
        place = self._place_of_storage.pop(storage, None)
        if place is not None:
            self._results[place] = tree_map_only(
                Tensor, lambda part: part.clone() if _storage(part) == storage else part, self._results[place]
            )


class _GivesBack(TorchDispatchMode):
    """Answers with what `_Keeps` kept, once, and computes the rest."""

    def __init__(self, operations: frozenset[Any], results: list[Any]) -> None:
        super().__init__()
        self._operations, self._results = operations, results
        self._place = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """See `_Keeps`."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._operations or not _is_differentiated(func, args):
            return func(*args, **(kwargs or {}))
        assert self._place < len(self._results), f"{func} was not called in the forward pass"
        kept, self._results[self._place] = self._results[self._place], None
        self._place += 1
        return func(*args, **(kwargs or {})) if kept is None else kept


def _is_differentiated(func: Any, args: Any) -> bool:
    """Whether an operation has a backward. Those whose backward is written in Python run without gradients, as in the
    forward of any autograd.Function; what they are given says whether some are wanted."""
    return any(tensor.requires_grad for tensor in _tensors(args)) if func is _VARLEN else torch.is_grad_enabled()


def _changed_in_place(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation is about to write to."""
    if not isinstance(func, OpOverload) or not func._schema.is_mutable:
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[place] if place < len(args) else kwargs.get(argument.name))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    """The same number for tensors that share memory."""
    return tensor.untyped_storage()._cdata


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    """Copies a saved tensor to the host on its device's own stream, so that neither side waits for the other. Returns
    the device, and the copy."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
    return tensor.device, host.copy_(tensor, non_blocking=True)


def _to_device(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, host = packed
    return host.to(device, non_blocking=True)

"""TiledMLP: the MLP of a layer computed in slices of the sequence, and again in backward, so that its inner activations
exist for one slice at a time (Bekman et al. 2025, Arctic Long Sequence Training).

Shapes: t tokens of this rank, D hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from shardwise.config import ConfigError, ModelError

MLP_NAMES = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp", "ffn")
DEFAULT_NUM_SHARDS = 4


class TiledMLP(ActivationWrapper):
    """Computes what the module it wraps computes, slice by slice. For modules that treat every token separately."""

    def __init__(self, mlp: nn.Module, num_shards: int) -> None:
        super().__init__(mlp)
        self._num_shards = num_shards

    def forward(self, hidden: Tensor) -> Tensor | tuple[Tensor, ...]:
        """[..., t, D] -> the same shape, with whatever else the module returns for each token (GPT-OSS: its router's
        scores, [t, k]).

        Raises:
            ModelError: it returns something that does not have a row for each token.
        """
        mlp = self._checkpoint_wrapped_module
        tokens = hidden.flatten(0, -2)
        num_shards = min(self._num_shards, tokens.shape[0])
        trained = [parameter for parameter in mlp.parameters() if parameter.requires_grad]
        out: Tensor | tuple[Tensor, ...] = _Tiled.apply(mlp, num_shards, tokens, *trained)
        if isinstance(out, Tensor):
            return out.view_as(hidden)
        return out[0].view_as(hidden), *out[1:]


class _Tiled(torch.autograd.Function):
    """Takes the trained parameters as inputs, so that their gradients leave through autograd as any others do."""

    @staticmethod
    def forward(
        ctx: Any, mlp: nn.Module, num_shards: int, tokens: Tensor, *trained: nn.Parameter
    ) -> Tensor | tuple[Tensor, ...]:
        ctx.mlp, ctx.num_shards, ctx.num_trained = mlp, num_shards, len(trained)
        ctx.save_for_backward(tokens)
        ctx.set_materialize_grads(False)
        slices = [_compute(mlp, part) for part in tokens.tensor_split(num_shards)]
        outs = tuple(torch.cat(parts) for parts in zip(*slices, strict=True))
        return outs if len(outs) > 1 else outs[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_of_outs: Tensor | None) -> tuple[Any, ...]:
        (tokens,) = ctx.saved_tensors
        # FSDP has gathered them again: these are the objects that forward was given.
        trained = [parameter for parameter in ctx.mlp.parameters() if parameter.requires_grad]
        assert len(trained) == ctx.num_trained
        totals = [
            torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
            for parameter in trained
        ]
        used = [i for i, grad in enumerate(grads_of_outs) if grad is not None]
        sliced_grads = zip(
            *(grad.tensor_split(ctx.num_shards) for grad in grads_of_outs if grad is not None), strict=True
        )
        token_grads = []
        for part, part_grads in zip(tokens.tensor_split(ctx.num_shards), sliced_grads, strict=True):
            leaf = part.detach().requires_grad_()
            with torch.enable_grad():
                outs = _compute(ctx.mlp, leaf)
            token_grad, *grads = torch.autograd.grad(
                [outs[i] for i in used], [leaf, *trained], part_grads, allow_unused=True
            )
            token_grads.append(token_grad)
            for total, part_of_total in zip(totals, grads, strict=True):
                if part_of_total is not None:
                    total += part_of_total
        summed = [total.to(parameter.dtype) for total, parameter in zip(totals, trained, strict=True)]
        return None, None, torch.cat(token_grads), *summed


def _compute(mlp: nn.Module, tokens: Tensor) -> tuple[Tensor, ...]:
    """[n, D] -> [n, D], and the other outputs, each of n rows. Models give their MLPs a batch dimension, and some of
    these (Llama 4's experts) return states without it."""
    out = mlp(tokens[None])
    states, *others = (out,) if isinstance(out, Tensor) else out
    rows = (states.flatten(0, -2) if isinstance(states, Tensor) and states.dim() > 1 else states, *others)
    if not all(isinstance(one, Tensor) and one.shape[:1] == tokens.shape[:1] for one in rows):
        raise ModelError(
            f"engine.apply_tiled_mlp=true: {type(mlp).__name__} returns what does not have a row for each token and "
            "cannot be put together from slices; set it to false for this model"
        )
    return rows


def mlp_paths(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """The MLP of every layer; both, where one stands beside a mixture of experts.

    Raises:
        ConfigError: a layer has none under a name that we know.
    """
    paths = []
    for layer in layers:
        module = model.get_submodule(layer)
        children = [name for name, _ in module.named_children()]
        known = [name for name in MLP_NAMES if name in children]
        if not known:
            raise ConfigError(
                f"engine.apply_tiled_mlp=true: {layer} ({type(module).__name__}) has no MLP named "
                f"{', '.join(MLP_NAMES)}; its parts are {', '.join(children) or 'none'}. Set it to false, or name "
                "layers that have one in engine.wrap_policy.transformer_layer_cls_to_wrap"
            )
        paths += [f"{layer}.{name}" for name in known]
    return paths


def tile_mlps(model: nn.Module, paths: Sequence[str], num_shards: int | None) -> None:
    """Puts the MLPs at `paths` into TiledMLP, in place; None stands for the default number of slices."""
    for path in paths:
        model.set_submodule(path, TiledMLP(model.get_submodule(path), num_shards or DEFAULT_NUM_SHARDS))

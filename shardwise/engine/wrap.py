"""Which modules become FSDP units, and how each unit is sharded."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion
from transformers import PreTrainedModel

from shardwise.config import ConfigError, EngineConfig, LayoutConfig, WrapPolicyConfig
from shardwise.console import warn
from shardwise.engine.mesh import EngineMesh, divisors
from shardwise.engine.names import CONTAINERS, closest_classes, has_parameters, is_within, outermost
from shardwise.engine.precision import Precision
from shardwise.families import decoder_layers, unreached_modules, vision_paths
from shardwise.ops import plain_name

MIN_TORCH = "2.13"
REDUCES_UNUSED = torch.__version__ >= TorchVersion(MIN_TORCH)
"""Whether a trained parameter that a rank's tokens did not reach is reduced as zeros. FSDP of earlier releases leaves
it out, so that, if ranks reach different ones, the numbers of one are added to those of another."""


def layer_paths(model: PreTrainedModel, policy: WrapPolicyConfig) -> list[str]:
    """Returns the paths of the layers, in the order of the forward pass: what is sharded, checkpointed and compiled one
    by one.

    Without names from the user: the decoder layers, and, outside them, the modules of lists that are or hold what
    `_no_split_modules` names (vision blocks). `_no_split_modules` alone is not enough: some families leave it empty,
    and others name parts of a layer or embeddings in it.

    Raises:
        ConfigError: a class name that no module has, or one inside another.
    """
    if policy.transformer_layer_cls_to_wrap is not None:
        key = "engine.wrap_policy.transformer_layer_cls_to_wrap"
        paths = _paths_of_classes(model, policy.transformer_layer_cls_to_wrap, key)
        for outer, inner in pairwise(paths):
            if is_within(inner, outer):
                one_class = len({type(model.get_submodule(path)).__name__ for path in (inner, outer)}) == 1
                remedy = "they are of one class; name another" if one_class else "name the class of one of them"
                raise ConfigError(f"{key}: {inner} is inside {outer}; {remedy}")
        return paths
    path_of = {id(module): path for path, module in model.named_modules()}
    layers = [path_of[id(layer)] for layer in decoder_layers(model)]
    named = set(model._no_split_modules or ())
    blocks = dict.fromkeys(_member(path) for path, module in model.named_modules() if type(module).__name__ in named)
    outside = [path for path in blocks if path and not any(is_within(path, layer) for layer in layers)]
    return [*outside, *layers]


def _member(path: str) -> str:
    """Returns the path of the module of the innermost list that `path` is or lies in; empty if it lies in none."""
    parts = path.split(".")
    while parts and not parts[-1].isdigit():
        parts.pop()
    return ".".join(parts)


def _paths_of_classes(model: PreTrainedModel, class_names: Sequence[str], key: str) -> list[str]:
    """Returns the paths of modules with parameters of these classes, in the order of the modules, whatever the order of
    the names. For an adapted module it is that of the outermost adapter around it, which reads the module's weights
    before it is called. Raises ConfigError: a class that no such module has, or that of the whole model."""
    parts = {path: part for path, part in model.named_modules() if not isinstance(part, CONTAINERS)}
    of_class = {path: type(part).__name__ for path, part in parts.items() if has_parameters(part)}
    for class_name in class_names:
        if class_name == of_class[""]:
            raise ConfigError(f"{key}: {class_name} is the whole model, which is the root unit; name classes inside it")
        if class_name not in of_class.values():
            exists = any(type(part).__name__ == class_name for part in parts.values())
            raise ConfigError(
                f"{key}: {class_name} matches no module {'with parameters ' if exists else ''}of "
                f"{type(model).__name__}; {closest_classes(model, class_name)}"
            )
    return list(dict.fromkeys(outermost(path) for path, class_name in of_class.items() if class_name in class_names))


MOST_PADDING = 1.5
"""How many times the weights may be gathered without a warning."""


def padding_warning(weights: Iterable[tuple[str, Sequence[int], int]], *, fsdp_size: int) -> str | None:
    """Returns a warning where FSDP gathers much more than the weights have, because it gives every rank as many rows of
    a tensor as the one with most has: 128 experts over 1,024 ranks are gathered as 1,024. None if it does not.

    Args:
        weights: name, shape and number of ranks that shard it, of every parameter.
    """
    whole = gathered = most = 0
    worst, smaller = "", fsdp_size
    for name, shape, num_ranks in weights:
        numel, padded = math.prod(shape), math.prod(shape[1:]) * -(-shape[0] // num_ranks) * num_ranks
        whole, gathered = whole + numel, gathered + padded
        if padded - numel > most:
            worst, most = f"{name} has {shape[0]} rows for {num_ranks} ranks", padded - numel
            smaller = max(size for size in divisors(fsdp_size) if size <= fsdp_size * shape[0] // num_ranks)
    if gathered <= MOST_PADDING * whole:
        return None
    return (
        f"engine.fsdp_size={fsdp_size}: every rank gathers {gathered / whole:.1f} times the weights, for FSDP pads "
        f"them: {worst}; with fsdp_size={smaller} and replicas it gathers them once"
    )


class Units:
    """The FSDP units of a model, chosen before wrappers go around its layers."""

    def __init__(
        self, model: PreTrainedModel, config: LayoutConfig, precision: Precision, spread_experts: Sequence[str] = ()
    ) -> None:
        """
        Args:
            spread_experts: the paths of experts that ranks share, which are sharded over fewer ranks than all else.
        Raises:
            ConfigError: a name that matches nothing or what is a unit anyway, or one that would split tied weights.
        """
        wrap = config.wrap_policy
        self.layers = layer_paths(model, wrap)
        """Paths of the layers."""
        unreached = unreached_modules(model)
        self.reached = [path for path in self.layers if not any(is_within(path, outer) for outer in unreached)]
        """Paths of the layers that gradients come back through."""
        self._spread_experts = set(spread_experts)
        named = _paths_of_classes(model, wrap.moe_experts, "engine.wrap_policy.moe_experts")
        for path in named:
            if path in self.layers:
                inside = closest_classes(nn.ModuleList(model.get_submodule(path).children()), "experts")
                raise ConfigError(
                    f"engine.wrap_policy.moe_experts: {path} is an FSDP unit already, as a layer; name a class inside "
                    f"it: {inside}"
                )
        self.experts = [*named, *(path for path in spread_experts if path not in named)]
        """The paths of what moe_experts names, and of experts that ranks share."""
        self.inner = [*self.experts, *precision.overrides]
        """The paths of units beside layers: experts and what computes in another dtype."""
        self._vision = vision_paths(model)
        self._precision = precision
        self._config = config
        self._is_tied = bool(model.get_expanded_tied_weights_keys())
        for key, is_set in {"embeddings": wrap.wrap_embeddings, "lm_output": wrap.wrap_lm_output}.items():
            if is_set and self._is_tied:
                raise ConfigError(
                    f"engine.wrap_policy.wrap_{key}=true: the embedding and the output projection of "
                    f"{type(model).__name__} are one weight (tie_word_embeddings), which stays in the root unit; "
                    "set it to false"
                )

    @property
    def decoder_layers(self) -> list[str]:
        """The layers that are not in a vision tower that is shown images."""
        return [layer for layer in self.layers if not any(is_within(layer, outer) for outer in self._vision)]

    def require_whole(self, paths: Sequence[str], key: str) -> None:
        """Raises ConfigError if a module at one of `paths` is a unit or holds one inside it."""
        for inner in self.inner:
            for path in paths:
                if is_within(inner, path):
                    what = "it" if inner == path else f"{inner} inside it"
                    by = "engine.ep_size" if inner in self._spread_experts else self._named_by(inner)
                    raise ConfigError(
                        f"{key} computes {path} piece by piece, but {what} is an FSDP unit of its own ({by}) and would "
                        "be gathered for every piece; remove one of the two"
                    )

    def shard(self, root: nn.Module, hf_model: PreTrainedModel, head: nn.Module, mesh: EngineMesh) -> list[FSDPModule]:
        """Shards the units, inner ones first, the root with what is left.

        Gradients are plain sums over ranks: the loss is already divided by the global denominators.

        Returns:
            The units in the order of the model's modules, the root last.
        """
        wrap = self._config.wrap_policy
        # From the last module to the first, so inner ones before outer ones. A wrapper and what it wraps have one plain
        # name: the wrapper, named first, goes in last and is the unit.
        modules = {plain_name(path): module for path, module in reversed(list(hf_model.named_modules()))}
        # The vision tower too, for what is around its blocks: embeddings of patches, mergers.
        chosen = {*self.layers, *self.experts, *self._precision.overrides, *self._vision}
        if wrap.wrap_embeddings:
            chosen.update(path for path, module in modules.items() if module is hf_model.get_input_embeddings())
        self._require_no_projection(chosen, modules, head)
        keep = self._keep_sharded(mesh.fsdp.size(-1))
        keep_experts = self._keep_experts_sharded(mesh.expert_fsdp.size(-1))
        units = {
            path: self._shard(module, mesh.expert_fsdp, path=path, reshard_after_forward=keep_experts)
            if path in self._spread_experts
            else self._shard(module, mesh.fsdp, path=path, reshard_after_forward=keep)
            for path, module in modules.items()
            if path in chosen
        }
        self._prefetch([units[path] for path in self.reached])
        ordered = list(reversed(units.values()))
        taken: set[nn.Parameter] = set()
        if wrap.wrap_lm_output:
            ordered.append(self._shard(head, mesh.fsdp, reshard_after_forward=keep))
            taken = set(head.parameters())  # the root reaches them by the model's own name for the projection too
        ordered.append(self._shard(root, mesh.fsdp, reshard_after_forward=False, ignored=taken))
        sharded = cast(Iterable[tuple[str, DTensor]], hf_model.named_parameters())
        doubt = padding_warning(
            ((plain_name(name), w.shape, w.device_mesh.size(-1)) for name, w in sharded),
            fsdp_size=mesh.fsdp.size(-1),
        )
        if doubt and dist.get_rank() == 0:
            warn(doubt)
        return ordered

    def _require_no_projection(self, chosen: set[str], modules: dict[str, nn.Module], head: nn.Module) -> None:
        """Raises ConfigError if a chosen unit holds the output projection: the head reaches into it, and only the
        head's own unit or the root can have gathered it by then."""
        projection = {id(parameter) for parameter in head.parameters()}
        for path in sorted(chosen):
            if any(id(parameter) in projection for parameter in modules[path].parameters()):
                raise ConfigError(
                    f"{self._named_by(path)} makes an FSDP unit of {path}, which holds the output projection; a head "
                    "of its own applies that in float32. Name others"
                    + ("" if self._is_tied else "; engine.wrap_policy.wrap_lm_output=true makes it a unit")
                )

    def _named_by(self, path: str) -> str:
        """The key and value that make the module at `path` a unit."""
        if path in self._precision.overrides:
            return f"engine.module_precision={self._precision.overrides[path].module}"
        key = "moe_experts" if path in self.experts else "transformer_layer_cls_to_wrap"
        return f"engine.wrap_policy.{key}={getattr(self._config.wrap_policy, key)}"

    def _keep_sharded(self, num_ranks: int) -> bool | int:
        """Returns the reshard_after_forward of fully_shard for weights that are sharded over so many ranks. Raises
        ConfigError: the value does not divide them."""
        value = self._config.reshard_after_forward
        if isinstance(value, bool) or (1 < value < num_ranks and num_ranks % value == 0):
            return value
        if value == num_ranks:
            return True
        choices = ", ".join(["true", "false", *(str(d) for d in divisors(num_ranks) if d > 1)])
        raise ConfigError(
            f"engine.reshard_after_forward={value} does not divide the {num_ranks} ranks that weights are sharded over"
            f"; use {choices}"
        )

    def _keep_experts_sharded(self, num_ranks: int) -> bool | int:
        """Like `_keep_sharded`, for experts that ranks share, which are sharded over fewer ranks: all of them may lie
        in one part of the model's ranks."""
        value = self._config.reshard_after_forward
        return True if not isinstance(value, bool) and value >= num_ranks else self._keep_sharded(num_ranks)

    def _shard(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        *,
        reshard_after_forward: bool | int,
        path: str | None = None,
        ignored: set[nn.Parameter] | None = None,
    ) -> FSDPModule:
        on_accelerator = mesh.device_type != "cpu"
        offload = CPUOffloadPolicy(pin_memory=on_accelerator) if self._config.offload_policy else OffloadPolicy()
        plain = type(module)
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=self._precision.policy(path),
            reshard_after_forward=reshard_after_forward,
            offload_policy=offload,
            ignored_params=ignored,
        )
        if isinstance(module, PreTrainedModel):
            # By these names transformers finds what a model records, such as the hidden states that a projector reads.
            type(module).__module__, type(module).__qualname__ = plain.__module__, plain.__qualname__
        unit = cast(FSDPModule, module)
        if mesh.size() > 1:  # else torch would divide into new memory
            unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        if REDUCES_UNUSED:
            unit.set_reduce_scatter_unused_params(True)
        return unit

    def _prefetch(self, layers: list[FSDPModule]) -> None:
        ahead = self._config.forward_prefetch
        behind = self._config.backward_prefetch if isinstance(self._config, EngineConfig) else 0
        for key, count in {"forward_prefetch": ahead, "backward_prefetch": behind}.items():
            if count and count >= len(layers):
                raise ConfigError(
                    f"engine.{key}={count} would gather the weights of {count} layers beside the one that computes, "
                    f"and the model has {len(layers)} layers; use at most {len(layers) - 1}"
                )
        for place, layer in enumerate(layers):
            if ahead:
                layer.set_modules_to_forward_prefetch(layers[place + 1 : place + 1 + ahead])
            if behind:
                layer.set_modules_to_backward_prefetch(layers[max(0, place - behind) : place][::-1])

"""Which parameters are trained, and how: learning rate, weight decay, and whether Muon may take them."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from shardwise.config import ConfigError, OptimizerConfig
from shardwise.engine.heads import OUTPUT_PROJECTIONS
from shardwise.engine.names import is_within, tied_elsewhere
from shardwise.engine.runtime_state import has_adapters
from shardwise.ops import plain_name

_VECTORS_AND_EMBEDDINGS = {
    *("A_log", "cls_token", "probe", "query"),
    *("image_positions", "position_embedding_table", "position_embeddings"),
}
"""Names of parameters that are no weight of a layer: rates of decay, learnt tokens and queries, positions. They may
have several dimensions (Kimi-Linear's A_log has one number for each head and is [1, 1, H, 1])."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedParameter:
    """A parameter that is trained, and how.

    Example: `TrainedParameter(name="model.norm.weight", parameter=..., rate_prefix=None, is_decayed=False,
    is_hidden_matrix=False, is_transposed=False)`
    """

    name: str
    """Name in the model, free of what wrappers add to it."""
    parameter: nn.Parameter
    rate_prefix: str | None
    """The key of module_learning_rates that applies; None: learning_rate."""
    is_decayed: bool
    """Matrices are decayed. Embeddings (a tied output projection is one), norms, biases and learnt vectors are not,
    even with two dimensions: Cohere's norms of each head, biases of fused experts, a tower's positions."""
    is_hidden_matrix: bool
    """Two dimensions, and inside the decoder: see `hidden_matrices`."""
    is_transposed: bool
    """A matrix that is stored [columns in, rows out] (transformers' Conv1D, in GPT-2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters that share their learning rate and weight decay."""

    parameters: list[nn.Parameter]
    rate_prefix: str | None
    peak_learning_rate: float
    weight_decay: float
    is_transposed: bool


def hidden_matrices(model: nn.Module) -> set[int]:
    """The ids of the parameters that Muon is meant for: two-dimensional weights between embedding and output.

    Muon's authors leave embeddings, output projections, vectors and scalars to AdamW (Jordan et al. 2024). Left out
    here: whatever is not of two dimensions (fused experts have three), biases of fused experts, norms, weights of an
    nn.Embedding (and so tied projections), learnt queries, and everything at or below a module named as in
    OUTPUT_PROJECTIONS. LoRA adapters count as matrices, but not those of fused experts, which hold one for each expert
    side by side.
    """
    others, of_experts = embedding_weights(model) | _norm_weights(model), _adapters_of_experts(model)
    return {
        id(parameter)
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2
        and not name.endswith("bias")
        and _last_part(name) not in _VECTORS_AND_EMBEDDINGS
        and id(parameter) not in others
        and not plain_name(name).startswith(of_experts)
        and OUTPUT_PROJECTIONS.isdisjoint(plain_name(name).split("."))
    }


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _adapters_of_experts(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the names of the adapters of fused experts."""
    if not has_adapters(model):
        return ()
    from shardwise.engine.lora import adapted_weights  # importing peft takes seconds

    return tuple(f"{weight.path}.lora_" for weight in adapted_weights(model).values() if weight.is_experts)


def embedding_weights(model: nn.Module) -> set[int]:
    """The ids of the weights of every nn.Embedding."""
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}


def _norm_weights(model: nn.Module) -> set[int]:
    """The ids of the weights and biases of norms, which in some have one row for each head (Cohere)."""
    norms = (module for module in model.modules() if "norm" in type(module).__name__.lower())
    return {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}


def _transposed_weights(model: nn.Module) -> set[int]:
    return {id(module.weight) for module in model.modules() if isinstance(module, Conv1D)}


def trained_parameters(model: nn.Module, rate_prefixes: Iterable[str] = ()) -> list[TrainedParameter]:
    """The parameters that require a gradient, in the model's order.

    Args:
        rate_prefixes: the keys of module_learning_rates; a name gets the longest one that it equals, or begins with
            before a dot, so that layers.1 does not take layers.10 with it.
    Raises:
        ConfigError: nothing is trained, or a prefix has no parameter.
    """
    undecayed, matrices = embedding_weights(model) | _norm_weights(model), hidden_matrices(model)
    transposed = _transposed_weights(model)
    longest_first = sorted(rate_prefixes, key=len, reverse=True)
    trained = []
    for full_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = plain_name(full_name)
        trained.append(
            TrainedParameter(
                name=name,
                parameter=parameter,
                rate_prefix=next((prefix for prefix in longest_first if is_within(name, prefix)), None),
                is_decayed=parameter.dim() >= 2
                and not name.endswith("bias")
                and _last_part(name) not in _VECTORS_AND_EMBEDDINGS
                and id(parameter) not in undecayed,
                is_hidden_matrix=id(parameter) in matrices,
                is_transposed=id(parameter) in transposed,
            )
        )
    if not trained:
        raise ConfigError("the optimizer has nothing to train: no parameter requires a gradient; freeze fewer modules")
    for prefix in longest_first:
        _check_takes_effect(prefix, trained, model)
    return trained


def group_parameters(trained: Sequence[TrainedParameter], config: OptimizerConfig) -> list[ParameterGroup]:
    """One group for each learning rate, decay, orientation and mesh that occurs, in the order of their first
    parameters. torch updates a group at once, and DTensors of two meshes (experts that ranks share) do not go
    together."""
    groups: dict[tuple[str | None, bool, bool, object], list[nn.Parameter]] = {}
    for one in trained:
        mesh = one.parameter.device_mesh if isinstance(one.parameter, DTensor) else None
        key = (one.rate_prefix, one.is_decayed, one.is_transposed, mesh)
        groups.setdefault(key, []).append(one.parameter)
    return [
        ParameterGroup(
            parameters=parameters,
            rate_prefix=prefix,
            peak_learning_rate=config.learning_rate if prefix is None else config.module_learning_rates[prefix],
            weight_decay=config.weight_decay if is_decayed else 0.0,
            is_transposed=is_transposed,
        )
        for (prefix, is_decayed, is_transposed, _), parameters in groups.items()
    ]


def _check_takes_effect(prefix: str, trained: Sequence[TrainedParameter], model: nn.Module) -> None:
    if any(one.rate_prefix == prefix for one in trained):
        return
    if any(is_within(one.name, prefix) for one in trained):
        longer = sorted({one.rate_prefix for one in trained if is_within(one.name, prefix) and one.rate_prefix})
        raise ConfigError(
            f"trainer.module_learning_rates.{prefix} has no effect: longer keys ({', '.join(longer)}) take all of its "
            "parameters; remove it"
        )
    if tied := tied_elsewhere(model, prefix):
        raise ConfigError(f"trainer.module_learning_rates.{prefix}: {tied}")
    parts = [one.name.split(".") for one in trained]
    modules = dict.fromkeys(".".join(path[:length]) for path in parts for length in range(1, len(path) + 1))
    nearest = difflib.get_close_matches(prefix, modules, n=5, cutoff=0.0)
    raise ConfigError(
        f"trainer.module_learning_rates.{prefix}: no trained parameter is named so or lies in a module of this name; "
        f"the nearest names are {', '.join(nearest)}"
    )

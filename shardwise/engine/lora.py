"""Low-rank adapters through peft (LoRA, Hu et al. 2021; rsLoRA, Kalajdzievski 2023; DoRA, Liu et al. 2024).

peft puts the adapters into the module tree before the model is sharded, so an adapter belongs to the FSDP unit of its
layer and is sharded like it. What is drawn, merged, read and written is in adapters.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.utils import ModulesToSaveWrapper
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_TARGET_MODULE_MAPPING
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.config import ConfigError, LoraConfig, ModelError
from shardwise.engine.freeze import named_by_prefix
from shardwise.engine.heads import HeadName, value_projection_name
from shardwise.engine.names import closest_modules, has_parameters, is_within, outermost
from shardwise.engine.quantized import quantize_layers
from shardwise.families import decoder_layers, indexers, unreached_modules
from shardwise.ops import plain_name

ADAPTER = "default"
"""peft's name for an adapter that has no name; part of module paths, absent from files."""
FILE_PREFIX = "base_model.model."
"""What a PeftModel puts before the base model's names, and so in front of every name in an adapter file."""


REFUSED_BY_PEFT = {"falcon_h1": {"out_proj"}, "nemotron_h": {"out_proj"}}
"""By family, the layers whose weight the fused kernels of state spaces read without calling the layer."""
_CAST_TO = {"lfm2_vl": {"patch_embedding"}}
"""By family, the layers whose inputs are cast to the dtype of their weight before they are called."""

TASK_TYPES: Mapping[HeadName, str] = {
    "logprobs": "CAUSAL_LM",
    "token_values": "TOKEN_CLS",
    "sequence_scores": "SEQ_CLS",
}
"""By which peft knows the class of the base model that an adapter file belongs to."""


def inject_lora(
    model: PreTrainedModel, config: LoraConfig, head: HeadName = "logprobs", *, left_out: Sequence[str] = ()
) -> None:
    """Puts adapters into a model on the meta device, before it is sharded. Nothing else is trained afterwards.

    The base then is kept in the compute dtype and the adapters are masters, like any frozen and trained parameters.
    One FSDP unit may hold both: what it gathers is cast to the compute dtype first, and FSDP2 asks for one original
    dtype among trained parameters only.

    A value head is trained whole. With `quantize_base` the linear layers of the base, but the output head and what is
    trained whole, are QuantizedLinear.

    Fused experts [E, ...] are not called by name, so peft adds their adapters to the weights in every forward pass,
    around the module that holds them: one wrapper for each adapted parameter, one inside the other.

    Args:
        left_out: engine.freeze_module_prefix; what it names, or lies below it, gets no adapter.
    Raises:
        ConfigError: a name matches no module, a module that is not a linear layer, a parameter that is not of fused
            experts, or a weight tied to another; a prefix of `left_out` names nothing, changes nothing, leaves nothing
            or holds what is trained whole.
    """
    saved = _modules_to_save(model, [*config.modules_to_save, *_value_heads(model)])
    quantized = [] if config.quantize_base is None else _called_linear_layers(model, saved)
    experts = _target_parameters(model, config.target_parameters, saved)
    names_modules = bool(config.target_modules) or not experts
    targets = _target_modules(model, config.target_modules, saved, left_out) if names_modules else []
    targets, experts = _without(model, left_out, targets, experts, saved)
    peft_config = PeftLoraConfig(
        task_type=TASK_TYPES[head],
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=_shortest_names(model, targets),
        target_parameters=_shortest_parameter_names(model, experts) or None,
        modules_to_save=saved or None,
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in targets),
    )
    try:
        with torch.device("meta"):
            inject_adapter_in_model(peft_config, model, ADAPTER)
    except ValueError as error:
        raise ConfigError(_refused_by_peft(model, config, str(error))) from None
    adapted = adapted_weights(model).keys()
    if others := sorted(adapted ^ {*(f"{name}.weight" for name in targets), *experts}):
        raise ConfigError(_refused_by_peft(model, config, f"it would adapt other layers ({', '.join(others[:3])})"))
    if quantized:
        quantize_layers(model, [f"{name}.base_layer" if f"{name}.weight" in adapted else name for name in quantized])


def stored_config(folder: Path) -> PeftLoraConfig:
    """What an adapter's folder says of it. Raises ModelError: it holds none, or none of LoRA."""
    try:
        return PeftLoraConfig.from_pretrained(str(folder))
    except (ValueError, OSError, TypeError) as error:
        raise ModelError(f"{folder} cannot be read as a LoRA adapter: {error}") from None


def stored_targets(stored: PeftLoraConfig, tensors: Iterable[str]) -> Literal["all-linear"] | list[str]:
    """Returns the modules that an adapter is on. For peft they may also be a pattern, and some layers of a model alone:
    then those that tensors of the adapter are named for."""
    targets = stored.target_modules
    if targets == "all-linear":
        return "all-linear"
    if stored.layers_to_transform is None and not isinstance(targets, str):
        return sorted(targets or ())
    ending = ".lora_A.weight"
    paths = {name.removeprefix(FILE_PREFIX).removesuffix(ending) for name in tensors if name.endswith(ending)}
    holders = {parameter.rpartition(".")[0] for parameter in stored.target_parameters or ()}
    return sorted(path for path in paths if not any(f".{path}".endswith(f".{holder}") for holder in holders))


def _refused_by_peft(model: PreTrainedModel, config: LoraConfig, problem: str) -> str:
    return (
        f"engine.lora.target_modules={config.target_modules}: peft cannot adapt these layers of "
        f"{type(model).__name__}: {problem}. Where experts are fused, peft takes names such as gate_proj for parts of "
        "them; name other layers (q_proj, k_proj, v_proj, o_proj), and the experts in engine.lora.target_parameters"
    )


def _modules_to_save(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Returns the full names of the modules that are trained whole."""
    saved: list[str] = []
    tied = model.get_expanded_tied_weights_keys()
    for given in names:
        matches = {name: module for name, module in _matching(model, given).items() if has_parameters(module)}
        if not matches:
            raise ConfigError(
                f"engine.lora.modules_to_save: {given!r} matches no module of {type(model).__name__} with parameters; "
                f"{closest_modules(model, given)}. Give a name or the end of one"
            )
        for name, module in matches.items():
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                raise ConfigError(
                    f"engine.lora.modules_to_save: {name} is a list of modules without a forward of its own; "
                    f"name its members ({name}.{next(iter(dict(module.named_children())), 0)})"
                )
            for pair in tied.items():
                if any(is_within(weight, name) for weight in pair):
                    raise ConfigError(
                        f"engine.lora.modules_to_save: {name} shares its weight ({' = '.join(pair)}); a trained copy "
                        "would part from it, and neither the merged model nor the adapter could say so; remove it"
                    )
        saved += matches
    nested = [name for name in saved for other in saved if name.startswith(f"{other}.")]
    if nested:
        raise ConfigError(
            f"engine.lora.modules_to_save: {nested[0]} lies inside another module of the list; remove one of them"
        )
    return list(dict.fromkeys(saved))


def _value_heads(model: PreTrainedModel) -> list[str]:
    """A critic's or reward model's head starts at random, so it is trained whole, as peft does for classifiers."""
    return [] if model.get_output_embeddings() is not None else [value_projection_name(model)]


def _target_modules(
    model: PreTrainedModel, given: str | list[str], saved: list[str], left_out: Sequence[str]
) -> list[str]:
    """The full names of the linear layers that get an adapter, before those of `left_out` are, whose modules may be of
    any kind; what is trained whole gets none."""
    head = model.get_output_embeddings()
    linear = [name for name, part in model.named_modules() if _is_linear(part) and part is not head]
    endings = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "there is none"
    targets: list[str] = []
    if given == "all-linear":
        unsuited = _not_for_peft(model)
        unseen = unreached_modules(model)
        targets = [name for name in linear if name.rpartition(".")[2] not in unsuited]
        targets = [name for name in targets if not any(is_within(name, module) for module in unseen)]
    else:
        for target in [given] if isinstance(given, str) else given:
            matches = _matching(model, target)
            for name, module in matches.items():
                if name not in linear and not _is_left_out(name, left_out):
                    raise ConfigError(_not_adapted(name, module, is_head=module is head, endings=endings))
            if not matches:
                fused = any(f".{name}".endswith(f".{target}") for name, _ in model.named_parameters())
                what = "is a bare parameter, which engine.lora.target_parameters is for, not a module" if fused else ""
                raise ConfigError(
                    f"engine.lora.target_modules: {target!r} {what or 'matches no module'} of {type(model).__name__}; "
                    f"its linear layers end in: {endings}"
                )
            targets += matches
    targets = [name for name in dict.fromkeys(targets) if not any(is_within(name, one) for one in saved)]
    if not targets:
        raise ConfigError(
            f"engine.lora.target_modules={given} leaves no layer of {type(model).__name__} to adapt, with "
            f"modules_to_save={saved}; its linear layers end in: {endings}"
        )
    return targets


def _without(
    model: PreTrainedModel, prefixes: Sequence[str], targets: list[str], experts: list[str], saved: list[str]
) -> tuple[list[str], list[str]]:
    """Targets and experts, full names, without those that are, or lie below, one of the prefixes."""
    for prefix in prefixes:
        named_by_prefix(model, prefix)
        module = prefix.rstrip(".")
        if whole := [name for name in saved if is_within(name, module) or is_within(module, name)]:
            raise ConfigError(
                f"engine.freeze_module_prefix: {prefix!r} and {whole[0]}, which is trained whole "
                "(engine.lora.modules_to_save, or a value head), share parameters; name others in one of the two"
            )
        if not any(is_within(name, module) for name in (*targets, *experts)):
            raise ConfigError(
                f"engine.freeze_module_prefix: {prefix!r} has no effect with engine.lora, which freezes the whole base "
                "and puts no adapter into it; remove it"
            )
    kept, kept_experts = ([name for name in names if not _is_left_out(name, prefixes)] for names in (targets, experts))
    if not kept and not kept_experts:
        raise ConfigError(
            f"engine.freeze_module_prefix={list(prefixes)} leaves no layer of {type(model).__name__} to adapt of those "
            f"that engine.lora names, such as {(targets or experts)[0]}; freeze fewer modules"
        )
    return kept, kept_experts


def _is_left_out(name: str, prefixes: Sequence[str]) -> bool:
    return any(is_within(name, prefix.rstrip(".")) for prefix in prefixes)


def _target_parameters(model: PreTrainedModel, given: list[str], saved: list[str]) -> list[str]:
    """The full names of the fused experts that get an adapter; what is trained whole gets none."""
    fused = fused_experts(model)
    known = ", ".join(_shortest_parameter_names(model, fused)) or "it has none"
    targets: list[str] = []
    for target in given:
        matches = [name for name, _ in model.named_parameters() if target and f".{name}".endswith(f".{target}")]
        if not matches:
            raise ConfigError(
                f"engine.lora.target_parameters: {target!r} matches no parameter of {type(model).__name__}; its fused "
                f"experts are: {known}"
            )
        if others := [name for name in matches if name not in fused]:
            raise ConfigError(
                f"engine.lora.target_parameters: {others[0]} has {model.get_parameter(others[0]).ndim} dimensions, and "
                f"fused experts have 3; its fused experts are: {known}. Linear layers go into target_modules"
            )
        targets += matches
    targets = [name for name in dict.fromkeys(targets) if not any(is_within(name, one) for one in saved)]
    if given and not targets:
        raise ConfigError(
            f"engine.lora.target_parameters={given} leaves no experts of {type(model).__name__} to adapt, with "
            f"modules_to_save={saved}; its fused experts are: {known}"
        )
    return targets


def fused_experts(model: PreTrainedModel) -> list[str]:
    """The full names of parameters that hold a matrix for every expert."""
    layers = {id(part) for layer in decoder_layers(model) for part in layer.modules()}
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if id(module) in layers and not isinstance(module, nn.Conv1d)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    ]


def _called_linear_layers(model: PreTrainedModel, saved: list[str]) -> list[str]:
    """The full names of linear layers, but the head and what is trained whole, whose weight nobody else reads: an
    indexer looks at the dtype of its own, and torch's attention (SigLIP's head) multiplies by it itself."""
    attentions = [name for name, part in model.named_modules() if isinstance(part, nn.MultiheadAttention)]
    whole = [*saved, *indexers(model), *attentions]
    head = model.get_output_embeddings()
    family = model.config.model_type
    read = REFUSED_BY_PEFT.get(family, set()) | _CAST_TO.get(family, set())
    return [
        name
        for name, part in model.named_modules()
        if _is_linear(part) and part is not head and name.rpartition(".")[2] not in read
        if not any(is_within(name, one) for one in whole)
    ]


def _is_linear(part: nn.Module) -> bool:
    """Some routers are linear layers by class, with a forward that returns more than a tensor. GPT-2's layers are
    transformers' Conv1D, which holds its weight transposed."""
    return type(part).forward in (nn.Linear.forward, Conv1D.forward)


def _not_for_peft(model: PreTrainedModel) -> set[str]:
    """Last parts of the names of linear layers that peft refuses, or takes for parts of fused experts, wherever in the
    model they are."""
    family = model.config.model_type
    experts = _MOE_TARGET_MODULE_MAPPING.get(_MODEL_TO_CONVERSION_PATTERN.get(family), {})
    return {*experts, *REFUSED_BY_PEFT.get(family, ())}


def _not_adapted(name: str, module: nn.Module, *, is_head: bool, endings: str) -> str:
    if is_head:
        return (
            f"engine.lora.target_modules: {name} is the output head, which gets no adapter; "
            "put it into engine.lora.modules_to_save to train it whole"
        )
    return (
        f"engine.lora.target_modules: {name} is {type(module).__name__}; this version adapts linear layers, which end "
        f"in: {endings}, and fused experts, which target_parameters names. Parts of the model that get no adapter are "
        "named in engine.freeze_module_prefix"
    )


def _matching(model: PreTrainedModel, given: str) -> dict[str, nn.Module]:
    """Modules whose name is `given` or ends with it, whole parts of names only."""
    return {name: module for name, module in model.named_modules() if given and f".{name}".endswith(f".{given}")}


def _shortest_names(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Last parts of the names where those say the same, as adapter_config.json usually holds; else the full names."""
    endings = {name.rpartition(".")[2] for name in names}
    reached = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in endings}
    return sorted(endings) if reached == set(names) else sorted(names)


def _shortest_parameter_names(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Like `_shortest_names`, with the name of the module before that of the parameter: `experts.down_proj`."""
    endings = {".".join(name.split(".")[-2:]) for name in names}
    reached = {name for name, _ in model.named_parameters() if any(name.endswith(f".{ending}") for ending in endings)}
    return sorted(endings) if reached == set(names) else sorted(names)


def base_names(model: PreTrainedModel) -> dict[str, str | None]:
    """Name in `model.state_dict()` -> name without peft, as model files hold it; None for what an adapter file holds.

    `q_proj.base_layer.weight` is `q_proj.weight`, `lm_head.original_module.weight` is `lm_head.weight`.
    """
    names: dict[str, str | None] = {name: name for name in model.state_dict()}
    for path, kept, inner in _wrapped_names(model):  # of wrappers inside each other the innermost comes last
        base = f"{outermost(path)}.{inner.removeprefix(kept)}"
        names[f"{path}.{inner}"] = base if inner.startswith(kept) else None
    return names


def adapter_names(model: PreTrainedModel) -> dict[str, str]:
    """Name in `model.state_dict()` -> name in an adapter file, of all trained tensors."""
    names = {}
    for path, kept, inner in _wrapped_names(model):
        if inner.startswith(kept):
            continue
        kind, rest = inner.split(f".{ADAPTER}.", 1)
        in_file = {"modules_to_save": rest, "lora_magnitude_vector": kind}.get(kind, f"{kind}.{rest}")
        names[f"{path}.{inner}"] = f"{FILE_PREFIX}{path}.{in_file}"
    return names


def _wrapped_names(model: PreTrainedModel) -> Iterator[tuple[str, str, str]]:
    """(path of a module that peft wrapped, prefix of the base's tensors in it, name of a tensor in it)."""
    for path, layer in lora_layers(model):
        yield from ((path, "base_layer.", inner) for inner in layer.state_dict())
    for path, wrapper in _saved_modules(model):
        yield from ((path, "original_module.", inner) for inner in wrapper.state_dict())


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """The adapter of one weight of the base: where it is, and how it applies."""

    path: str
    """The path of the layer that holds A and B."""
    scaling: float
    """The factor of their product."""
    is_experts: bool = False
    """The weight is fused, [E, ...], and A and B hold a pair for every expert."""
    is_transposed: bool = False
    """It is [in, out] instead of [out, in], fused weights [E, in, out] instead of [E, out, in]."""


def adapted_weights(model: PreTrainedModel) -> dict[str, AdaptedWeight]:
    """By the name of the weight in model files."""
    found = {}
    for path, layer in lora_layers(model):
        if isinstance(layer, ParamWrapper):
            is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)
            weight = AdaptedWeight(path, layer.scaling[ADAPTER], is_experts=True, is_transposed=is_transposed)
            found[f"{outermost(path)}.{layer.parameter_name}"] = weight
        else:
            found[f"{path}.weight"] = AdaptedWeight(path, layer.scaling[ADAPTER], is_transposed=layer.fan_in_fan_out)
    return found


def lora_layers(model: PreTrainedModel) -> Iterator[tuple[str, LoraLayer]]:
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield plain_name(path), module


def _saved_modules(model: PreTrainedModel) -> Iterator[tuple[str, ModulesToSaveWrapper]]:
    for path, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            yield plain_name(path), module


def trained_copies(model: PreTrainedModel) -> dict[str, str]:
    """Name of a frozen original in `model.state_dict()` -> name of the trained copy that modules_to_save made."""
    return {
        f"{path}.original_module.{inner}": f"{path}.modules_to_save.{ADAPTER}.{inner}"
        for path, wrapper in _saved_modules(model)
        for inner in wrapper.original_module.state_dict()
    }


@contextmanager
def adapter_dropout(model: PreTrainedModel, key: tuple[int, ...]) -> Iterator[None]:
    """Inside it the adapters' own dropout is at work; the rest of the model stays in evaluation mode.

    What is dropped depends on the key alone, so a run that is resumed needs no state of a generator.
    """
    torch.manual_seed(hash(key) % 2**63)
    layers = [layer for _, layer in lora_layers(model)]
    for layer in layers:
        layer.train()
    try:
        yield
    finally:
        for layer in layers:
            layer.eval()


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Inside it the model is its base alone: the reference policy, without a second model."""
    _switch(model, on=False)
    try:
        yield
    finally:
        _switch(model, on=True)


def _switch(model: PreTrainedModel, *, on: bool) -> None:
    """peft also toggles requires_grad; that is undone at once, because FSDP2 takes the dtype of its gradient reduction
    from the parameters that require gradients at the first forward pass, which may be one without adapters."""
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for _, module in (*lora_layers(model), *_saved_modules(model)):
        module.enable_adapters(on)
    for parameter, requires_grad in required:
        parameter.requires_grad_(requires_grad)

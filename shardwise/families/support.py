"""Which model families packed training and cached generation can compute. Both ask here before they compute anything.

Both replace a model's attention through transformers' registry and leave everything else as it is. That is exact for
decoder-only models in which tokens see each other only through registered attention; any other model would run without
an error and give wrong numbers. Both also support chunked attention, and sequence mixers, which carry a state from
token to token.
"""

import inspect
from inspect import unwrap
from typing import Any

from torch import nn

from shardwise.families.proven import is_proven, with_release
from shardwise.families.towers import VISION_CONFIG, tower_of
from shardwise.ops.logits import LogitTransform

CHUNKED = "chunked_attention"
"""Type of layers in which tokens see only those of their own chunk of attention_chunk_size tokens (Llama 4)."""
INDEXED = "indexed_attention"
"""Type of layers in which an indexer chooses the keys that a token sees (DeepSeek-V3.2)."""
LAYER_TYPES = {"full_attention", "sliding_attention", CHUNKED, INDEXED}
MIXER_TYPES = {"linear_attention", "conv"}
"""Types of layers with a sequence mixer instead of attention; transformers calls a layer with both "hybrid"."""
FEED_FORWARD_TYPES = {"mlp", "moe"}
"""Types of layers that have only a feed-forward part (Nemotron-H)."""

UNREGISTERED_ATTENTION = "does not support attention implementations that are registered with transformers"
DROPS_KEYWORDS = "does not pass keyword arguments on to its attention"
_LAYERS_THAT_DROP_KEYWORDS = {"NemotronDecoderLayer", "StableLmDecoderLayer"}
"""Classes of layers that do not pass on keywords which their attention takes."""


def unsupported_reason(model: Any, *, has_projection: bool = True) -> str | None:
    """Says why a model (transformers' PreTrainedModel) is not supported, judging by its class and config.

    They show only what a family declares. Whether every layer really calls the registered attention shows in the
    forward pass, where engine and rollout count the calls.

    Args:
        has_projection: False for a model with a value head, which needs no output projection.
    Returns:
        A sentence that names the model and what is not supported about it, or None.
    """
    if (reason := _reason(model, has_projection)) is None:
        return None
    return with_release(f"{type(model).__name__} (model_type {model.config.model_type}) is not supported: it {reason}")


def _reason(model: Any, has_projection: bool) -> str | None:
    config = model.config.get_text_config()
    has_mixers = bool(sequence_mixers(model))
    supported = LAYER_TYPES | FEED_FORWARD_TYPES | (MIXER_TYPES | {"hybrid"} if has_mixers else set())
    other_layers = sorted(set(getattr(config, "layer_types", None) or ()) - supported)
    parameters = inspect.signature(backbone(model).forward).parameters
    head = model.get_output_embeddings()
    if model._is_stateful and not has_mixers:
        return "carries a recurrent state from token to token"
    if other_layers:
        return f"has layers of type {', '.join(other_layers)}; supported are {', '.join(sorted(supported))}"
    if INDEXED in (getattr(config, "layer_types", None) or ()) and not indexers(model):
        return f"has layers of type {INDEXED} whose indexer is of another kind than DeepSeek-V3.2's"
    if config.is_encoder_decoder:
        return "is an encoder-decoder model"
    if has_projection and head is None:
        return "has no output projection"
    if getattr(head, "bias", None) is not None:
        return "has a bias on its output projection"
    if has_projection and type(head) is not nn.Linear:
        return f"has an output projection of a class of its own ({type(head).__name__})"
    if has_projection and (key := _ignored_transform(model)):
        return f"sets text_config.{key}, which its class does not apply"
    if crossed := getattr(config, "cross_attention_layers", None):
        return f"has layers that see nothing but images (cross_attention_layers={list(crossed)})"
    if not decoder_layers(model):
        return f"has no list of num_hidden_layers={config.num_hidden_layers} decoder layers"
    if shared := _shared_within_layers(model):
        return f"shares weights between its layers ({shared})"
    if any(getattr(part, "is_causal", True) is False for layer in decoder_layers(model) for part in layer.modules()):
        return "has attention that is not causal"
    if "position_ids" not in parameters:
        return "takes no position_ids"
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        return DROPS_KEYWORDS
    return None


def _shared_within_layers(model: Any) -> str | None:
    """Returns "COPY = ORIGINAL" of a weight that parts of a model share without the whole model saying so, as blocks of
    Zamba2 do that stand in several layers. Its units would each hold one of their own."""
    told = model.get_expanded_tied_weights_keys().keys()
    shared = model.get_expanded_tied_weights_keys(all_submodels=True)
    return next((f"{copy} = {original}" for copy, original in shared.items() if copy not in told), None)


def _ignored_transform(model: Any) -> str | None:
    """Returns the config key of a logit transform that the language model applies and the class of the whole checkpoint
    does not: that class has an output projection of its own, and some omit what follows it (Gemma 3, Aya Vision).
    That its forward names the key stands for that it applies it."""
    config = model.config.get_text_config()
    if config is model.config:
        return None
    applied = unwrap(type(model).forward).__code__.co_names
    return next((key for key in LogitTransform.keys_of(config) if key not in applied), None)


def sequence_mixers(model: Any) -> dict[str, nn.Module]:
    """Returns the parts of decoder layers, by path, that carry a state from token to token: those with their own
    convolution over tokens, which linear attention, state spaces and short convolutions all begin with. Parts that do
    not accept the keywords that a layer passes on are left out."""
    path_of = {id(module): path for path, module in model.named_modules()}
    return {
        path_of[id(part)]: part
        for layer in decoder_layers(model)
        for part in layer.modules()
        if any(isinstance(child, nn.Conv1d) for child in part.children()) and _takes_layout(part)
    }


def indexers(model: Any) -> dict[str, nn.Module]:
    """Returns the parts of decoder layers, by path, that choose the keys that an attention sees."""
    path_of = {id(module): path for path, module in model.named_modules()}
    asked = {"hidden_states", "attention_mask", "cache"}
    return {
        path_of[id(part)]: part
        for layer in decoder_layers(model)
        for part in layer.modules()
        if hasattr(part, "index_topk") and asked <= inspect.signature(part.forward).parameters.keys()
    }


def _takes_layout(mixer: nn.Module) -> bool:
    parameters = inspect.signature(mixer.forward).parameters
    return "hidden_states" in parameters and any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def hand_on_keywords(model: Any) -> None:
    """Changes a model in place so that keywords given to every layer also reach the attention of layers that do not
    pass them on (Nemotron, StableLM)."""
    for layer in decoder_layers(model):
        if type(layer).__name__ in _LAYERS_THAT_DROP_KEYWORDS:
            _hand_on_keywords(layer)


def _hand_on_keywords(layer: Any) -> None:
    used = inspect.signature(layer.forward).parameters
    others: dict[str, Any] = {}

    def keep(_layer: nn.Module, _args: Any, keywords: dict[str, Any]) -> None:
        others.update({name: value for name, value in keywords.items() if name not in used})

    def add(_attention: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, keywords | others

    def forget(*_: Any) -> None:
        others.clear()

    layer.register_forward_pre_hook(keep, with_kwargs=True)
    layer.self_attn.register_forward_pre_hook(add, with_kwargs=True)
    layer.register_forward_hook(forget, always_call=True)


def chunk_size(attention: nn.Module) -> int | None:
    """Returns the tokens per chunk, None if the layer of this attention module does not have chunked attention."""
    config: Any = getattr(attention, "config", None)
    if CHUNKED not in (getattr(config, "layer_types", None) or ()):
        return None
    return config.attention_chunk_size if config.layer_types[attention.layer_idx] == CHUNKED else None


def packed_tokens_limit(config: Any) -> int | None:
    """Returns how many tokens a pack may have for a decoder with this config, None without a limit. Llama 4 scales
    queries by their place in the batch, which is not their place in the sequence; up to this limit the scale is 1."""
    return config.floor_scale - 1 if getattr(config, "attn_temperature_tuning", False) else None


def attention_layers(config: Any) -> list[int]:
    """Returns the numbers of the decoder layers that have attention, with or without a sequence mixer beside it.
    `config` is the language model's."""
    layer_types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    return [layer for layer, layer_type in enumerate(layer_types) if layer_type not in MIXER_TYPES | FEED_FORWARD_TYPES]


def backbone(model: Any) -> Any:
    """Returns the model without its head. Some models (Llama 4's language model) call it `model` although transformers
    looks for another name, and are their own `base_model`."""
    return getattr(model, "model", model) if model.base_model is model else model.base_model


def decoder_layers(model: Any) -> list[nn.Module]:
    """Returns the layers of a causal language model: the outermost ModuleList of its decoder that is as long as the
    config says (lists of experts lie inside the layers). Empty if there is none.

    `_no_split_modules` would not do: some families leave it empty, and others name parts of a layer in it.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    lists = (module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList))
    return next((list(modules) for modules in lists if len(modules) == num_layers), [])


_FINDS_POSITIONS = "get_rope_index"
"""The method of a model that computes positions for the tokens of an image (M-RoPE)."""
FOR_IMAGES_ALONE = {"vision_moe"}
"""Parts of decoder layers that no text token reaches: experts of ERNIE 4.5 VL."""
_FOR_SOUNDS = {"audio_tower", "embed_audio"}
"""Parts of a model beside its language model that no image reaches either (Gemma 4)."""


def language_model_class(config: Any, causal: Any, with_images: Any, bare: Any) -> Any:
    """Chooses, of two auto classes of transformers, the one that builds a model with a language model's head from this
    config.

    If both do (Qwen 3.5), a checkpoint that declares a vision tower keeps it. Llama 4's does not: transformers has the
    whole model only with a head, and that class computes no text without images.

    Args:
        causal, with_images: the auto classes of language models, and of language models that also take images.
        bare: the auto class of models without a head.
    """
    kind = type(config)
    if kind not in causal._model_mapping:
        return with_images
    seeing = with_images._model_mapping.get(kind, None)
    has_tower = seeing is not None and seeing.__name__ in (config.architectures or ())
    return with_images if has_tower and bare._model_mapping[kind] is not seeing else causal


def wrapper_reason(config: Any, model_class: Any) -> str | None:
    """Says why a checkpoint is refused that has other models around its language model, when only the language model
    would be built.

    Args:
        config: the checkpoint's.
        model_class: the auto class that `language_model_class` chose for it.
    Returns:
        A sentence that names the family and what to do. None if the whole checkpoint is built or the family is proven.
    """
    text, built = config.get_text_config(), model_class._model_mapping.get(type(config), None)
    if built is None or isinstance(config, built.config_class) or not isinstance(text, built.config_class):
        return None
    if is_proven(config.model_type, "packing"):
        return None
    return with_release(
        f"{config.model_type} is not supported: it has other models around the language model {text.model_type}, which "
        "alone is trained and sampled from; write that to a folder of its own with transformers, "
        "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW), copy the tokenizer's files there and give "
        "NEW"
    )


def families_of(config: Any, *auto_classes: Any) -> list[str]:
    """Returns the families for which everything asked of a checkpoint has to be proven: its own and, if the language
    model inside also exists as a model by itself, that model's.

    Args:
        auto_classes: transformers' auto classes that build language models.
    """
    text = config.get_text_config()
    is_another = text is not config and any(type(text) in auto._model_mapping for auto in auto_classes)
    return [config.model_type, *([text.model_type] if is_another else [])]


def attention_of(config: Any, implementation: str) -> dict[str, str]:
    """Returns the `attn_implementation` to load a model with, by the name of a sub-config, so that its language model
    computes attention by `implementation`. A vision tower sees images one by one and needs neither packs nor a cache.
    """
    vision = {VISION_CONFIG: "sdpa"} if VISION_CONFIG in config.sub_configs else {}
    return dict.fromkeys(("", *config.sub_configs), implementation) | vision


def takes_images(model: Any) -> bool:
    """Whether training knows how to show images to this model."""
    return vision_reason(model) is None


def vision_reason(model: Any) -> str | None:
    """Says why images cannot be shown to a model; None if they can. Supported are models that take what their tower
    made of images and whose positions are counted, or found by their own method; others have another kind of
    placeholders, masks or positions."""
    whole = backbone(model)
    reasons = [] if hasattr(whole, "get_image_features") else ["it has no get_image_features"]
    if _brings_mask_of_images(model) and not sees_images_both_ways(model):
        reasons.append("where there are images tokens see others behind them, in a way of its own")
    if tower_of(model.config) is None:
        reasons.append("it has no vision tower of a kind that images are prepared for")
    taken = {"forward": "mm_encoder_outputs", _FINDS_POSITIONS: "mm_token_type_ids"}
    reasons += [
        f"it has no {argument} among what {method} takes"
        for method, argument in taken.items()
        if hasattr(whole, method) and argument not in inspect.signature(getattr(whole, method)).parameters
    ]
    if not reasons:
        return None
    return with_release(
        f"{type(model).__name__} (model_type {model.config.model_type}) is not supported as a model that sees images: "
        f"{reasons[0]}"
    )


def sees_images_both_ways(model: Any) -> bool:
    """Whether the tokens of an image see each other both ways, which attention is told by their blocks: in Gemma 3 and
    in those of Gemma 4 whose config says so. See `shows_blocks`."""
    family = model.config.model_type
    return family == "gemma3" or (family == "gemma4" and _brings_mask_of_images(model))


def _brings_mask_of_images(model: Any) -> bool:
    """Whether attention is not causal where there are images (Gemma 3 and 4, PaliGemma)."""
    key = getattr(model.config.get_text_config(), "use_bidirectional_attention", None)
    return key == "vision" or "token_type_ids" in inspect.signature(backbone(model).forward).parameters


def finds_positions(model: Any) -> bool:
    """Whether the tokens of images are in time, height and width where a method of this model says (Qwen, GLM).
    Elsewhere they are counted like words."""
    return hasattr(backbone(model), _FINDS_POSITIONS)


def unreached_modules(model: Any) -> list[str]:
    """Returns the paths of the modules that no gradient reaches: indexers, `unseen_modules`, of a model that is shown
    images what is there for sounds, and what its vision tower computes behind the hidden states that are read."""
    unheard = [path for path in _beside_language_model(model) if _is_for_sounds(path)] if takes_images(model) else []
    return [*indexers(model), *unseen_modules(model), *unheard, *_unread(model)]


def unseen_modules(model: Any) -> list[str]:
    """Returns the paths of the modules that text does not reach, for a model that also sees or hears but is trained on
    text alone: what lies beside its language model, and what its layers have for images only. Empty for a model that
    training shows images."""
    beside = _beside_language_model(model)
    if not beside or takes_images(model):
        return []
    inside = [path for path, _ in model.named_modules() if path.rpartition(".")[2] in FOR_IMAGES_ALONE]
    return [*inside, *beside]


def vision_paths(model: Any) -> list[str]:
    """Returns the paths of the vision tower and of what follows it, in the order of the forward pass; empty for a model
    that takes no images."""
    return [path for path in _beside_language_model(model) if not _is_for_sounds(path)] if takes_images(model) else []


def _is_for_sounds(path: str) -> bool:
    return path.rpartition(".")[2] in _FOR_SOUNDS


def _unread(model: Any) -> list[str]:
    """Returns the paths of what a vision tower that is shown images computes behind the hidden states that its model
    reads: those of an inner layer (LLaVA), or the last, where a pooling head follows (Gemma 3, LFM2-VL)."""
    read, paths = getattr(model.config, "vision_feature_layer", None), vision_paths(model)
    if not paths:
        return []
    tower = model.get_submodule(paths[0])
    if read is None:
        return [f"{paths[0]}.head"] if getattr(tower, "use_head", False) else []
    if read == -1 and tower.config.model_type == "internvl_vision":  # its last hidden states, norm included
        return []
    num_layers = tower.config.num_hidden_layers
    lists = ((path, part) for path, part in tower.named_modules() if isinstance(part, nn.ModuleList))
    layers = next(path for path, part in lists if len(part) == num_layers)
    num_read = max(layer % (num_layers + 1) for layer in ([read] if isinstance(read, int) else read))
    names = [name for name, child in tower.named_children() if any(True for _ in child.parameters())]
    behind = names[names.index(layers.partition(".")[0]) + 1 :]
    return [f"{paths[0]}.{path}" for path in (*(f"{layers}.{n}" for n in range(num_read, num_layers)), *behind)]


def _beside_language_model(model: Any) -> list[str]:
    """Returns the paths of the modules beside the language model of a whole checkpoint; empty for one by itself."""
    whole, decoder = backbone(model), model.get_decoder()
    holders = {id(child) for child in whole.children() if any(part is decoder for part in child.modules())}
    if not holders:
        return []
    beside = {id(child) for child in whole.children() if any(True for _ in child.parameters())} - holders
    return [path for path, part in model.named_modules() if id(part) in beside]

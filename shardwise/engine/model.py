"""From a model folder to a sharded model. The order of the steps in `build_unloaded` is the documentation."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from shardwise.config import ConfigError, EngineConfig, LayoutConfig, ModelError
from shardwise.engine.activations import checkpoint_layers
from shardwise.engine.agreement import raised_on_every_rank
from shardwise.engine.attention import PACKED_ATTENTION, AttentionBackend, PackedCall, register_packed_attention
from shardwise.engine.compile import compile_layers, use_liger_kernels
from shardwise.engine.files.initial_weights import InitialWeights
from shardwise.engine.files.model_folder import take_generation_config
from shardwise.engine.freeze import freeze, require_routers
from shardwise.engine.heads import (
    HeadName,
    LogprobHead,
    ValueHead,
    Wanted,
    fresh_head,
    make_head,
    value_projection_name,
)
from shardwise.engine.mesh import EngineMesh
from shardwise.engine.mixers import PackedMixer, pack_mixers
from shardwise.engine.model_classes import kind_of, language_model_of, model_from_config
from shardwise.engine.moe.expert_guard import expert_guards
from shardwise.engine.moe.expert_loads import ExpertLoads
from shardwise.engine.moe.expert_parallel import require_shareable, spread_experts, spread_paths
from shardwise.engine.moe.router_replay import RouterReplay
from shardwise.engine.names import is_within
from shardwise.engine.precision import Precision
from shardwise.engine.tiled_mlp import mlp_paths, tile_mlps
from shardwise.engine.token_slice import TokenSlice
from shardwise.engine.ulysses import Ulysses, check_heads
from shardwise.engine.vision import VisionTower
from shardwise.engine.wrap import MIN_TORCH, REDUCES_UNUSED, Units
from shardwise.families import (
    UNREGISTERED_ATTENTION,
    attention_layers,
    attention_of,
    avoid_unaligned,
    backbone,
    defer_choices,
    families_of,
    hand_on_keywords,
    indexers,
    is_proven,
    packed_tokens_limit,
    rotary_limit,
    routers_of,
    sequence_mixers,
    unproven_reason,
    unreached_modules,
    unseen_modules,
    unsupported_reason,
    wrapper_reason,
)
from shardwise.model_config import blaming_config, read_model_config, require_generates, require_no_critic


class ScoringModel(nn.Module):
    """A transformers model that returns what its head says about the scored tokens, instead of logits.

    It is the root FSDP unit: whatever the root owns (embedding, final norm, output projection) is gathered while this
    forward runs, so the projection can be applied in chunks without a call to the model's own head.
    """

    def __init__(self, hf_model: PreTrainedModel, head: LogprobHead | ValueHead) -> None:
        super().__init__()
        self.hf_model = hf_model
        self.head = head
        config = hf_model.config.get_text_config()
        self._num_attentions = len(attention_layers(config))
        self._num_mixers = sum(isinstance(part, PackedMixer) for part in hf_model.modules())
        self._rotary_limit = rotary_limit(config)
        self._max_tokens = packed_tokens_limit(config)
        self.tower = VisionTower.of(hf_model)

    def forward(self, tokens: TokenSlice, backend: AttentionBackend, wanted: Wanted) -> dict[str, Tensor]:
        """Computes this rank's tokens; returns what the head gives for the scored ones among them, by name.

        Raises:
            ModelError: a sequence or the pack is too long, or not every layer computed its attention through the
                packed one.
        """
        if self._rotary_limit and (reason := self._rotary_limit.refusal(tokens.layout.max_length)):
            raise ModelError(f"{type(self.hf_model).__name__}: {reason}")
        if self._max_tokens is not None and tokens.layout.num_tokens > self._max_tokens:
            raise ModelError(
                f"{type(self.hf_model).__name__}: a pack of {tokens.layout.num_tokens} tokens is longer than the "
                f"{self._max_tokens} up to which attn_temperature_tuning does not depend on a token's place in it; "
                "lower engine.max_tokens_per_micro_batch"
            )
        call = PackedCall(tokens.layout, backend)
        given: dict[str, Any] = {"input_ids": tokens.input_ids[None]}
        if self.tower is not None and tokens.images is not None:
            given = self.tower.look(backbone(self.hf_model), tokens.input_ids[None], tokens.images, backend.ulysses)
        hidden = backbone(self.hf_model)(
            **given,
            position_ids=tokens.position_ids.unsqueeze(-2),
            use_cache=False,
            packed=call,
        ).last_hidden_state[0]
        if call.num_attention_calls != self._num_attentions:
            raise ModelError(
                f"{type(self.hf_model).__name__} is not supported: its {self._num_attentions} layers called the packed "
                f"attention {call.num_attention_calls} times instead of once each"
            )
        assert call.num_mixer_calls == self._num_mixers, "a layer passed its sequence mixer by"
        found: dict[str, Tensor] = self.head(hidden, tokens.states, tokens.targets, wanted)
        return found


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """A sharded model, and what an engine needs to run it."""

    model: ScoringModel
    units: list[FSDPModule]
    """The FSDP units; the root is the last."""
    backend: AttentionBackend
    expert_loads: ExpertLoads
    replay: RouterReplay


def build_sharded(
    folder: Path,
    config: LayoutConfig,
    mesh: EngineMesh,
    *,
    device: torch.device,
    head_name: HeadName = "logprobs",
    pad_token_id: int | None = None,
    seed: int = 0,
    require_finite: bool = True,
) -> tuple[ShardedModel, InitialWeights]:
    """Builds and shards a model, trained if the config is an EngineConfig, else frozen. Its parameters have memory, and
    nothing in it before the weights that come with it are loaded.

    Args:
        pad_token_id: what the sequences that a reward model scores are padded with; None: as config.json says.
        seed: of a new adapter.
        require_finite: False also loads weights and adapters that hold NaN or infinities.
    Raises:
        ModelError: on every rank: not a model of this kind. ConfigError: on every rank: an option that does not fit the
            model or the layout, or needs a package that is missing.
    """
    with raised_on_every_rank(ModelError, ConfigError):
        sharded = build_unloaded(folder, config, mesh, device=device, head_name=head_name, pad_token_id=pad_token_id)
    hf_model = sharded.model.hf_model
    fresh = fresh_head(hf_model, head_name)
    if fresh is not None and not isinstance(config, EngineConfig):
        fresh = {}  # a frozen head would stay as random as it starts
    initial = InitialWeights(
        model=hf_model,
        folder=folder,
        fresh=fresh,
        lora=config.lora if isinstance(config, EngineConfig) else None,
        seed=seed,
        require_finite=require_finite,
    )
    return sharded, initial


def build_unloaded(
    folder: Path,
    config: LayoutConfig,
    mesh: EngineMesh,
    *,
    device: torch.device,
    head_name: HeadName = "logprobs",
    pad_token_id: int | None = None,
) -> ShardedModel:
    """Builds the model without loading weights. Holds no collectives, and raises on this rank only."""
    hf_model = build_on_meta(
        folder,
        head_name,
        experts_implementation=config.experts_implementation,
        is_saved_again=isinstance(config, EngineConfig),
    )
    if config.experts_implementation is None:  # before it is known which module computes in which of these
        dtypes = {config.param_dtype, *(own.param_dtype for own in config.module_precision if own.param_dtype)}
        avoid_unaligned(hf_model, min((getattr(torch, name) for name in dtypes), key=lambda dtype: dtype.itemsize))
    if pad_token_id is not None:
        hf_model.config.get_text_config().pad_token_id = pad_token_id
    ulysses = None
    if mesh.sp_group is not None:
        _refuse_split_sequences(folder, hf_model, mesh.dims.sp)
        num_heads = hf_model.config.get_text_config().num_attention_heads
        check_heads(num_heads, mesh.dims.sp, mesh.dims.dp_shard * mesh.dims.sp)
        ulysses = Ulysses(mesh.sp_group)
    shared = [] if mesh.ep is None else spread_paths(hf_model, mesh.dims.ep)
    backend = AttentionBackend(config.attention_implementation, ulysses)
    _choose_trained(hf_model, config, head_name)
    require_shareable(hf_model, shared, mesh.dims.ep)
    families = families_of(hf_model.config, AutoModelForCausalLM, AutoModelForImageTextToText)
    _require_proven(folder, families, config, mesh, head_name)  # what cannot be says so before
    expert_loads, replay = _watch_routers(hf_model, config, ulysses)
    precision = Precision(hf_model, config)
    precision.cast_parameters(hf_model)
    units = Units(hf_model, config, precision, shared)  # paths as they are before anything is wrapped
    guards = expert_guards(hf_model, units, is_patched=config.apply_expert_patch)
    mixers = sequence_mixers(hf_model)
    units.require_whole([*mixers, *indexers(hf_model)], "packing")
    pack_mixers(hf_model, mixers)
    defer_choices(hf_model)
    hand_on_keywords(hf_model)
    if config.use_liger_kernels:
        use_liger_kernels(hf_model, device)
    if config.apply_tiled_mlp:
        paths = mlp_paths(hf_model, units.reached)
        units.require_whole(paths, "engine.apply_tiled_mlp=true")
        tile_mlps(hf_model, paths, config.tiled_num_shards)
    if mesh.ep is not None:
        spread_experts(hf_model, shared, mesh.ep)
    if config.compile_layers:
        # Blocks of a tower loop over images, as many as there are: each number of them would be compiled anew.
        compile_layers(hf_model, units.decoder_layers)
    if isinstance(config, EngineConfig):
        checkpoint_layers(hf_model, units.layers, config)  # inside the unit: recomputing finds the weights gathered
    model = ScoringModel(hf_model, make_head(hf_model, head_name))
    sharded = units.shard(model, hf_model, model.head, mesh)
    for guard in guards:
        guard.attach()
    materialize(model, device, params_on_host=config.offload_policy)
    return ShardedModel(model, sharded, backend, expert_loads, replay)


def _require_proven(
    folder: Path, families: Sequence[str], config: LayoutConfig, mesh: EngineMesh, head_name: HeadName
) -> None:
    asked = {
        "packing": True,
        "fsdp2": mesh.fsdp.size() > 1,
        "ulysses": mesh.sp_group is not None,
        "expert_parallel": mesh.ep is not None,
        head_name: head_name != "logprobs",
    }
    if isinstance(config, EngineConfig):
        lora = config.lora
        asked |= {
            "export": True,
            "checkpointing_full": config.activation_checkpointing != "none" and not config.checkpoints_by_operation,
            "checkpointing_selective": config.checkpoints_by_operation,
            "lora": lora is not None,
            "lora_experts": lora is not None and bool(lora.target_parameters),
            "qlora": lora is not None and lora.quantize_base is not None,
        }
    reason = unproven_reason(families, [check for check in asked if asked[check]], "engine.allow_unproven")
    if reason is None:
        return
    if not config.allow_unproven:
        raise ConfigError(f"{folder}: {reason}")
    is_sharding_proven = not asked["fsdp2"] or all(is_proven(family, "fsdp2") for family in families)
    if isinstance(config, EngineConfig) and not is_sharding_proven and not REDUCES_UNUSED:
        raise ConfigError(
            f"{folder}: engine.allow_unproven=true trains on several ranks from torch {MIN_TORCH} on, and this is "
            f"{torch.__version__}: gradients would be wrong wherever ranks reach other parameters of the model, as "
            "experts that are modules of their own; install a newer torch, or train on one rank"
        )


def _refuse_split_sequences(folder: Path, model: PreTrainedModel, ulysses_size: int) -> None:
    for parts, why in (
        (sequence_mixers(model), "it carries a recurrent state from token to token"),
        (indexers(model), "its indexers choose among the keys of all tokens"),
    ):
        if parts:
            kinds = ", ".join(sorted({type(part).__name__ for part in parts.values()}))
            raise ModelError(
                f"{folder}: engine.ulysses_size={ulysses_size} cannot share a sequence of {type(model).__name__} "
                f"(model_type {model.config.model_type}) between ranks: {why} ({kinds}); set it to 1"
            )


def _choose_trained(model: PreTrainedModel, config: LayoutConfig, head_name: HeadName) -> None:
    if not isinstance(config, EngineConfig):
        model.requires_grad_(False)
    elif config.lora is not None:
        from shardwise.engine.lora import inject_lora  # importing peft takes seconds

        inject_lora(model, config.lora, head_name, left_out=config.freeze_module_prefix)
    else:
        freeze(model, [*config.freeze_module_prefix, *unreached_modules(model)], routers=config.freeze_router)


def _watch_routers(
    model: PreTrainedModel, config: LayoutConfig, ulysses: Ulysses | None
) -> tuple[ExpertLoads, RouterReplay]:
    """Puts hooks on the routers of a trained model; for a frozen one both objects are empty."""
    if not isinstance(config, EngineConfig):
        loads = ExpertLoads([], aux_loss_coef=0.0, detail="summary", ulysses=None)
        return loads, RouterReplay([], loads)
    coef, detail = config.router_aux_loss_coef, config.router_metrics
    if coef > 0:
        require_routers(model, f"engine.router_aux_loss_coef={coef}")
    if detail != "summary":
        require_routers(model, f"engine.router_metrics={detail}")
    routers = routers_of(model)
    loads = ExpertLoads(routers, aux_loss_coef=coef, detail=detail, ulysses=ulysses)
    # The hooks of the second are the outer ones: what loads reads is what was replayed.
    return loads, RouterReplay(routers, loads)


def build_on_meta(
    folder: Path,
    head_name: HeadName = "logprobs",
    *,
    experts_implementation: str | None = None,
    is_saved_again: bool = True,
) -> PreTrainedModel:
    """Builds the model in float32, without memory behind its parameters.

    Args:
        is_saved_again: a model that is not needs no generation_config.json.
    Raises:
        ModelError: not a model of this kind, of a family that packed attention cannot compute, or with dropout.
        ConfigError: experts_implementation for a model without fused experts.
    """
    register_packed_attention()
    has_value_head = head_name != "logprobs"
    options: dict[str, Any] = {"num_labels": 1} if has_value_head else {}
    config = read_model_config(folder, **options)
    if not has_value_head:
        require_generates(folder, config)
        if reason := wrapper_reason(config, language_model_of(config)):
            raise ModelError(f"{folder}: {reason}")
    if head_name == "sequence_scores":
        require_no_critic(folder, config)
    _check_groups_of_heads(folder, config)
    with blaming_config(folder, kind_of(head_name)), torch.device("meta"):
        try:
            attention = attention_of(config, PACKED_ATTENTION)
            model = model_from_config(config, head_name, dtype=torch.float32, attn_implementation=attention)
        except KeyError as error:
            if error.args != (PACKED_ATTENTION,):  # some families look the name up in a table of their own
                raise
            raise ModelError(f"{folder}: {config.model_type} is not supported: it {UNREGISTERED_ATTENTION}") from None
    _make_buffers(model)
    if reason := unsupported_reason(model, has_projection=not has_value_head):
        raise ModelError(f"{folder}: {reason}")
    if has_value_head:
        value_projection_name(model)  # or it is refused
    _refuse_dropout(model)
    if not has_value_head and is_saved_again:
        take_generation_config(model, folder)
    if experts_implementation is not None:
        _set_experts(model, experts_implementation)
    return model


def _make_buffers(model: PreTrainedModel) -> None:
    """Makes buffers of what a class builds as parameters without gradients, the biases of routers: FSDP would cast them
    with the weights around them, and what they choose in float32 is what the rollout engine chooses."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, parameter.data)


def _check_groups_of_heads(folder: Path, config: PreTrainedConfig) -> None:
    """Checks that every head of keys and values has the same number of query heads."""
    text = config.get_text_config()
    heads, kv_heads = (getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(kv_heads, int) and (kv_heads < 1 or heads < 1 or heads % kv_heads):
        raise ModelError(
            f"{folder}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}; correct its "
            "config.json"
        )


def _set_experts(model: PreTrainedModel, implementation: str) -> None:
    """Sets it in the outermost parts that take it. transformers takes some names for models without experts too, and
    does nothing, and refuses others for models whose language model alone has them."""
    taking: dict[str, PreTrainedModel] = {}
    for path, part in model.named_modules():
        is_inside = any(is_within(path, outer) or not outer for outer in taking)
        if isinstance(part, PreTrainedModel) and part._can_set_experts_implementation() and not is_inside:
            taking[path] = part
    if not taking:
        raise ConfigError(
            f"engine.experts_implementation={implementation} has no effect on {type(model).__name__}, which has no "
            "experts that can be computed in several ways; remove it"
        )
    for part in taking.values():
        part.set_experts_implementation(implementation)


def _refuse_dropout(model: PreTrainedModel) -> None:
    """With dropout two passes over the same tokens would give two sets of logprobs, and their ratio would be noise."""
    parts, unseen = model.base_model.named_modules(prefix=model.base_model_prefix), unseen_modules(model)
    active = [
        f"{name}={part.p}"
        for name, part in parts
        if isinstance(part, nn.Dropout) and part.p and not any(is_within(name, path) for path in unseen)
    ]
    attention_dropout = getattr(model.config.get_text_config(), "attention_dropout", 0.0)
    if attention_dropout:
        active.insert(0, f"attention_dropout={attention_dropout}")
    if active:
        raise ModelError(
            f"{type(model).__name__} has dropout, which is not supported ({', '.join(active[:3])} is active); "
            "set it to 0 in config.json"
        )


def materialize(model: ScoringModel, device: torch.device, *, params_on_host: bool) -> None:
    """Allocates every parameter, and computes the buffers that no checkpoint holds (rotary frequencies, scales of
    embeddings)."""
    model.to_empty(device="cpu" if params_on_host else device)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers skips marked tensors
    for module in model.hf_model.modules():
        if next(module.buffers(), None) is None:
            module._is_hf_initialized = True  # and modules, of which some compute with parameters that are sharded
    model.hf_model.initialize_weights()
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)

"""The model, how it is sharded, and how it is optimized."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, StrictBool, StrictInt, field_validator, model_validator

from shardwise.config.base import Config, OneOrMore, PathText, WholeDeadline

DtypeName = Literal["float32", "bfloat16", "float16"]


class ModelConfig(Config):
    """Which model is trained, and the tokenizer that belongs to it."""

    path: PathText
    """A folder in the Hugging Face layout (config.json, *.safetensors, tokenizer), or the name of one on the hub. The
    weights are in model.safetensors; without it in the files that model.safetensors.index.json names; without that in
    all *.safetensors."""
    tokenizer_path: PathText | None = None
    """A tokenizer folder or hub name; null takes the one beside the model."""
    chat_template: PathText | None = None
    """A Jinja file that replaces the tokenizer's own chat template."""


class ComputeConfig(Config):
    """What every command that runs a model needs."""

    param_dtype: DtypeName = "float32"
    """The dtype that layers compute in. Between steps, trained weights are kept in engine.master_dtype."""
    collective_timeout_seconds: WholeDeadline = 600
    """A collective that waits longer than this for another rank ends the run with an error."""


class WrapPolicyConfig(Config):
    """Which modules become FSDP units of their own: a unit's weights are gathered together, used, and freed together.

    Whatever no unit takes belongs to the root unit, which stays gathered from the forward to the end of the backward.
    """

    transformer_layer_cls_to_wrap: Annotated[list[str], Field(min_length=1)] | None = None
    """Class names of the modules to wrap, one unit each; null takes the decoder layers, and the vision blocks of models
    that have them. These are also the layers that are checkpointed, compiled, and whose MLPs are tiled."""
    wrap_embeddings: bool = False
    """Make the token embedding a unit: sharded like a layer, at the price of another gather. Not for models whose
    embedding and output projection are one weight."""
    wrap_lm_output: bool = False
    """Make the output projection (or value head) a unit, gathered only while it works. Not for tied weights either."""
    moe_experts: list[str] = Field(default_factory=list)
    """Class names of expert modules (Qwen3MoeExperts) to wrap as units inside their layer."""


class ModulePrecisionConfig(Config):
    """Another precision for one module and everything below it; it becomes an FSDP unit of its own."""

    module: Annotated[str, Field(min_length=1)]
    """The module's name in the model (`model.layers.0.mlp.gate`), or a pattern with `*` for one part of a name
    (`model.layers.*.mlp.gate`). A name that matches nothing is an error."""
    param_dtype: DtypeName | None = None
    """The dtype that the module computes in; null takes engine.param_dtype."""
    cast_forward_inputs: bool = True
    """Cast floating-point inputs to param_dtype; false leaves them as they come."""


class LoraConfig(Config):
    """Low-rank adapters (peft). The base is frozen in param_dtype; the adapters are float32 masters."""

    rank: PositiveInt = 16
    """The inner dimension of each adapter."""
    alpha: PositiveFloat = 32.0
    """The adapter's output is scaled by alpha / rank (rsLoRA: alpha / sqrt(rank))."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input, in training passes only; reinforcement learning needs 0. It is drawn for each
    rank and micro-batch, so results then depend on the layout."""
    target_modules: str | list[str] = "all-linear"
    """Names (or endings of names) of the linear layers that get an adapter. all-linear is every one except the head
    (where experts are fused, also except dense layers whose names peft takes for parts of experts; and except out_proj
    of falcon_h1, which peft refuses). An empty list, for use with target_parameters, is none."""
    target_parameters: list[str] = Field(default_factory=list)
    """Names (or endings of names) of fused experts that get an adapter for every expert: parameters with three
    dimensions, such as experts.gate_up_proj and experts.down_proj. Needs dropout=0 and use_dora=false."""
    modules_to_save: list[str] = Field(default_factory=list)
    """Modules trained in full beside the adapters, and saved with them."""
    use_dora: bool = False
    """Weight-decomposed adapters (DoRA): a trained magnitude for each output."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank."""
    quantize_base: Literal["nf4"] | None = None
    """nf4: the base's linear layers, except the head, are kept in 4 bits and computed in param_dtype (QLoRA; needs
    bitsandbytes and torch 2.12). Fused experts and embeddings stay as they are."""
    adapter_path: PathText | None = None
    """A folder with an adapter of this form to continue (`checkpoints/step_N/adapter` of a run); null starts with a
    new one, which changes nothing at first."""
    save_merged: bool = True
    """Checkpoints hold hf/, the merged model, beside adapter/; false writes the adapter only."""

    @model_validator(mode="after")
    def _experts_have_plain_adapters(self) -> Self:
        """Refuses dropout and DoRA on fused experts: their adapters are added to the weights, so they have no input of
        their own to drop from."""
        given = {"use_dora=true": self.use_dora, f"dropout={self.dropout}": self.dropout > 0}
        for key in [key for key, is_given in given.items() if is_given and self.target_parameters]:
            raise ValueError(
                f"target_parameters={self.target_parameters} with {key}: peft has neither DoRA nor dropout for "
                "adapters of fused experts; remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _magnitudes_are_of_a_whole_base(self) -> Self:
        if self.use_dora and self.quantize_base is not None:
            raise ValueError(
                f"use_dora=true with quantize_base={self.quantize_base}: DoRA needs the norms of the base's rows in "
                "every forward pass, and the base is packed; set use_dora=false, or leave quantize_base out"
            )
        return self


class LayoutConfig(ComputeConfig):
    """How one model is spread over the ranks and computed, trained or frozen."""

    fsdp_size: PositiveInt | None = None
    """Ranks that share one copy of the model; null shards over all ranks. Smaller than the world size: HSDP, with
    world_size / fsdp_size replicas; 1 is plain replication."""
    ulysses_size: PositiveInt = 1
    """Ranks that share one sequence (Ulysses sequence parallelism). Divides fsdp_size and the attention heads."""
    ep_size: PositiveInt = 1
    """Ranks that share the experts of a mixture of experts (expert parallelism): each computes its part of them for the
    tokens of all these ranks, which travel there and back. Divides fsdp_size and the number of experts."""
    reshard_after_forward: StrictBool | StrictInt = True
    """true frees a layer's gathered weights after its forward and gathers them again in backward; false keeps them (no
    second gather, one more copy of the weights in memory); a number keeps them sharded over this many ranks."""
    forward_prefetch: Annotated[int, Field(ge=0)] = 0
    """How many layers' weights are gathered ahead of their forward, fewer than the model has; 0 leaves it to FSDP."""
    offload_policy: bool = False
    """Keep sharded weights, gradients and optimizer states in host memory; layers are copied to the device one by one
    (FSDP's CPUOffloadPolicy). The optimizer then steps on the CPU."""
    param_offload: bool = False
    """In reinforcement learning, move the sharded weights off the device while other engines work."""
    wrap_policy: WrapPolicyConfig = WrapPolicyConfig.defaults()
    """Which modules are FSDP units of their own."""
    module_precision: list[ModulePrecisionConfig] = Field(default_factory=list)
    """Modules that compute in another dtype than param_dtype."""
    attention_implementation: Literal["auto", "loop", "varlen", "flash_attention_2", "flash_attention_3"] = "auto"
    """How attention over packed sequences is computed. auto: varlen (torch's own FlashAttention) on CUDA in half
    precision, else loop (scaled dot product attention, sequence by sequence). flash_attention_2 and 3 need the packages
    flash-attn and flash-attn-3."""
    experts_implementation: Literal["grouped_mm", "batched_mm", "eager"] | None = None
    """How fused experts are computed; null leaves the choice to transformers, or is eager where grouped_mm cannot read
    their rows. Only for mixture-of-experts models."""
    apply_expert_patch: bool = False
    """Call experts even if no token of the rank chose them, with no tokens, so that collectives stay in step. Experts
    that are modules and FSDP units of their own (wrap_policy.moe_experts, module_precision) need it. For other experts,
    and for fused ones, which all mixtures of experts in transformers 5 except encoder-decoders have, it is accepted and
    changes nothing."""
    apply_tiled_mlp: bool = False
    """Compute every MLP in slices of the sequence, and again in backward, so that its inner activations exist for only
    one slice at a time."""
    tiled_num_shards: Annotated[int, Field(ge=2)] | None = None
    """The number of slices of a tiled MLP; null takes 4. A sequence of fewer tokens has fewer."""
    compile_layers: bool = False
    """torch.compile every decoder layer (attention itself stays as it is). Slow first steps, faster later ones."""
    use_liger_kernels: bool = False
    """Use the Triton kernels of the package liger-kernel for norms, rotary embedding and SwiGLU; CUDA only. The package
    swaps them into transformers' module of the family, so engines of the same family in the same process compute with
    them too."""
    allow_unproven: bool = False
    """Allow a model even if docs/models.md does not list its family as proven for what is asked of it. What is known to
    be computed wrong stays refused."""
    max_tokens_per_micro_batch: PositiveInt = 4096
    """The hard cap on the tokens of one packed micro-batch on one data-parallel rank."""

    @field_validator("reshard_after_forward", mode="before")
    @classmethod
    def _reshards_over_some_ranks(cls, value: Any) -> Any:
        if isinstance(value, bool) or (isinstance(value, int) and value >= 2):
            return value
        raise ValueError(f"{value!r} is neither true, false nor a number of ranks from 2 on; use one of them")

    @model_validator(mode="after")
    def _layout_keys_have_effect(self) -> Self:
        if self.tiled_num_shards is not None and not self.apply_tiled_mlp:
            raise ValueError(
                f"tiled_num_shards={self.tiled_num_shards} has no effect without apply_tiled_mlp=true; set it, "
                "or tiled_num_shards=null"
            )
        if self.offload_policy and self.param_offload:
            raise ValueError(
                "offload_policy=true already keeps the weights in host memory, so param_offload=true has no effect; "
                "set one of them to false"
            )
        return self


class FrozenEngineConfig(LayoutConfig):
    """The layout of a model that is not trained: a reference, reward or teacher model. Its weights are in
    param_dtype."""

    strategy: Literal["fsdp2_infer"] = "fsdp2_infer"
    """A frozen engine has no optimizer."""


class EngineConfig(LayoutConfig):
    """The layout of the trained model, and how it is trained."""

    strategy: Literal["fsdp2_train"] = "fsdp2_train"
    """A training engine; frozen ones (fsdp2_infer) have a section of their own."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of trained weights between steps. bfloat16 halves their memory and needs optimizer=adamw, which rounds
    updates stochastically. With reduce_gradients=each_micro_batch, gradients of micro-batches add up in this dtype
    too."""
    reduce_dtype: DtypeName = "float32"
    """The dtype in which gradients are summed over ranks and, with fsdp_size below the world size or
    reduce_gradients=last_micro_batch, over micro-batches too."""
    reduce_gradients: Literal["each_micro_batch", "last_micro_batch"] = "each_micro_batch"
    """When gradients are reduced over ranks. each_micro_batch: between micro-batches a rank holds only its shard of
    them. last_micro_batch: one reduction per optimizer step, but every rank accumulates the whole gradient
    (reduce_dtype bytes times all trained parameters)."""
    backward_prefetch: Annotated[int, Field(ge=0)] = 0
    """How many layers' weights are gathered ahead of their backward, fewer than the model has; 0 leaves it to FSDP (one
    layer)."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Which activations are computed again in backward instead of kept. full: all of a layer except its input.
    selective: the same for every n-th layer (checkpoint_every_layers); with that null, for all layers, except that the
    results of attention and of half of the matrix products are kept (in compiled layers those of attention alone)."""
    checkpoint_every_layers: Annotated[int, Field(ge=2)] | None = None
    """With activation_checkpointing=selective: checkpoint every n-th layer instead of choosing by operation."""
    activation_offload: bool = False
    """Keep the inputs of checkpointed layers in host memory until backward."""
    optimizer_offload: bool = False
    """In reinforcement learning, move the optimizer states off the device while this engine is not trained: while other
    engines work, while it scores, while its weights are synced."""
    freeze_module_prefix: OneOrMore = Field(default_factory=list)
    """Modules that are not trained, by the beginning of their name (`model.embed_tokens`, or several in a list). With
    lora, which freezes the whole base, modules that get no adapter (`model.visual`)."""
    freeze_router: bool = False
    """Do not train the routers of a mixture of experts."""
    router_aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the auxiliary loss that balances the load of experts, sequence by sequence; 0 leaves it out. The value
    in the model's config.json is not used; transformers does not use it either unless output_router_logits is set."""
    router_metrics: Literal["summary", "layers", "experts"] = "summary"
    """How much `train/router/` says about the load of experts: for all layers together, for each layer, or for each
    expert."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights."""

    @property
    def has_float16_gradients(self) -> bool:
        """Whether some gradients are float16, where only a loss scale keeps small numbers from becoming 0."""
        modules = [entry.param_dtype for entry in self.module_precision]
        return "float16" in (self.param_dtype, self.reduce_dtype, *modules)

    @property
    def checkpoints_by_operation(self) -> bool:
        """Whether a checkpointed layer keeps some of its results; otherwise it keeps its input alone."""
        return self.activation_checkpointing == "selective" and self.checkpoint_every_layers is None

    def frozen(self) -> FrozenEngineConfig:
        """Returns the config of a frozen engine on the same layout."""
        return FrozenEngineConfig(**{name: getattr(self, name) for name in LayoutConfig.model_fields})

    def without_adapters(self) -> Self:
        """Returns the config of a training engine on the same layout whose model is trained whole."""
        return self.model_copy(update={"lora": None})

    @model_validator(mode="after")
    def _training_keys_have_effect(self) -> Self:
        if self.checkpoint_every_layers is not None and self.activation_checkpointing != "selective":
            raise ValueError(
                f"checkpoint_every_layers={self.checkpoint_every_layers} has no effect with "
                f"activation_checkpointing={self.activation_checkpointing}; set it to null, or "
                "activation_checkpointing=selective"
            )
        if self.activation_offload and self.activation_checkpointing == "none":
            raise ValueError(
                "activation_offload=true moves the inputs of checkpointed layers, and "
                "activation_checkpointing=none has none; set that to full or selective, or activation_offload=false"
            )
        if self.lora is not None and self.freeze_router:
            raise ValueError(
                "freeze_router=true has no effect with lora, which freezes the whole base; set it to false, and "
                "leave routers out of lora.target_modules"
            )
        if self.lora is not None and self.lora.dropout > 0 and self.apply_tiled_mlp:
            raise ValueError(
                f"lora.dropout={self.lora.dropout} with apply_tiled_mlp=true: a tiled MLP is computed twice and would "
                "drop other elements the second time; set lora.dropout=0"
            )
        if self.lora is not None and self.lora.target_parameters and self.ep_size > 1:
            raise ValueError(
                f"ep_size={self.ep_size} with lora.target_parameters={self.lora.target_parameters}: ranks that share "
                "experts cannot share the adapters of experts; set ep_size=1, or adapt linear layers only"
            )
        if self.lora is not None and self.master_dtype != "float32":
            raise ValueError(
                f"master_dtype={self.master_dtype} with lora: adapters are float32 masters, and the frozen base is "
                "kept in param_dtype anyway; set master_dtype=float32"
            )
        if self.offload_policy and self.optimizer_offload:
            raise ValueError(
                "offload_policy=true already keeps the optimizer states in host memory, so optimizer_offload=true has "
                "no effect; set one of them to false"
            )
        if self.backward_prefetch and self.reshard_after_forward is False:
            raise ValueError(
                f"backward_prefetch={self.backward_prefetch} has no effect with reshard_after_forward=false, which "
                "leaves nothing to gather in backward; set backward_prefetch=0 or reshard_after_forward=true"
            )
        if self.master_dtype == "bfloat16" and self.param_dtype != "bfloat16":
            raise ValueError(
                f"master_dtype=bfloat16 with param_dtype={self.param_dtype} would compute on weights that are already "
                "rounded; set param_dtype=bfloat16 or master_dtype=float32"
            )
        return self


def frozen_layout(given: FrozenEngineConfig | None, trained: EngineConfig) -> FrozenEngineConfig:
    """Returns the layout of a frozen model that works beside a trained one: the given one, or else that of the trained
    one."""
    return trained.frozen() if given is None else given


class OptimizerConfig(Config):
    """The optimizer, its schedule, and the guards around a step."""

    optimizer: Literal["adamw", "adamw_cpu", "adamw_8bit", "muon"] = "adamw"
    """adamw. adamw_cpu: AdamW whose states live in host memory, where the update is computed. adamw_8bit: AdamW with
    quantized states of matrices (needs torchao or bitsandbytes). muon: orthogonalized momentum for the matrices of the
    layers, AdamW for embeddings, output projection, fused experts, norms and biases."""
    adamw_implementation: Literal["fused", "foreach"] = "fused"
    """Which kernel AdamW uses."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-5
    """The peak learning rate."""
    module_learning_rates: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Peak learning rates of modules by the beginning of their name; the longest match counts. The schedule scales
    them like learning_rate."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay rate of Muon's momentum (Nesterov)."""
    muon_num_iterations: Annotated[int, Field(ge=1, le=99)] = 5
    """Newton-Schulz iterations that orthogonalize an update."""
    muon_adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """How the learning rate of a matrix depends on its shape: original (Jordan et al. 2024), or scaled so that updates
    are as large as AdamW's and one learning rate serves both (Moonshot AI 2025)."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """The shape after warm-up. wsd is warm-up, stable, then a linear decay over the last `lr_decay_steps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises linearly from 0. A run that is no longer than this plus the
    final decay never reaches the peak, and gets a warning."""
    lr_decay_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of the final decay; only for lr_schedule wsd."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The learning rate at the end of linear, cosine and wsd, as a share of the peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of matrices; norms, biases, embeddings and learnt vectors are never decayed."""
    adam_betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this global L2 norm; null does not clip."""
    max_nonfinite_steps: PositiveInt = 3
    """A step whose loss or gradient is not finite is skipped; this many in a row end the run."""

    @model_validator(mode="after")
    def _decay_belongs_to_wsd(self) -> Self:
        if self.lr_schedule == "wsd" and self.lr_decay_steps == 0:
            raise ValueError("lr_schedule=wsd needs lr_decay_steps >= 1, the number of final steps that decay")
        if self.lr_schedule != "wsd" and self.lr_decay_steps:
            raise ValueError(
                f"lr_decay_steps={self.lr_decay_steps} has no effect with lr_schedule={self.lr_schedule}; "
                "remove it or set lr_schedule=wsd"
            )
        if self.lr_schedule == "constant" and self.min_lr_ratio:
            raise ValueError(
                f"min_lr_ratio={self.min_lr_ratio} has no effect with lr_schedule=constant; remove it or set "
                "lr_schedule=linear, cosine or wsd"
            )
        return self

    @model_validator(mode="after")
    def _keys_belong_to_the_optimizer(self) -> Self:
        if self.optimizer != "muon":
            for name in ("muon_momentum", "muon_num_iterations", "muon_adjust_lr"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name}={getattr(self, name)} has no effect with optimizer={self.optimizer}; remove it or set "
                        "optimizer=muon"
                    )
        if self.optimizer in ("adamw_cpu", "adamw_8bit") and self.adamw_implementation != "fused":
            raise ValueError(
                f"adamw_implementation={self.adamw_implementation} has no effect with optimizer={self.optimizer}, "
                "which has one kernel; remove it or set optimizer=adamw"
            )
        return self

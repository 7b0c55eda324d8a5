import pytest

from shardwise.config import ConfigError, EngineConfig, FrozenEngineConfig, LayoutConfig, OptimizerConfig


def parse(cls, **tree):
    return cls.parse(tree, origin="test")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fsdp_size", 0),
        ("ulysses_size", 0),
        ("param_dtype", "float8"),
        ("reduce_dtype", "fp32"),
        ("max_tokens_per_micro_batch", 0),
        ("forward_prefetch", -1),
        ("tiled_num_shards", 1),
        ("checkpoint_every_layers", 1),
        ("master_dtype", "float16"),
        ("attention_implementation", "sdpa"),
        ("strategy", "fsdp2_infer"),
        ("collective_timeout_seconds", 0),
    ],
)
def test_engine_value_out_of_range_is_refused(key, value):
    with pytest.raises(ConfigError, match=rf"^test: \s*{key}={value!r}: input should be "):
        parse(EngineConfig, **{key: value})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"tiled_num_shards": 8},
            "tiled_num_shards=8 has no effect without apply_tiled_mlp=true; set it, or tiled_num_shards=null",
        ),
        (
            {"offload_policy": True, "param_offload": True},
            "offload_policy=true already keeps the weights in host memory, so param_offload=true has no effect; set "
            "one of them to false",
        ),
        (
            {"checkpoint_every_layers": 2, "activation_checkpointing": "full"},
            "checkpoint_every_layers=2 has no effect with activation_checkpointing=full; set it to null, or "
            "activation_checkpointing=selective",
        ),
        (
            {"activation_offload": True},
            "activation_offload=true moves the inputs of checkpointed layers, and activation_checkpointing=none has "
            "none; set that to full or selective, or activation_offload=false",
        ),
        (
            {"lora": {}, "freeze_router": True},
            "freeze_router=true has no effect with lora, which freezes the whole base; set it to false, and leave "
            "routers out of lora.target_modules",
        ),
        (
            {"lora": {"target_parameters": ["experts.down_proj"]}, "ep_size": 2},
            "ep_size=2 with lora.target_parameters=['experts.down_proj']: ranks that share experts cannot share the "
            "adapters of experts; set ep_size=1, or adapt linear layers only",
        ),
        (
            {"lora": {"target_parameters": ["experts.down_proj"], "dropout": 0.1}},
            "lora: target_parameters=['experts.down_proj'] with dropout=0.1: peft has neither DoRA nor dropout for "
            "adapters of fused experts; remove one of the two",
        ),
        (
            {"lora": {"target_parameters": ["experts.down_proj"], "use_dora": True}},
            "lora: target_parameters=['experts.down_proj'] with use_dora=true: peft has neither DoRA nor dropout for "
            "adapters of fused experts; remove one of the two",
        ),
        (
            {"lora": {"dropout": 0.1}, "apply_tiled_mlp": True},
            "lora.dropout=0.1 with apply_tiled_mlp=true: a tiled MLP is computed twice and would drop other elements "
            "the second time; set lora.dropout=0",
        ),
        (
            {"master_dtype": "bfloat16"},
            "master_dtype=bfloat16 with param_dtype=float32 would compute on weights that are already rounded; set "
            "param_dtype=bfloat16 or master_dtype=float32",
        ),
        (
            {"lora": {}, "master_dtype": "bfloat16", "param_dtype": "bfloat16"},
            "master_dtype=bfloat16 with lora: adapters are float32 masters, and the frozen base is kept in param_dtype "
            "anyway; set master_dtype=float32",
        ),
        (
            {"offload_policy": True, "optimizer_offload": True},
            "offload_policy=true already keeps the optimizer states in host memory, so optimizer_offload=true has no "
            "effect; set one of them to false",
        ),
        (
            {"backward_prefetch": 1, "reshard_after_forward": False},
            "backward_prefetch=1 has no effect with reshard_after_forward=false, which leaves nothing to gather in "
            "backward; set backward_prefetch=0 or reshard_after_forward=true",
        ),
    ],
)
def test_engine_keys_that_would_have_no_effect_together_are_refused(tree, message):
    """Trap 18, for combinations."""
    with pytest.raises(ConfigError) as error:
        parse(EngineConfig, **tree)
    assert str(error.value) == f"test: {message}"


def test_frozen_engine_takes_over_the_layout_and_nothing_of_training():
    trained = parse(
        EngineConfig,
        fsdp_size=2,
        ulysses_size=2,
        param_dtype="bfloat16",
        apply_tiled_mlp=True,
        wrap_policy={"wrap_embeddings": True},
        activation_checkpointing="full",
        freeze_module_prefix="model.norm",
    )
    frozen = trained.frozen()
    assert trained.freeze_module_prefix == ["model.norm"]
    assert type(frozen) is FrozenEngineConfig
    assert frozen.strategy == "fsdp2_infer"
    layout = trained.model_dump(include=set(LayoutConfig.model_fields))
    assert frozen.model_dump() == layout | {"strategy": "fsdp2_infer"}
    with pytest.raises(ConfigError, match=r"^test: activation_checkpointing: unknown key"):
        parse(FrozenEngineConfig, activation_checkpointing="full")


@pytest.mark.parametrize(
    ("key", "value", "path"),
    [
        ("learning_rate", -1e-9, "learning_rate"),
        ("learning_rate", float("inf"), "learning_rate"),
        ("lr_schedule", "step", "lr_schedule"),
        ("warmup_steps", -1, "warmup_steps"),
        ("lr_decay_steps", -1, "lr_decay_steps"),
        ("min_lr_ratio", 1.5, "min_lr_ratio"),
        ("min_lr_ratio", -0.5, "min_lr_ratio"),
        ("weight_decay", -0.1, "weight_decay"),
        ("adam_betas", [0.9, 1.0], r"adam_betas\.1"),
        ("adam_betas", [-0.1, 0.9], r"adam_betas\.0"),
        ("adam_eps", 0, "adam_eps"),
        ("max_grad_norm", 0, "max_grad_norm"),
        ("max_nonfinite_steps", 0, "max_nonfinite_steps"),
    ],
)
def test_optimizer_value_out_of_range_is_refused(key, value, path):
    with pytest.raises(ConfigError, match=rf"^test: {path}=.*: input should be "):
        parse(OptimizerConfig, **{key: value})


def test_bounds_themselves_are_allowed():
    config = parse(
        OptimizerConfig,
        learning_rate=0,
        min_lr_ratio=1,
        lr_schedule="cosine",
        adam_betas=[0, 0.999],
        max_grad_norm=None,
        weight_decay=0,
    )
    assert (config.learning_rate, config.min_lr_ratio, config.adam_betas) == (0, 1, (0, 0.999))
    assert parse(EngineConfig, fsdp_size=None).fsdp_size is None


def test_floor_of_a_constant_schedule_is_refused():
    with pytest.raises(ConfigError, match=r"min_lr_ratio=0\.1 has no effect with lr_schedule=constant"):
        parse(OptimizerConfig, min_lr_ratio=0.1)


def test_wsd_needs_decay_steps():
    with pytest.raises(ConfigError) as error:
        parse(OptimizerConfig, lr_schedule="wsd")
    assert str(error.value) == "test: lr_schedule=wsd needs lr_decay_steps >= 1, the number of final steps that decay"
    assert parse(OptimizerConfig, lr_schedule="wsd", lr_decay_steps=1).lr_decay_steps == 1


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_decay_steps_without_wsd_would_do_nothing_and_are_refused(schedule):
    with pytest.raises(ConfigError) as error:
        parse(OptimizerConfig, lr_schedule=schedule, lr_decay_steps=5)
    assert str(error.value) == (
        f"test: lr_decay_steps=5 has no effect with lr_schedule={schedule}; remove it or set lr_schedule=wsd"
    )


@pytest.mark.parametrize("value", [1, 0, -1, "no", 2.5])
def test_reshard_after_forward_is_true_false_or_a_number_of_ranks(value):
    with pytest.raises(ConfigError) as error:
        parse(EngineConfig, reshard_after_forward=value)
    assert str(error.value) == (
        f"test: reshard_after_forward: {value!r} is neither true, false nor a number of ranks from 2 on; "
        "use one of them"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": {}, "master_dtype": "bfloat16", "param_dtype": "bfloat16"}, "adapters are float32 masters"),
        ({"offload_policy": True, "optimizer_offload": True}, "already keeps the optimizer states in host memory"),
        ({"backward_prefetch": 1, "reshard_after_forward": False}, "leaves nothing to gather in backward"),
    ],
)
def test_engine_keys_that_contradict_each_other_are_refused(options, message):
    """Trap 18, for combinations."""
    with pytest.raises(ConfigError, match=message):
        parse(EngineConfig, **options)

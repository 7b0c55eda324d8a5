import pytest
from commands import BF16, EVAL, SFT, TRAINING, message_of

from shardwise.config import (
    ConfigError,
    DistillConfig,
    EvalConfig,
    PreferenceConfig,
    RewardModelConfig,
    SFTConfig,
)


def test_eval_needs_validation_files():
    assert EvalConfig.load(None, EVAL).data.validation_files == ["v"]
    assert message_of(EvalConfig, [*EVAL, "data.validation_files=[]"]) == (
        "data.validation_files is empty; eval measures on the validation files"
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_eval_refuses_to_drop_the_weights_that_it_samples_from(engine):
    assert EvalConfig.load(None, [*EVAL, f"rollout.engine={{type: {engine}, sleep_level: 1}}"])
    assert message_of(EvalConfig, [*EVAL, f"rollout.engine={{type: {engine}, sleep_level: 2}}"]) == (
        "rollout.engine.sleep_level=2 drops the weights, and eval has no weight sync that would bring them again; set "
        "it to 1 or 0"
    )


@pytest.mark.parametrize(
    "key", ["data.train_files", "data.shuffle", "engine.fsdp_size", "rollout.group_size", "trainer.learning_rate"]
)
def test_keys_that_only_training_reads_are_unknown_to_eval(key):
    """Trap 18: what has no effect cannot be set."""
    assert message_of(EvalConfig, [*EVAL, f"{key}=1"]).startswith((f"{key}: unknown key", "trainer: unknown key"))


@pytest.mark.parametrize(
    ("cls", "base", "key", "value"),
    [
        (SFTConfig, SFT, "trainer.total_steps", "0"),
        (SFTConfig, SFT, "trainer.num_epochs", "0"),
        (SFTConfig, SFT, "trainer.seed", "-1"),
        (SFTConfig, SFT, "trainer.validate_every_steps", "-1"),
        (SFTConfig, SFT, "trainer.save_every_steps", "-1"),
        (SFTConfig, SFT, "trainer.batch_size", "0"),
        (EvalConfig, EVAL, "eval.num_samples", "0"),
        (EvalConfig, EVAL, "eval.seed", "-1"),
    ],
)
def test_value_out_of_range_is_refused(cls, base, key, value):
    assert message_of(cls, [*base, f"{key}={value}"]).startswith(f"{key}={value}: input should be greater than")


def test_preference_and_reward_model_need_room_for_a_pair():
    fits = [*SFT, "engine.max_tokens_per_micro_batch=100", "data.max_sequence_tokens=50"]
    for cls in (PreferenceConfig, RewardModelConfig):
        assert cls.load(None, fits).data.max_sequence_tokens == 50
        assert message_of(cls, [*fits, "data.max_sequence_tokens=51"]) == (
            "2 x data.max_sequence_tokens=51 = 102 tokens are more than engine.max_tokens_per_micro_batch=100, and a "
            "pair is never split over micro-batches; lower the former or raise the latter"
        )
    kto = [*fits, "loss=kto", "data.max_sequence_tokens=100"]
    assert PreferenceConfig.load(None, kto).loss.name == "kto"
    assert message_of(PreferenceConfig, [*kto, "data.max_sequence_tokens=101"]) == (
        "data.max_sequence_tokens=101 tokens are more than engine.max_tokens_per_micro_batch=100, and a sequence is "
        "never split over micro-batches; lower the former or raise the latter"
    )
    assert message_of(PreferenceConfig, [*fits, "reference.max_tokens_per_micro_batch=99"]).startswith(
        "2 x data.max_sequence_tokens=50 = 100 tokens are more than reference.max_tokens_per_micro_batch=99"
    )


@pytest.mark.parametrize(
    ("loss", "options", "engine", "paired"),
    [
        ("dpo", [], True, True),
        ("ipo", [], True, True),
        ("kto", [], True, False),
        ("simpo", [], False, True),
        ("orpo", [], False, True),
        ("dpo", ["engine.lora.rank=4"], False, True),
        ("dpo", ["reference_logprobs=before_training"], False, True),
    ],
)
def test_a_reference_engine_is_there_where_the_reference_is_another_model(loss, options, engine, paired):
    config = PreferenceConfig.load(None, [*SFT, f"loss={loss}", *options])
    assert config.has_reference_engine is engine
    assert config.is_paired is paired
    assert config.uses_reference is (loss not in ("simpo", "orpo"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["loss=simpo", "reference.fsdp_size=1"],
            "reference has no effect with loss=simpo, reference_logprobs=each_step and engine.lora=null, which build "
            "no second engine; remove it",
        ),
        (
            ["engine.lora.rank=4", "reference.fsdp_size=1"],
            "reference has no effect with loss=dpo, reference_logprobs=each_step and engine.lora=given, which build no "
            "second engine; remove it",
        ),
        (
            ["reference_logprobs=before_training", "reference.fsdp_size=1"],
            "reference has no effect with loss=dpo, reference_logprobs=before_training and engine.lora=null, which "
            "build no second engine; remove it",
        ),
        (
            ["loss=orpo", "reference_logprobs=before_training"],
            "reference_logprobs=before_training: loss=orpo has no reference policy; set reference_logprobs=each_step",
        ),
        (
            ["loss=kto", "reference_logprobs=before_training"],
            "reference_logprobs=before_training: loss=kto compares new combinations in every step; set "
            "reference_logprobs=each_step",
        ),
        (
            ["loss=simpo", "engine.param_offload=true"],
            "engine.param_offload=true has no effect in preference training without a second engine, where nothing "
            "else needs the device; remove it (engine.offload_policy=true keeps everything in host memory)",
        ),
        (
            ["loss=kto", "trainer.batch_size=1"],
            "trainer.batch_size=1 leaves kto no other answer to compare with; use at least 2",
        ),
        (
            ["loss={name: custom, function: 'rules.py:mine', is_paired: false}", "trainer.batch_size=1"],
            "trainer.batch_size=1 leaves custom no other answer to compare with; use at least 2",
        ),
        (
            ["loss=kto", "engine.lora.dropout=0.1"],
            "engine.lora.dropout makes kto's estimate of the KL divergence that of another model; set 0",
        ),
    ],
)
def test_preference_parts_that_do_not_fit_are_refused(options, message):
    assert message_of(PreferenceConfig, [*SFT, *options]) == message


@pytest.mark.parametrize("uses_reference", [True, False])
def test_a_preference_loss_of_ones_own_says_whether_it_uses_a_reference(uses_reference):
    loss = f"loss={{name: custom, function: rules.py:mine, uses_reference: {uses_reference}}}"
    config = PreferenceConfig.load(None, [*SFT, loss])
    assert config.has_reference_engine is config.uses_reference is uses_reference
    assert config.is_paired
    assert PreferenceConfig.load(None, [*SFT, "loss=rules.py:mine"]).uses_reference
    if not uses_reference:
        assert message_of(PreferenceConfig, [*SFT, loss, "reference_logprobs=before_training"]) == (
            "reference_logprobs=before_training: loss=custom has no reference policy; set reference_logprobs=each_step"
        )


def test_offload_has_an_effect_in_preference_training_beside_a_reference():
    assert PreferenceConfig.load(None, [*SFT, "engine.param_offload=true"]).engine.param_offload
    assert message_of(RewardModelConfig, [*SFT, "engine.optimizer_offload=true"]).startswith(
        "engine.optimizer_offload=true has no effect in reward-model training"
    )


@pytest.mark.parametrize(
    ("cls", "tree", "key"),
    [
        (PreferenceConfig, {}, "response_column"),
        (PreferenceConfig, {}, "margin_column"),
        (PreferenceConfig, {"loss": "kto"}, "chosen_column"),
        (PreferenceConfig, {"loss": "kto"}, "rejected_column"),
        (RewardModelConfig, {}, "label_column"),
    ],
)
def test_columns_that_nothing_reads_are_refused(cls, tree, key):
    """Trap 18."""
    data = {"train_files": "t", key: "other"}
    with pytest.raises(ConfigError, match=f"data.{key}=other has no effect with "):
        cls.parse({"model": {"path": "m"}, "data": data, **tree}, origin="test")


def test_a_reward_model_reads_margins():
    tree = {"model": {"path": "m"}, "data": {"train_files": "t", "margin_column": "by"}}
    assert RewardModelConfig.parse(tree, origin="test").data.margin_column == "by"


@pytest.mark.parametrize(("cls", "overrides"), TRAINING)
def test_an_optimizer_that_cannot_update_the_weights_is_refused_by_every_recipe(cls, overrides):
    assert cls.load(None, [*overrides, *BF16]).engine.master_dtype == "bfloat16"
    assert message_of(cls, [*overrides, *BF16, "trainer.optimizer=muon"]) == (
        "engine.master_dtype=bfloat16 with trainer.optimizer=muon, which updates float32 weights only; set "
        "engine.master_dtype=float32 or trainer.optimizer=adamw"
    )


@pytest.mark.parametrize(
    ("cls", "overrides"), [(PreferenceConfig, SFT), (DistillConfig, [*SFT, "teacher.model.path=t"])]
)
def test_states_on_the_host_are_not_offloaded_beside_a_second_engine(cls, overrides):
    offload = [*overrides, "engine.optimizer_offload=true"]
    assert cls.load(None, offload).engine.optimizer_offload
    assert message_of(cls, [*offload, "trainer.optimizer=adamw_cpu"]).startswith("trainer.optimizer=adamw_cpu already")

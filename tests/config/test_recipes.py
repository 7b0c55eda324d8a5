import pytest

from shardwise.config import BatchTrainerConfig, ConfigError, EvalConfig, OptimizerConfig, RLConfig, SFTConfig

SFT = ["model.path=m", "data.train_files=f"]
RL = [*SFT, "reward.functions=r:score"]
EVAL = ["model.path=m", "data.validation_files=v", "reward.functions=r:score"]


def message_of(cls, overrides):
    with pytest.raises(ConfigError) as error:
        cls.load(None, overrides)
    return str(error.value).removeprefix("the command line: ")


@pytest.mark.parametrize(("cls", "overrides"), [(SFTConfig, SFT), (RLConfig, RL)])
def test_training_without_train_files_is_refused(cls, overrides):
    assert message_of(cls, [*overrides, "data.train_files=[]"]) == (
        "data.train_files is empty; give at least one jsonl or parquet file or datasets folder"
    )


def test_sft_sequences_must_fit_a_micro_batch():
    fits = [*SFT, "engine.max_tokens_per_micro_batch=100", "data.max_sequence_tokens=100"]
    assert SFTConfig.load(None, fits).data.max_sequence_tokens == 100
    assert message_of(SFTConfig, [*fits, "data.max_sequence_tokens=101"]) == (
        "data.max_sequence_tokens=101 is more than engine.max_tokens_per_micro_batch=100, and a sequence is never "
        "split over micro-batches; lower the first or raise the second"
    )


def test_rl_prompt_and_response_must_fit_a_micro_batch():
    fits = [
        *RL,
        "engine.max_tokens_per_micro_batch=100",
        "data.max_prompt_tokens=60",
        "rollout.max_response_tokens=40",
    ]
    assert RLConfig.load(None, fits).rollout.max_response_tokens == 40
    assert message_of(RLConfig, [*fits, "rollout.max_response_tokens=41"]) == (
        "data.max_prompt_tokens=60 + rollout.max_response_tokens=41 = 101 is more than "
        "engine.max_tokens_per_micro_batch=100, and a sequence is never split over micro-batches; lower the first two "
        "or raise the last"
    )


def test_group_of_one_is_refused():
    assert message_of(RLConfig, [*RL, "rollout.group_size=1"]) == (
        "rollout.group_size=1 leaves algorithm.advantage=grpo without a baseline (every advantage would be 0); "
        "use at least 2"
    )


def test_more_minibatches_than_samples_are_refused():
    small = [*RL, "rollout.num_prompts=3", "rollout.group_size=2"]
    assert RLConfig.load(None, [*small, "algorithm.num_minibatches=6"]).algorithm.num_minibatches == 6
    assert message_of(RLConfig, [*small, "algorithm.num_minibatches=7"]) == (
        "algorithm.num_minibatches=7 is more than the 6 samples of a step (rollout.num_prompts x rollout.group_size)"
    )


def test_eval_needs_validation_files():
    assert EvalConfig.load(None, EVAL).data.validation_files == ["v"]
    assert message_of(EvalConfig, [*EVAL, "data.validation_files=[]"]) == (
        "data.validation_files is empty; eval measures on the validation files"
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


def test_optimizer_is_the_part_of_the_trainer_that_an_engine_needs():
    trainer = BatchTrainerConfig(learning_rate=0.5, lr_schedule="wsd", lr_decay_steps=3, batch_size=4, seed=9)
    assert trainer.optimizer_config() == OptimizerConfig(learning_rate=0.5, lr_schedule="wsd", lr_decay_steps=3)
    assert type(trainer.optimizer_config()) is OptimizerConfig

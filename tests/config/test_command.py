import pytest
from commands import DISTILL, EVAL, GAE, RL, SFT, TRAINING, message_of

from shardwise.config import DistillConfig, EvalConfig, PreferenceConfig, RewardModelConfig, RLConfig, SFTConfig


@pytest.mark.parametrize(
    ("cls", "overrides"), [(SFTConfig, SFT), (PreferenceConfig, SFT), (RewardModelConfig, SFT), (RLConfig, RL)]
)
def test_training_without_train_files_is_refused(cls, overrides):
    assert message_of(cls, [*overrides, "data.train_files=[]"]) == (
        "data.train_files is empty; give at least one jsonl or parquet file or datasets folder"
    )


@pytest.mark.parametrize(("cls", "overrides"), TRAINING)
def test_the_best_checkpoint_by_held_out_rows_needs_some(cls, overrides):
    """With some, the last step is validated at least."""
    best = [*overrides, "trainer.keep_last=1", "trainer.keep_best={metric: val/loss, mode: min}"]
    assert message_of(cls, best) == (
        "trainer.keep_best.metric=val/loss is measured on held-out rows, and data.validation_files is empty; give "
        "some, or a metric that is not of val/"
    )
    assert cls.load(None, [*best, "data.validation_files=v"])
    assert cls.load(None, [*best, "trainer.keep_best.metric=train/loss"])


def test_sft_sequences_must_fit_a_micro_batch():
    fits = [*SFT, "engine.max_tokens_per_micro_batch=100", "data.max_sequence_tokens=100"]
    assert SFTConfig.load(None, fits).data.max_sequence_tokens == 100
    assert message_of(SFTConfig, [*fits, "data.max_sequence_tokens=101"]) == (
        "data.max_sequence_tokens=101 tokens are more than engine.max_tokens_per_micro_batch=100, and a sequence is "
        "never split over micro-batches; lower the former or raise the latter"
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
        "data.max_prompt_tokens=60 + rollout.max_response_tokens=41 = 101 tokens are more than "
        "engine.max_tokens_per_micro_batch=100, and a sequence is never split over micro-batches; lower the former or "
        "raise the latter"
    )


@pytest.mark.parametrize(("engine", "key"), [("vllm", "max_model_len"), ("sglang", "context_length")])
@pytest.mark.parametrize(("cls", "base"), [(RLConfig, RL), (EvalConfig, EVAL)])
def test_prompt_and_response_must_fit_what_the_rollout_engine_takes(cls, base, engine, key):
    fits = [*base, f"rollout.engine.type={engine}", "data.max_prompt_tokens=40", "rollout.max_response_tokens=8"]
    for free in ("48", "null", "-1"):  # -1 leaves it to vLLM
        assert cls.load(None, [*fits, f"rollout.engine.args.{key}={free}"]).rollout.max_response_tokens == 8
    assert message_of(cls, [*fits, f"rollout.engine.args.{key}=47"]) == (
        f"data.max_prompt_tokens=40 + rollout.max_response_tokens=8 = 48 tokens are more than rollout.engine.args."
        f"{key}=47; lower the former, raise the latter to the model's context at most, or remove it"
    )


def test_a_sequence_fits_into_a_micro_batch_of_the_teacher_too():
    given = ["model.path=m", "data.train_files=d.jsonl", "teacher.model.path=t", "data.max_sequence_tokens=100"]
    assert message_of(DistillConfig, [*given, "teacher.engine.max_tokens_per_micro_batch=99"]).startswith(
        "data.max_sequence_tokens=100 tokens are more than teacher.engine.max_tokens_per_micro_batch=99, and a seq"
    )
    assert DistillConfig.load(None, [*given, "teacher.engine.max_tokens_per_micro_batch=100"])


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([*GAE, "critic.engine.max_tokens_per_micro_batch=99"], "critic.engine"),
        ([*RL, "algorithm.kl_coef=1", "reference.max_tokens_per_micro_batch=99"], "reference"),
        (
            [*DISTILL, "teachers=[{model: {path: t}}, {model: {path: u}, data_source: a, "
             "engine: {max_tokens_per_micro_batch: 99}}]"],
            "teachers.1.engine",
        ),
    ],
)  # fmt: skip
def test_a_sequence_fits_into_a_micro_batch_of_every_engine(overrides, key):
    sizes = ["data.max_prompt_tokens=60", "rollout.max_response_tokens=40"]
    message = message_of(RLConfig, [*overrides, *sizes])
    assert message.startswith("data.max_prompt_tokens=60 + rollout.max_response_tokens=40 = 100 tokens are more than ")
    assert f" {key}.max_tokens_per_micro_batch=99, " in message
    assert RLConfig.load(None, [*[text.replace("=99", "=100").replace(": 99", ": 100") for text in overrides], *sizes])


POLICY = {"param_dtype": "bfloat16", "fsdp_size": 4, "wrap_policy": {"wrap_embeddings": True, "wrap_lm_output": True}}
GIVEN = {"fsdp_size": 2, "wrap_policy": {"wrap_lm_output": False}}
ROWS = {"model": {"path": "m"}, "data": {"train_files": "t"}, "engine": POLICY}
SCORED = ROWS | {"reward": {"functions": "r:score"}}


@pytest.mark.parametrize(
    ("cls", "tree", "name"),
    [
        (RLConfig, SCORED | {"algorithm": {"kl_coef": 0.1}, "reference": GIVEN}, "reference"),
        (RLConfig, SCORED | {"algorithm": {"advantage": "gae"}, "critic": {"engine": GIVEN}}, "critic.engine"),
        (
            RLConfig,
            SCORED | {"algorithm": {"advantage": "distill"}, "teachers": [{"model": {"path": "t"}, "engine": GIVEN}]},
            "teachers.0.engine",
        ),
        (PreferenceConfig, ROWS | {"reference": GIVEN}, "reference"),
        (DistillConfig, ROWS | {"teacher": {"model": {"path": "t"}, "engine": GIVEN}}, "teacher.engine"),
    ],
)
def test_keys_of_a_layout_that_are_not_given_are_those_of_the_policy(cls, tree, name, tmp_path):
    """A reference that computed in float32 beside a bfloat16 policy would differ from it before the first step."""
    config = cls.parse(tree, origin="test")
    layout = config
    for part in name.split("."):
        layout = layout[int(part)] if part.isdigit() else getattr(layout, part)
    wrapped = {"wrap_embeddings": True, "wrap_lm_output": False}
    assert layout == type(layout).model_validate(POLICY | GIVEN | {"wrap_policy": wrapped})
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert cls.load(tmp_path / "config.yaml") == config

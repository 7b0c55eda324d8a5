import pytest

from shardwise.config import (
    ConfigError,
    DistillConfig,
    EngineConfig,
    EvalConfig,
    LoraConfig,
    PreferenceConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
)
from shardwise.config.algorithm import GROUP_ADVANTAGES

SFT = ["model.path=m", "data.train_files=f"]
RL = [*SFT, "reward.functions=r:score"]
EVAL = ["model.path=m", "data.validation_files=v", "reward.functions=r:score"]


def message_of(cls, overrides):
    with pytest.raises(ConfigError) as error:
        cls.load(None, overrides)
    return str(error.value).removeprefix("the command line: ")


@pytest.mark.parametrize(
    ("cls", "overrides"), [(SFTConfig, SFT), (PreferenceConfig, SFT), (RewardModelConfig, SFT), (RLConfig, RL)]
)
def test_training_without_train_files_is_refused(cls, overrides):
    assert message_of(cls, [*overrides, "data.train_files=[]"]) == (
        "data.train_files is empty; give at least one jsonl or parquet file or datasets folder"
    )


@pytest.mark.parametrize(
    ("cls", "overrides"),
    [
        (SFTConfig, SFT),
        (PreferenceConfig, SFT),
        (RewardModelConfig, SFT),
        (DistillConfig, [*SFT, "teacher.model.path=t"]),
        (RLConfig, RL),
    ],
)
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


@pytest.mark.parametrize(("engine", "key"), [("vllm", "max_model_len"), ("sglang", "context_length")])
@pytest.mark.parametrize(("cls", "base"), [(RLConfig, RL), (EvalConfig, EVAL)])
def test_prompt_and_response_must_fit_what_the_rollout_engine_takes(cls, base, engine, key):
    fits = [*base, f"rollout.engine.type={engine}", "data.max_prompt_tokens=40", "rollout.max_response_tokens=8"]
    for free in ("48", "null", "-1"):  # -1 leaves it to vLLM
        assert cls.load(None, [*fits, f"rollout.engine.args.{key}={free}"]).rollout.max_response_tokens == 8
    assert message_of(cls, [*fits, f"rollout.engine.args.{key}=47"]) == (
        f"data.max_prompt_tokens=40 + rollout.max_response_tokens=8 = 48 is more than rollout.engine.args.{key}=47; "
        "lower the first two, raise the last to the model's context at most, or remove it"
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
            "2 x data.max_sequence_tokens=51 = 102 is more than engine.max_tokens_per_micro_batch=100, and a pair is "
            "never split over micro-batches; lower the first or raise the second"
        )
    kto = [*fits, "loss=kto", "data.max_sequence_tokens=100"]
    assert PreferenceConfig.load(None, kto).loss.name == "kto"
    assert message_of(PreferenceConfig, [*kto, "data.max_sequence_tokens=101"]) == (
        "data.max_sequence_tokens=101 is more than engine.max_tokens_per_micro_batch=100, and a sequence is never "
        "split over micro-batches; lower the first or raise the second"
    )
    assert message_of(PreferenceConfig, [*fits, "reference.max_tokens_per_micro_batch=99"]).startswith(
        "2 x data.max_sequence_tokens=50 = 100 is more than reference.max_tokens_per_micro_batch=99"
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


@pytest.mark.parametrize("advantage", ["gae", "rules.py:mine"])
def test_a_critic_stands_beside_gae_or_an_advantage_of_ones_own(advantage):
    assert RLConfig.load(None, [*RL, f"algorithm.advantage={advantage}", "critic={}"]).critic is not None
    assert RLConfig.load(None, [*RL, "algorithm.advantage=rules.py:mine"]).critic is None


def test_offload_has_an_effect_in_preference_training_beside_a_reference():
    assert PreferenceConfig.load(None, [*SFT, "engine.param_offload=true"]).engine.param_offload
    assert message_of(RewardModelConfig, [*SFT, "engine.optimizer_offload=true"]).startswith(
        "engine.optimizer_offload=true has no effect in reward-model training"
    )


TEACHER = "teachers=[{model: {path: t}}]"
UNJUDGED = [*(option for option in RL if not option.startswith("reward.")), "algorithm.advantage=distill", TEACHER]
GAE = [*RL, "algorithm.advantage=gae", "critic={}"]
DISTILL = [*RL, "algorithm.advantage=distill"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [*RL, "algorithm.advantage=gae"],
            "algorithm.advantage=gae needs a critic; add one (critic: {} takes every default)",
        ),
        (
            [*RL, "critic={}"],
            "algorithm.advantage=grpo has no use for the critic; remove it, or set algorithm.advantage to gae or to a "
            "function of your own",
        ),
        (
            DISTILL,
            "algorithm.advantage=distill with 0 teachers: teachers and algorithm.advantage=distill belong together",
        ),
        (
            [*RL, "teachers=[{model: {path: t}}]"],
            "algorithm.advantage=grpo with 1 teachers: teachers and algorithm.advantage=distill belong together",
        ),
        (
            [*DISTILL, "teachers=[{model: {path: t}}, {model: {path: u}}]"],
            "teachers have the data_source [None, None]; give each a source of its own",
        ),
        (
            [*DISTILL, "teachers=[{model: {path: t}, data_source: a}, {model: {path: u}, data_source: a}]"],
            "teachers have the data_source ['a', 'a']; give each a source of its own",
        ),
        (
            [*RL, "algorithm.overlong_penalty.buffer_tokens=65", "rollout.max_response_tokens=64"],
            "algorithm.overlong_penalty.buffer_tokens=65 is more than rollout.max_response_tokens=64",
        ),
        (
            [*RL, "reference={}"],
            "reference has no effect with algorithm.kl_coef=0, which needs no reference policy; remove one of them",
        ),
        (
            [*RL, "reference={}", "algorithm.kl_coef=1", "engine.lora={}"],
            "reference has no effect with engine.lora: the reference policy is the policy without its adapter; remove "
            "it",
        ),
        (
            [*RL, "engine.lora.dropout=0.5"],
            "engine.lora.dropout=0.5 would make the logprobs of two passes over the same tokens differ by noise; "
            "reinforcement learning needs 0",
        ),
        (
            [*RL, "algorithm.advantage=gae", "critic.engine.lora.dropout=0.5"],
            "critic.engine.lora.dropout=0.5 would make the values of two passes over the same tokens differ by noise; "
            "reinforcement learning needs 0",
        ),
        (
            [*RL, "algorithm.advantage=remax", "rollout.group_size=1", "rollout.dynamic_sampling={}"],
            "rollout.dynamic_sampling drops groups whose rewards are all equal, which every group of "
            "rollout.group_size=1 is; use at least 2, or remove it",
        ),
        (
            [*DISTILL, "teachers=[{model: {path: t}}]", "rollout.dynamic_sampling={}"],
            "rollout.dynamic_sampling drops groups by their rewards, which algorithm.advantage=distill does not read; "
            "remove it",
        ),
        (
            [*UNJUDGED, "algorithm.advantage=grpo", "teachers=[]"],
            "reward is missing, which algorithm.advantage=grpo needs; name what judges a completion, e.g. "
            "reward.functions=rules.py:compute_score",
        ),
        (
            [*UNJUDGED, "data.validation_files=v.jsonl"],
            "data.validation_files goes by what is correct, which nothing says without reward; give it or remove "
            "data.validation_files",
        ),
        (
            [*UNJUDGED, "rollout.environment={type: tools, functions: [a.py:f]}", "data.apply_chat_template=false"],
            "rollout.environment.type=tools needs the chat template, which tells the policy of its tools and of what "
            "they return; set data.apply_chat_template=true",
        ),
        (
            [*UNJUDGED, "data.difficulty.max_pass_rate=0.9"],
            "data.difficulty goes by what is correct, which nothing says without reward; give it or remove "
            "data.difficulty",
        ),
        (
            [*RL, "algorithm.kl_coef=0.1", "engine.lora={adapter_path: a}"],
            "algorithm.kl_coef compares with the policy at its start, and that is the model with the adapter of "
            "engine.lora.adapter_path, which the policy without its adapters is not; merge it first "
            "(`shardwise export`) and start from the result",
        ),
        (
            [*RL, "rollout.sync_adapter_only=true"],
            "rollout.sync_adapter_only=true needs an adapter: set engine.lora, or rollout.sync_adapter_only=false",
        ),
        (
            [*RL, "rollout.sync_adapter_only=true", "engine.lora={rank: 2}", "rollout.engine=sglang"],
            "rollout: sync_adapter_only=true with engine=sglang, which takes whole models; set engine=embedded or "
            "vllm, or sync_adapter_only=false",
        ),
        (
            [
                *RL,
                "rollout.sync_adapter_only=true",
                "engine.lora={rank: 2}",
                "rollout.engine={type: vllm, sleep_level: 2}",
            ],
            "rollout: sync_adapter_only=true with engine.sleep_level=2, which drops the model that no weight sync "
            "would bring again; set engine.sleep_level=1, or sync_adapter_only=false",
        ),
        (
            [*RL, "rollout.sync_adapter_only=true", "engine.lora={use_dora: true}", "rollout.engine=vllm"],
            "rollout.sync_adapter_only=true with rollout.engine=vllm, which cannot compute with engine.lora.use_dora; "
            "remove it, set rollout.sync_adapter_only=false, or rollout.engine=embedded",
        ),
        (
            [*RL, "rollout.sync_adapter_only=true", "engine.lora={target_parameters: [a.b]}", "rollout.engine=vllm"],
            "rollout.sync_adapter_only=true with rollout.engine=vllm, which cannot compute with "
            "engine.lora.target_parameters; remove it, set rollout.sync_adapter_only=false, or rollout.engine=embedded",
        ),
        (
            [*RL, "rollout.router_replay=true", "rollout.engine=vllm"],
            "rollout: router_replay=true with engine=vllm, which does not tell which experts it chose: choices of "
            "experts are kept by engine=embedded in the process of a rank that trains, for completions of one turn; "
            "remove one of the two",
        ),
        (
            [*RL, "rollout.router_replay=true", "rollout.engine.compile_decode=true"],
            "rollout: router_replay=true with engine.compile_decode=true: choices of experts are kept by "
            "engine=embedded in the process of a rank that trains, for completions of one turn; remove one of the two",
        ),
        (
            [*RL, "rollout.router_replay=true", "engine.compile_layers=true"],
            "rollout.router_replay=true with engine.compile_layers=true: what a compiled router chooses cannot be "
            "replaced; remove one of the two",
        ),
        (
            [*RL, "engine.optimizer_offload=true", "trainer.optimizer=adamw_cpu"],
            "trainer.optimizer=adamw_cpu already keeps its states in host memory, so engine.optimizer_offload=true has "
            "no effect; remove one of them",
        ),
        (
            [*GAE, "critic.engine.optimizer_offload=true", "critic.optimizer.optimizer=adamw_cpu"],
            "critic.optimizer.optimizer=adamw_cpu already keeps its states in host memory, so "
            "critic.engine.optimizer_offload=true has no effect; remove one of them",
        ),
    ],
)
def test_parts_of_reinforcement_learning_that_do_not_fit_are_refused(overrides, message):
    assert message_of(RLConfig, overrides) == message


def test_turns_are_compared_where_there_are_turns():
    gigpo = [*RL, "algorithm.advantage=gigpo"]
    assert message_of(RLConfig, gigpo) == (
        "algorithm.advantage=gigpo compares turns, and without rollout.environment there is one; set it, or use grpo"
    )
    assert RLConfig.load(None, [*gigpo, "rollout.environment=a.py:Game"]).algorithm.advantage.gamma == 0.95


def test_parts_of_reinforcement_learning_that_fit_are_taken():
    assert RLConfig.load(None, GAE).critic.value_loss.clip == 0.5
    assert RLConfig.load(None, UNJUDGED).reward is None
    teachers = RLConfig.load(None, [*DISTILL, "teachers=[{model: {path: t}}, {model: {path: u}, data_source: a}]"])
    assert [teacher.data_source for teacher in teachers.teachers] == [None, "a"]
    assert RLConfig.load(None, [*RL, "algorithm.overlong_penalty.buffer_tokens=256"]).algorithm.overlong_penalty


@pytest.mark.parametrize("advantage", sorted(GROUP_ADVANTAGES))
def test_a_group_of_one_has_no_baseline(advantage):
    assert message_of(RLConfig, [*RL, f"algorithm.advantage={advantage}", "rollout.group_size=1"]) == (
        f"rollout.group_size=1 leaves algorithm.advantage={advantage} without a baseline (every advantage would be 0); "
        "use at least 2"
    )


def test_a_clip_of_values_needs_values_that_move():
    assert message_of(RLConfig, [*GAE, "critic.value_loss.clip=0.3"]) == (
        "critic.value_loss.clip=0.3 has no effect with one optimizer step per rollout batch, before which no value has "
        "moved; set algorithm.num_minibatches or algorithm.num_epochs above 1, or remove it"
    )
    for options in (["critic.value_loss.clip=0.3", "algorithm.num_epochs=2"], ["critic.value_loss.clip=null"]):
        assert RLConfig.load(None, [*GAE, *options]).critic is not None


@pytest.mark.parametrize("options", [["reinforce_plus_plus"], ["remax"], ["gae", "critic={}"], ["rules.py:mine"]])
def test_a_group_of_one_does_where_the_baseline_is_another(options):
    advantage, *others = options
    config = RLConfig.load(None, [*RL, f"algorithm.advantage={advantage}", *others, "rollout.group_size=1"])
    assert config.rollout.group_size == 1


def test_a_sequence_fits_into_a_micro_batch_of_the_teacher_too():
    given = ["model.path=m", "data.train_files=d.jsonl", "teacher.model.path=t", "data.max_sequence_tokens=100"]
    assert message_of(DistillConfig, [*given, "teacher.engine.max_tokens_per_micro_batch=99"]).startswith(
        "data.max_sequence_tokens=100 is more than teacher.engine.max_tokens_per_micro_batch=99, and a sequence"
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
    assert message.startswith("data.max_prompt_tokens=60 + rollout.max_response_tokens=40 = 100 is more than ")
    assert f" {key}.max_tokens_per_micro_batch=99, " in message
    assert RLConfig.load(None, [*[text.replace("=99", "=100").replace(": 99", ": 100") for text in overrides], *sizes])


def test_layouts_that_are_not_given_are_those_of_the_policy():
    policy = ["engine.fsdp_size=2", "engine.param_dtype=bfloat16", "engine.param_offload=true"]
    config = RLConfig.load(None, [*GAE, *policy, "engine.lora.rank=4"])
    assert config.critic_layout() == config.engine.model_copy(update={"lora": None})
    assert config.reference_layout() == config.engine.frozen()
    distilled = RLConfig.load(None, [*DISTILL, *policy, "teachers=[{model: {path: t}}]"])
    assert distilled.teacher_layout(distilled.teachers[0]) == distilled.engine.frozen()
    assert list(distilled.layouts()) == ["engine", "reference", "teachers.0.engine"]


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


def test_a_critic_does_not_take_the_adapters_of_the_policy_with_its_other_keys():
    given = [*GAE, "engine.lora.rank=4", "engine.param_offload=true"]
    config = RLConfig.load(None, [*given, "critic.engine.fsdp_size=1"])
    assert config.critic_layout() == EngineConfig(fsdp_size=1, param_offload=True)
    adapted = RLConfig.load(None, [*given, "critic.engine.lora.rank=2"])
    assert adapted.critic_layout() == EngineConfig(lora=LoraConfig(rank=2), param_offload=True)


def test_a_mistake_in_the_policys_layout_is_told_once():
    message = message_of(RLConfig, [*RL, "algorithm.kl_coef=1", "engine.fsdp_size=0", "reference.ulysses_size=2"])
    assert message == "engine.fsdp_size=0: input should be greater than 0"


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


def test_f36_a_batch_that_cannot_be_split_is_an_error_before_anything_starts():
    """No optimizer step is without samples. Parts of unequal size are legal: each divides by its own counts."""
    few = [*RL, "rollout.num_prompts=1", "rollout.group_size=3"]
    assert "num_minibatches=4 is more than the 3 samples" in message_of(RLConfig, [*few, "algorithm.num_minibatches=4"])
    assert RLConfig.load(None, [*few, "algorithm.num_minibatches=2"]).algorithm.num_minibatches == 2


BF16 = ["engine.param_dtype=bfloat16", "engine.master_dtype=bfloat16"]


@pytest.mark.parametrize(
    ("cls", "overrides"),
    [
        (SFTConfig, SFT),
        (PreferenceConfig, SFT),
        (RewardModelConfig, SFT),
        (DistillConfig, [*SFT, "teacher.model.path=t"]),
        (RLConfig, RL),
    ],
)
def test_an_optimizer_that_cannot_update_the_weights_is_refused_by_every_recipe(cls, overrides):
    assert cls.load(None, [*overrides, *BF16]).engine.master_dtype == "bfloat16"
    assert message_of(cls, [*overrides, *BF16, "trainer.optimizer=muon"]) == (
        "engine.master_dtype=bfloat16 with trainer.optimizer=muon, which updates float32 weights only; set "
        "engine.master_dtype=float32 or trainer.optimizer=adamw"
    )


def test_a_critic_on_the_layout_of_the_policy_needs_an_optimizer_for_it():
    assert message_of(RLConfig, [*GAE, *BF16, "critic.optimizer.optimizer=muon"]) == (
        "engine.master_dtype=bfloat16 with critic.optimizer.optimizer=muon, which updates float32 weights only; set "
        "engine.master_dtype=float32 or critic.optimizer.optimizer=adamw"
    )
    states = ["engine.optimizer_offload=true", "critic.optimizer.optimizer=adamw_cpu"]
    assert RLConfig.load(None, [*GAE, *states]).engine.optimizer_offload  # of the policy


@pytest.mark.parametrize(
    ("cls", "overrides"), [(PreferenceConfig, SFT), (DistillConfig, [*SFT, "teacher.model.path=t"])]
)
def test_states_on_the_host_are_not_offloaded_beside_a_second_engine(cls, overrides):
    offload = [*overrides, "engine.optimizer_offload=true"]
    assert cls.load(None, offload).engine.optimizer_offload
    assert message_of(cls, [*offload, "trainer.optimizer=adamw_cpu"]).startswith("trainer.optimizer=adamw_cpu already")


def test_a_warm_up_of_the_critic_leaves_the_policy_steps():
    fits = [*GAE, "trainer.total_steps=4"]
    assert message_of(RLConfig, [*fits, "critic.critic_warmup_steps=4"]) == (
        "critic.critic_warmup_steps=4 leaves the policy none of the run's 4 steps; lower it or raise "
        "trainer.total_steps"
    )
    assert RLConfig.load(None, [*fits, "critic.critic_warmup_steps=3"])
    assert RLConfig.load(None, [*GAE, "critic.critic_warmup_steps=4"]), "how many steps epochs have shows later"

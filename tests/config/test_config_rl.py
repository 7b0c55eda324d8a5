import pytest
from commands import BF16, DISTILL, GAE, RL, message_of

from shardwise.config import ConfigError, CriticConfig, EngineConfig, LoraConfig, RLConfig
from shardwise.config.algorithm import GROUP_ADVANTAGES


def test_more_minibatches_than_samples_are_refused():
    small = [*RL, "rollout.num_prompts=3", "rollout.group_size=2"]
    assert RLConfig.load(None, [*small, "algorithm.num_minibatches=6"]).algorithm.num_minibatches == 6
    assert message_of(RLConfig, [*small, "algorithm.num_minibatches=7"]) == (
        "algorithm.num_minibatches=7 is more than the 6 samples of a step (rollout.num_prompts x rollout.group_size)"
    )


@pytest.mark.parametrize("advantage", ["gae", "rules.py:mine"])
def test_a_critic_stands_beside_gae_or_an_advantage_of_ones_own(advantage):
    assert RLConfig.load(None, [*RL, f"algorithm.advantage={advantage}", "critic={}"]).critic is not None
    assert RLConfig.load(None, [*RL, "algorithm.advantage=rules.py:mine"]).critic is None


TEACHER = "teachers=[{model: {path: t}}]"
UNJUDGED = [*(option for option in RL if not option.startswith("reward.")), "algorithm.advantage=distill", TEACHER]


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
            "rollout.sync_adapter_only=true with rollout.engine=sglang, which takes whole models; set "
            "rollout.engine=embedded or vllm, or rollout.sync_adapter_only=false",
        ),
        (
            [
                *RL,
                "rollout.sync_adapter_only=true",
                "engine.lora={rank: 2}",
                "rollout.engine={type: vllm, sleep_level: 2}",
            ],
            "rollout.sync_adapter_only=true with rollout.engine.sleep_level=2, which drops the model that no weight "
            "sync would bring again; set rollout.engine.sleep_level=1, or rollout.sync_adapter_only=false",
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


def test_layouts_that_are_not_given_are_those_of_the_policy():
    policy = ["engine.fsdp_size=2", "engine.param_dtype=bfloat16", "engine.param_offload=true"]
    config = RLConfig.load(None, [*GAE, *policy, "engine.lora.rank=4"])
    layouts = config.layouts()
    assert list(layouts) == ["engine", "reference", "critic.engine"]
    assert layouts["critic.engine"] == config.engine.model_copy(update={"lora": None})
    assert layouts["reference"] == config.engine.frozen()
    distilled = RLConfig.load(None, [*DISTILL, *policy, "teachers=[{model: {path: t}}]"])
    assert list(distilled.layouts()) == ["engine", "reference", "teachers.0.engine"]
    assert distilled.layouts()["teachers.0.engine"] == distilled.engine.frozen()


def test_a_critic_does_not_take_the_adapters_of_the_policy_with_its_other_keys():
    given = [*GAE, "engine.lora.rank=4", "engine.param_offload=true"]
    config = RLConfig.load(None, [*given, "critic.engine.fsdp_size=1"])
    assert config.layouts()["critic.engine"] == EngineConfig(fsdp_size=1, param_offload=True)
    adapted = RLConfig.load(None, [*given, "critic.engine.lora.rank=2"])
    assert adapted.layouts()["critic.engine"] == EngineConfig(lora=LoraConfig(rank=2), param_offload=True)


def test_a_mistake_in_the_policys_layout_is_told_once():
    message = message_of(RLConfig, [*RL, "algorithm.kl_coef=1", "engine.fsdp_size=0", "reference.ulysses_size=2"])
    assert message == "engine.fsdp_size=0: input should be greater than 0"


def test_f36_a_batch_that_cannot_be_split_is_an_error_before_anything_starts():
    """No optimizer step is without samples. Parts of unequal size are legal: each divides by its own counts."""
    few = [*RL, "rollout.num_prompts=1", "rollout.group_size=3"]
    assert "num_minibatches=4 is more than the 3 samples" in message_of(RLConfig, [*few, "algorithm.num_minibatches=4"])
    assert RLConfig.load(None, [*few, "algorithm.num_minibatches=2"]).algorithm.num_minibatches == 2


def test_a_critic_on_the_layout_of_the_policy_needs_an_optimizer_for_it():
    assert message_of(RLConfig, [*GAE, *BF16, "critic.optimizer.optimizer=muon"]) == (
        "engine.master_dtype=bfloat16 with critic.optimizer.optimizer=muon, which updates float32 weights only; set "
        "engine.master_dtype=float32 or critic.optimizer.optimizer=adamw"
    )
    states = ["engine.optimizer_offload=true", "critic.optimizer.optimizer=adamw_cpu"]
    assert RLConfig.load(None, [*GAE, *states]).engine.optimizer_offload  # of the policy


def test_a_warm_up_of_the_critic_leaves_the_policy_steps():
    fits = [*GAE, "trainer.total_steps=4"]
    assert message_of(RLConfig, [*fits, "critic.critic_warmup_steps=4"]) == (
        "critic.critic_warmup_steps=4 leaves the policy none of the run's 4 steps; lower it or raise "
        "trainer.total_steps"
    )
    assert RLConfig.load(None, [*fits, "critic.critic_warmup_steps=3"])
    assert RLConfig.load(None, [*GAE, "critic.critic_warmup_steps=4"]), "how many steps epochs have shows later"


def test_a_warm_up_of_less_than_no_steps_is_refused():
    with pytest.raises(ConfigError, match=r"^test: critic_warmup_steps=-1: input should be greater than"):
        CriticConfig.parse({"critic_warmup_steps": -1}, origin="test")

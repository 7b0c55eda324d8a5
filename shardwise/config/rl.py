"""The config of `shardwise rl`, and which of its parts fit together."""

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from shardwise.config.algorithm import GROUP_ADVANTAGES, AlgorithmConfig, ClippedValueLoss, ValueLoss, changed_keys
from shardwise.config.base import Config
from shardwise.config.command import (
    SamplingCommandConfig,
    TeacherConfig,
    require_files,
    require_room,
    require_start_without_adapters,
)
from shardwise.config.data import PromptDataConfig
from shardwise.config.engine import (
    EngineConfig,
    FrozenEngineConfig,
    LayoutConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    frozen_layout,
)
from shardwise.config.reward import RewardConfig
from shardwise.config.rollout import RolloutConfig
from shardwise.config.rollout_engine import SglangRollout, VllmRollout
from shardwise.config.trainer import TrainerConfig, require_optimizer_fits, require_states_on_device


class CriticConfig(Config):
    """PPO's critic: a second model that learns the value of every token."""

    model: ModelConfig | None = None
    """The model it starts from: a saved critic, or a causal language model, which gets a value head (drawn from one
    seed, the same in every run and layout); null takes the policy's."""
    engine: EngineConfig | None = None
    """Its layout. Keys that are not given are taken from the policy's `engine`, not from their defaults, except its
    adapters (lora); null takes all of them from there."""
    optimizer: OptimizerConfig = OptimizerConfig.defaults()
    """The critic's optimizer, with a learning rate and schedule of its own."""
    critic_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Critic warm-up: in the first n steps of the run only the critic is trained."""
    value_loss: ValueLoss = ClippedValueLoss.defaults()
    """The loss of a token's value; a name, {name, parameters}, or an import path."""

    def layout(self, policy: EngineConfig) -> EngineConfig:
        """Returns its layout beside that of the policy."""
        return policy.without_adapters() if self.engine is None else self.engine

    def require_policy_steps(self, total_steps: int) -> None:
        """Raises ValueError: a run of so many steps has none that trains the policy."""
        if self.critic_warmup_steps >= total_steps:
            raise ValueError(
                f"critic.critic_warmup_steps={self.critic_warmup_steps} leaves the policy none of the run's "
                f"{total_steps} steps; lower it or raise trainer.total_steps"
            )


class SourceTeacherConfig(TeacherConfig):
    """A frozen model whose logprobs the policy learns to match on its own completions."""

    data_source: str | None = None
    """The data source whose rows it teaches; null teaches the rows that no other teacher has."""


class RLConfig(SamplingCommandConfig):
    """`shardwise rl`: reinforcement learning with verifiable rewards."""

    command: ClassVar[str] = "rl"
    model: ModelConfig
    data: PromptDataConfig = PromptDataConfig.defaults()
    engine: EngineConfig = EngineConfig.defaults()
    rollout: RolloutConfig = RolloutConfig.defaults()
    reward: RewardConfig | None = None
    """How a completion is judged; null, which only algorithm.advantage=distill allows, judges none."""
    reference: FrozenEngineConfig | None = None
    """The layout of the frozen reference policy, where algorithm.kl_coef needs one. Keys that are not given are taken
    from `engine`, not from their defaults; null takes all of them from there."""
    critic: CriticConfig | None = None
    """PPO's critic, which algorithm.advantage=gae needs and a custom advantage may have."""
    teachers: list[SourceTeacherConfig] = Field(default_factory=list)
    """Teachers of on-policy distillation, which algorithm.advantage=distill needs."""
    algorithm: AlgorithmConfig = AlgorithmConfig.defaults()
    trainer: TrainerConfig = TrainerConfig.defaults()

    @property
    def masks_failed(self) -> bool:
        """Whether a completion whose reward failed is left out of training."""
        return self.reward is not None and self.reward.masks_failed

    def layouts(self) -> dict[str, LayoutConfig]:
        """Returns config key -> layout of every engine that works on samples."""
        layouts: dict[str, LayoutConfig] = {
            "engine": self.engine,
            "reference": frozen_layout(self.reference, self.engine),
        }
        if self.critic is not None:
            layouts["critic.engine"] = self.critic.layout(self.engine)
        return layouts | {f"teachers.{n}.engine": one.layout(self.engine) for n, one in enumerate(self.teachers)}

    @model_validator(mode="after")
    def _samples_fit_steps_and_micro_batches(self) -> Self:
        require_files(self.data, self.trainer)
        require_room(self, self.layouts())
        num_samples = self.rollout.num_prompts * self.rollout.group_size
        if self.algorithm.num_minibatches > num_samples:
            raise ValueError(
                f"algorithm.num_minibatches={self.algorithm.num_minibatches} is more than the {num_samples} samples of "
                "a step (rollout.num_prompts x rollout.group_size)"
            )
        overlong = self.algorithm.overlong_penalty
        if overlong is not None and overlong.buffer_tokens > self.rollout.max_response_tokens:
            raise ValueError(
                f"algorithm.overlong_penalty.buffer_tokens={overlong.buffer_tokens} is more than "
                f"rollout.max_response_tokens={self.rollout.max_response_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _reference_is_another_model(self) -> Self:
        if self.algorithm.kl_coef > 0:
            require_start_without_adapters(self.engine, "algorithm.kl_coef")
        if self.reference is not None and self.algorithm.kl_coef == 0:
            raise ValueError(
                "reference has no effect with algorithm.kl_coef=0, which needs no reference policy; remove one of them"
            )
        if self.reference is not None and self.engine.lora is not None:
            raise ValueError(
                "reference has no effect with engine.lora: the reference policy is the policy without its adapter; "
                "remove it"
            )
        return self

    @model_validator(mode="after")
    def _critic_is_there_where_it_has_a_use(self) -> Self:
        advantage = self.algorithm.advantage.name
        if self.critic is None and advantage == "gae":
            raise ValueError("algorithm.advantage=gae needs a critic; add one (critic: {} takes every default)")
        if self.critic is None:
            return self
        if advantage not in ("gae", "custom"):
            raise ValueError(
                f"algorithm.advantage={advantage} has no use for the critic; remove it, or set algorithm.advantage to "
                "gae or to a function of your own"
            )
        value_loss = self.critic.value_loss
        if isinstance(value_loss, ClippedValueLoss) and changed_keys(value_loss) and self.algorithm.num_updates == 1:
            raise ValueError(
                f"critic.value_loss.clip={value_loss.clip} has no effect with one optimizer step per rollout batch, "
                "before which no value has moved; set algorithm.num_minibatches or algorithm.num_epochs above 1, or "
                "remove it"
            )
        if self.trainer.total_steps is not None:
            self.critic.require_policy_steps(self.trainer.total_steps)
        return self

    @model_validator(mode="after")
    def _teachers_are_there_where_they_are_learnt_from(self) -> Self:
        advantage = self.algorithm.advantage.name
        if (advantage == "distill") != bool(self.teachers):
            raise ValueError(
                f"algorithm.advantage={advantage} with {len(self.teachers)} teachers: teachers and "
                "algorithm.advantage=distill belong together"
            )
        sources = [teacher.data_source for teacher in self.teachers]
        if len(set(sources)) < len(sources):
            raise ValueError(f"teachers have the data_source {sources}; give each a source of its own")
        return self

    @model_validator(mode="after")
    def _advantages_have_something_to_compare(self) -> Self:
        advantage = self.algorithm.advantage.name
        if self.rollout.group_size == 1 and advantage in GROUP_ADVANTAGES:
            raise ValueError(
                f"rollout.group_size=1 leaves algorithm.advantage={advantage} without a baseline "
                "(every advantage would be 0); use at least 2"
            )
        if advantage == "gigpo" and self.rollout.environment is None:
            raise ValueError(
                "algorithm.advantage=gigpo compares turns, and without rollout.environment there is one; set "
                "it, or use grpo"
            )
        return self

    @model_validator(mode="after")
    def _dynamic_sampling_finds_what_differs(self) -> Self:
        if self.rollout.dynamic_sampling is None:
            return self
        if self.rollout.group_size == 1:
            raise ValueError(
                "rollout.dynamic_sampling drops groups whose rewards are all equal, which every group of "
                "rollout.group_size=1 is; use at least 2, or remove it"
            )
        if self.algorithm.advantage.name == "distill":
            raise ValueError(
                "rollout.dynamic_sampling drops groups by their rewards, which algorithm.advantage=distill does not "
                "read; remove it"
            )
        return self

    @model_validator(mode="after")
    def _rewards_are_there_where_they_are_read(self) -> Self:
        if self.reward is not None:
            return self
        if self.algorithm.advantage.name != "distill":
            raise ValueError(
                f"reward is missing, which algorithm.advantage={self.algorithm.advantage.name} needs; name what judges "
                "a completion, e.g. reward.functions=rules.py:compute_score"
            )
        readers = {
            "data.validation_files": self.data.validation_files,
            "data.difficulty": self.data.difficulty is not None,
        }
        for key in [key for key, is_given in readers.items() if is_given]:
            raise ValueError(
                f"{key} goes by what is correct, which nothing says without reward; give it or remove {key}"
            )
        return self

    @model_validator(mode="after")
    def _passes_over_the_same_tokens_agree(self) -> Self:
        critic = None if self.critic is None else self.critic.engine
        for key, engine, numbers in (("engine", self.engine, "logprobs"), ("critic.engine", critic, "values")):
            if engine is not None and engine.lora is not None and engine.lora.dropout:
                raise ValueError(
                    f"{key}.lora.dropout={engine.lora.dropout} would make the {numbers} of two passes over the same "
                    "tokens differ by noise; reinforcement learning needs 0"
                )
        return self

    @model_validator(mode="after")
    def _adapters_can_be_synced_alone(self) -> Self:
        if not self.rollout.sync_adapter_only:
            return self
        if self.engine.lora is None:
            raise ValueError(
                "rollout.sync_adapter_only=true needs an adapter: set engine.lora, or rollout.sync_adapter_only=false"
            )
        if self.engine.lora.quantize_base is not None:
            raise ValueError(
                f"rollout.sync_adapter_only=true with engine.lora.quantize_base={self.engine.lora.quantize_base}: the "
                "rollout engine would compute with the base as it is on disk, not with the quantised one that is "
                "trained; set rollout.sync_adapter_only=false"
            )
        match self.rollout.engine:
            case SglangRollout():
                raise ValueError(
                    "rollout.sync_adapter_only=true with rollout.engine=sglang, which takes whole models; set "
                    "rollout.engine=embedded or vllm, or rollout.sync_adapter_only=false"
                )
            case VllmRollout():
                _require_vllm_serves_adapter(self.engine.lora, self.rollout.engine)
        return self

    @model_validator(mode="after")
    def _routers_can_be_replayed(self) -> Self:
        if self.rollout.router_replay and self.engine.compile_layers:
            raise ValueError(
                "rollout.router_replay=true with engine.compile_layers=true: what a compiled router chooses cannot be "
                "replaced; remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _optimizers_fit_their_engines(self) -> Self:
        require_states_on_device(self.engine, self.trainer, engine="engine", optimizer="trainer")
        require_optimizer_fits(self.engine, self.trainer, engine="engine", optimizer="trainer")
        if self.critic is None:
            return self
        keys = {"engine": "engine", "optimizer": "critic.optimizer"}
        if self.critic.engine is not None:
            keys["engine"] = "critic.engine"
            require_states_on_device(self.critic.engine, self.critic.optimizer, **keys)
        require_optimizer_fits(self.critic.layout(self.engine), self.critic.optimizer, **keys)
        return self


def _require_vllm_serves_adapter(lora: LoraConfig, engine: VllmRollout) -> None:
    """Raises ValueError unless vLLM can compute with the adapter beside a base that stays in memory."""
    if engine.sleep_level == 2:
        raise ValueError(
            "rollout.sync_adapter_only=true with rollout.engine.sleep_level=2, which drops the model that no weight "
            "sync would bring again; set rollout.engine.sleep_level=1, or rollout.sync_adapter_only=false"
        )
    given = {
        "use_dora": lora.use_dora,
        "modules_to_save": bool(lora.modules_to_save),
        "target_parameters": bool(lora.target_parameters),
    }
    for key in [key for key, is_given in given.items() if is_given]:
        raise ValueError(
            f"rollout.sync_adapter_only=true with rollout.engine=vllm, which cannot compute with engine.lora.{key}; "
            "remove it, set rollout.sync_adapter_only=false, or rollout.engine=embedded"
        )

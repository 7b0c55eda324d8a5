"""One config class per command. The YAML of a command is exactly the tree of its class."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, ValidationInfo, field_validator, model_validator

from shardwise.config.algorithm import GROUP_ADVANTAGES, AlgorithmConfig, ClippedValueLoss, ValueLoss, changed_keys
from shardwise.config.base import Config, Deadline, PathText
from shardwise.config.data import (
    DataConfig,
    EvalDataConfig,
    PreferenceDataConfig,
    PromptDataConfig,
    SequenceDataConfig,
    SupervisedDataConfig,
)
from shardwise.config.engine import (
    ComputeConfig,
    EngineConfig,
    FrozenEngineConfig,
    LayoutConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
)
from shardwise.config.environment import AgentEnvironment, ToolsEnvironment
from shardwise.config.preference import (
    REFERENCE_FREE,
    BradleyTerry,
    CustomPreference,
    DistillationConfig,
    Dpo,
    PreferenceLoss,
    RewardModelLoss,
)
from shardwise.config.reward import RewardConfig
from shardwise.config.rollout import RolloutConfig, SamplingConfig
from shardwise.config.rollout_engine import VllmRollout
from shardwise.config.trainer import (
    BatchTrainerConfig,
    TrainerConfig,
    require_optimizer_fits,
    require_states_on_device,
)


class _CommandConfig(Config):
    @classmethod
    def commands(cls) -> Mapping[str, type[Config]]:
        """See Config."""
        return RECIPES

    @field_validator("reference", "critic", "teacher", "teachers", mode="before", check_fields=False)
    @classmethod
    def _keys_not_given_are_those_of_engine(cls, given: Any, info: ValidationInfo) -> Any:
        """Fills in the keys that the group of another layout leaves out: from `engine`, as null would for all of
        them."""
        if "engine" not in info.data:  # it has errors of its own
            return given
        engine: EngineConfig = info.data["engine"]
        match info.field_name:
            case "reference":
                return _completed(given, engine.frozen())
            case "critic":
                return _with_layout(given, engine.without_adapters())
            case "teachers" if isinstance(given, list):
                return [_with_layout(teacher, engine.frozen()) for teacher in given]
        return _with_layout(given, engine.frozen())


class SFTConfig(_CommandConfig):
    """`shardwise sft`: supervised fine-tuning."""

    model: ModelConfig
    data: SupervisedDataConfig = SupervisedDataConfig.defaults()
    engine: EngineConfig = EngineConfig.defaults()
    trainer: BatchTrainerConfig = BatchTrainerConfig.defaults()

    @model_validator(mode="after")
    def _sequences_fit(self) -> Self:
        _require_files(self.data, self.trainer)
        _require_room(self.data, {"engine": self.engine})
        _require_no_offload(self.engine, "supervised fine-tuning")
        require_optimizer_fits(self.engine, self.trainer, engine="engine", optimizer="trainer")
        return self


class PreferenceConfig(_CommandConfig):
    """`shardwise preference`: DPO, IPO, SimPO and ORPO on pairs of answers, KTO on labelled ones."""

    model: ModelConfig
    data: PreferenceDataConfig = PreferenceDataConfig.defaults()
    engine: EngineConfig = EngineConfig.defaults()
    loss: PreferenceLoss = Dpo.defaults()
    """The loss of a pair of answers or, with kto, of a labelled answer; a name, {name, parameters}, or an import
    path."""
    reference: FrozenEngineConfig | None = None
    """The layout of the frozen reference policy. Keys that are not given are taken from `engine`, not from their
    defaults; null takes all of them from there."""
    reference_logprobs: Literal["each_step", "before_training"] = "each_step"
    """Where the reference's logprobs come from. each_step: from a frozen second engine, or from the policy without its
    adapters. before_training: from the policy, which scores all rows before its first step, when it still is the
    reference; no second engine."""
    trainer: BatchTrainerConfig = BatchTrainerConfig.defaults()

    @property
    def is_paired(self) -> bool:
        """Whether two answers to a prompt are compared."""
        return self.loss.is_paired if isinstance(self.loss, CustomPreference) else self.loss.name != "kto"

    @property
    def uses_reference(self) -> bool:
        """Whether the loss compares with a reference policy."""
        if isinstance(self.loss, CustomPreference):
            return self.loss.uses_reference
        return self.loss.name not in REFERENCE_FREE

    @property
    def estimates_kl(self) -> bool:
        """Whether every step also scores prompts with answers to other prompts, to estimate how far the policy has
        moved from the reference."""
        return self.uses_reference and not self.is_paired

    @property
    def has_reference_engine(self) -> bool:
        """Whether the reference policy is a second model."""
        return self.uses_reference and self.reference_logprobs == "each_step" and self.engine.lora is None

    def reference_layout(self) -> FrozenEngineConfig:
        """Returns the layout of the reference policy."""
        return self.engine.frozen() if self.reference is None else self.reference

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        _require_files(self.data, self.trainer)
        layouts: dict[str, LayoutConfig] = {"engine": self.engine}
        if self.has_reference_engine:
            layouts["reference"] = self.reference_layout()
        elif self.reference is not None:
            given = "null" if self.engine.lora is None else "given"
            raise ValueError(
                f"reference has no effect with loss={self.loss.name}, reference_logprobs={self.reference_logprobs} and "
                f"engine.lora={given}, which build no second engine; remove it"
            )
        if self.reference_logprobs == "before_training" and (not self.uses_reference or self.estimates_kl):
            why = "compares new combinations in every step" if self.estimates_kl else "has no reference policy"
            raise ValueError(
                f"reference_logprobs=before_training: loss={self.loss.name} {why}; set reference_logprobs=each_step"
            )
        lora = self.engine.lora
        starts_adapted = lora is not None and lora.adapter_path is not None
        if starts_adapted and self.uses_reference and self.reference_logprobs == "each_step":
            raise ValueError(_started_adapter(f"loss={self.loss.name}"))
        _require_room(self.data, layouts, num_together=2 if self.is_paired else 1)
        unpaired, paired = ("response_column", "label_column"), ("chosen_column", "rejected_column")
        _require_defaults(
            self.data, ("margin_column", *(unpaired if self.is_paired else paired)), f"loss={self.loss.name}"
        )
        if not self.has_reference_engine:
            _require_no_offload(self.engine, "preference training without a second engine")
        require_states_on_device(self.engine, self.trainer, engine="engine", optimizer="trainer")
        require_optimizer_fits(self.engine, self.trainer, engine="engine", optimizer="trainer")
        if self.estimates_kl and self.trainer.batch_size == 1:
            raise ValueError(
                f"trainer.batch_size=1 leaves {self.loss.name} no other answer to compare with; use at least 2"
            )
        if self.engine.lora is not None and self.engine.lora.dropout and self.estimates_kl:
            raise ValueError(
                f"engine.lora.dropout makes {self.loss.name}'s estimate of the KL divergence that of another model; "
                "set 0"
            )
        return self


class TeacherConfig(Config):
    """A frozen model that another one learns from."""

    model: ModelConfig
    """The teacher, with the vocabulary of its student."""
    engine: FrozenEngineConfig | None = None
    """Its layout. Keys that are not given are taken from the student's `engine`, not from their defaults; null takes
    all of them from there. In `distill` both work on the same micro-batches, capped by the smaller
    `max_tokens_per_micro_batch` of the two."""


class DistillConfig(_CommandConfig):
    """`shardwise distill`: a student learns a teacher's distributions over the whole vocabulary, on given answers."""

    model: ModelConfig
    data: SupervisedDataConfig = SupervisedDataConfig.defaults()
    engine: EngineConfig = EngineConfig.defaults()
    teacher: TeacherConfig
    distillation: DistillationConfig = DistillationConfig.defaults()
    trainer: BatchTrainerConfig = BatchTrainerConfig.defaults()

    def teacher_layout(self) -> FrozenEngineConfig:
        """Returns the layout of the teacher."""
        return self.engine.frozen() if self.teacher.engine is None else self.teacher.engine

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        _require_files(self.data, self.trainer)
        _require_room(self.data, {"engine": self.engine, "teacher.engine": self.teacher_layout()})
        require_states_on_device(self.engine, self.trainer, engine="engine", optimizer="trainer")
        require_optimizer_fits(self.engine, self.trainer, engine="engine", optimizer="trainer")
        return self


class RewardModelConfig(_CommandConfig):
    """`shardwise reward-model`: a model that scores answers, from pairs of them."""

    model: ModelConfig
    """A saved reward model, or a causal language model, which gets a score head (drawn from one seed, the same in every
    run and layout)."""
    data: PreferenceDataConfig = PreferenceDataConfig.defaults()
    engine: EngineConfig = EngineConfig.defaults()
    loss: RewardModelLoss = BradleyTerry.defaults()
    """The loss of a pair of answers; a name, {name, parameters}, or an import path."""
    trainer: BatchTrainerConfig = BatchTrainerConfig.defaults()

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        _require_files(self.data, self.trainer)
        _require_room(self.data, {"engine": self.engine}, num_together=2)
        _require_defaults(self.data, ("response_column", "label_column"), "reward models, which learn from pairs")
        _require_no_offload(self.engine, "reward-model training")
        require_optimizer_fits(self.engine, self.trainer, engine="engine", optimizer="trainer")
        return self


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


class RLConfig(_CommandConfig):
    """`shardwise rl`: reinforcement learning with verifiable rewards."""

    model: ModelConfig
    data: PromptDataConfig = PromptDataConfig.defaults()
    engine: EngineConfig = EngineConfig.defaults()
    reference: FrozenEngineConfig | None = None
    """The layout of the frozen reference policy, where algorithm.kl_coef needs one. Keys that are not given are taken
    from `engine`, not from their defaults; null takes all of them from there."""
    critic: CriticConfig | None = None
    """PPO's critic, which algorithm.advantage=gae needs and a custom advantage may have."""
    teachers: list[SourceTeacherConfig] = Field(default_factory=list)
    """Teachers of on-policy distillation, which algorithm.advantage=distill needs."""
    rollout: RolloutConfig = RolloutConfig.defaults()
    reward: RewardConfig | None = None
    """How a completion is judged; null, which only algorithm.advantage=distill allows, judges none."""
    algorithm: AlgorithmConfig = AlgorithmConfig.defaults()
    trainer: TrainerConfig = TrainerConfig.defaults()

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        _require_files(self.data, self.trainer)
        self._require_room_for_sequences()
        self._require_parts_of_the_algorithm()
        self._require_fit_for_sampling()
        if self.rollout.router_replay and self.engine.compile_layers:
            raise ValueError(
                "rollout.router_replay=true with engine.compile_layers=true: what a compiled router chooses cannot be "
                "replaced; remove one of the two"
            )
        if self.reward is None:
            self._require_no_use_of_rewards()
        _require_environment(self.reward, self.rollout, self.data)
        _require_context(self.rollout, self.data)
        num_samples = self.rollout.num_prompts * self.rollout.group_size
        if self.algorithm.num_minibatches > num_samples:
            raise ValueError(
                f"algorithm.num_minibatches={self.algorithm.num_minibatches} is more than the {num_samples} samples of "
                "a step (rollout.num_prompts x rollout.group_size)"
            )
        require_states_on_device(self.engine, self.trainer, engine="engine", optimizer="trainer")
        require_optimizer_fits(self.engine, self.trainer, engine="engine", optimizer="trainer")
        if self.critic is not None:
            keys = {"engine": "engine", "optimizer": "critic.optimizer"}
            if self.critic.engine is not None:
                keys["engine"] = "critic.engine"
                require_states_on_device(self.critic.engine, self.critic.optimizer, **keys)
            require_optimizer_fits(self.critic_layout(), self.critic.optimizer, **keys)
            if self.trainer.total_steps is not None:
                self.critic.require_policy_steps(self.trainer.total_steps)
        return self

    @property
    def masks_failed(self) -> bool:
        """Whether a completion whose reward failed is left out of training."""
        return self.reward is not None and self.reward.masks_failed

    def layouts(self) -> dict[str, LayoutConfig]:
        """Returns config key -> layout of every engine that works on samples."""
        layouts: dict[str, LayoutConfig] = {"engine": self.engine, "reference": self.reference_layout()}
        if self.critic is not None:
            layouts["critic.engine"] = self.critic_layout()
        return layouts | {f"teachers.{n}.engine": self.teacher_layout(t) for n, t in enumerate(self.teachers)}

    def reference_layout(self) -> FrozenEngineConfig:
        """Returns the layout of the reference policy."""
        return self.engine.frozen() if self.reference is None else self.reference

    def critic_layout(self) -> EngineConfig:
        """Returns the layout of the critic."""
        if self.critic is None or self.critic.engine is None:
            return self.engine.without_adapters()
        return self.critic.engine

    def teacher_layout(self, teacher: TeacherConfig) -> FrozenEngineConfig:
        """Returns the layout of a teacher."""
        return self.engine.frozen() if teacher.engine is None else teacher.engine

    def _require_room_for_sequences(self) -> None:
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        for name, layout in self.layouts().items():
            if longest > layout.max_tokens_per_micro_batch:
                raise ValueError(
                    f"data.max_prompt_tokens={self.data.max_prompt_tokens} + "
                    f"rollout.max_response_tokens={self.rollout.max_response_tokens} = {longest} is more than "
                    f"{name}.max_tokens_per_micro_batch={layout.max_tokens_per_micro_batch}, and a sequence is never "
                    "split over micro-batches; lower the first two or raise the last"
                )

    def _require_parts_of_the_algorithm(self) -> None:
        advantage = self.algorithm.advantage.name
        if self.reference is not None and self.algorithm.kl_coef == 0:
            raise ValueError(
                "reference has no effect with algorithm.kl_coef=0, which needs no reference policy; remove one of them"
            )
        if self.critic is None and advantage == "gae":
            raise ValueError("algorithm.advantage=gae needs a critic; add one (critic: {} takes every default)")
        if self.critic is not None and advantage not in ("gae", "custom"):
            raise ValueError(
                f"algorithm.advantage={advantage} has no use for the critic; remove it, or set algorithm.advantage to "
                "gae or to a function of your own"
            )
        value_loss = None if self.critic is None else self.critic.value_loss
        if isinstance(value_loss, ClippedValueLoss) and changed_keys(value_loss) and self.algorithm.num_updates == 1:
            raise ValueError(
                f"critic.value_loss.clip={value_loss.clip} has no effect with one optimizer step per rollout batch, "
                "before which no value has moved; set algorithm.num_minibatches or algorithm.num_epochs above 1, or "
                "remove it"
            )
        if (advantage == "distill") != bool(self.teachers):
            raise ValueError(
                f"algorithm.advantage={advantage} with {len(self.teachers)} teachers: teachers and "
                "algorithm.advantage=distill belong together"
            )
        sources = [teacher.data_source for teacher in self.teachers]
        if len(set(sources)) < len(sources):
            raise ValueError(f"teachers have the data_source {sources}; give each a source of its own")
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
        overlong = self.algorithm.overlong_penalty
        if overlong is not None and overlong.buffer_tokens > self.rollout.max_response_tokens:
            raise ValueError(
                f"algorithm.overlong_penalty.buffer_tokens={overlong.buffer_tokens} is more than "
                f"rollout.max_response_tokens={self.rollout.max_response_tokens}"
            )

    def _require_no_use_of_rewards(self) -> None:
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

    @staticmethod
    def _require_plain(lora: LoraConfig) -> None:
        given = {
            "use_dora": lora.use_dora,
            "modules_to_save": bool(lora.modules_to_save),
            "target_parameters": bool(lora.target_parameters),
        }
        for key, is_given in given.items():
            if is_given:
                raise ValueError(
                    f"rollout.sync_adapter_only=true with rollout.engine=vllm, which cannot compute with "
                    f"engine.lora.{key}; remove it, set rollout.sync_adapter_only=false, or rollout.engine=embedded"
                )

    def _require_fit_for_sampling(self) -> None:
        if self.rollout.group_size == 1 and self.rollout.dynamic_sampling is not None:
            raise ValueError(
                "rollout.dynamic_sampling drops groups whose rewards are all equal, which every group of "
                "rollout.group_size=1 is; use at least 2, or remove it"
            )
        if self.algorithm.advantage.name == "distill" and self.rollout.dynamic_sampling is not None:
            raise ValueError(
                "rollout.dynamic_sampling drops groups by their rewards, which algorithm.advantage=distill does not "
                "read; remove it"
            )
        lora = self.engine.lora
        if lora is None and self.rollout.sync_adapter_only:
            raise ValueError(
                "rollout.sync_adapter_only=true needs an adapter: set engine.lora, or rollout.sync_adapter_only=false"
            )
        if lora is not None and self.rollout.sync_adapter_only and lora.quantize_base is not None:
            raise ValueError(
                f"rollout.sync_adapter_only=true with engine.lora.quantize_base={lora.quantize_base}: the rollout "
                "engine would compute with the base as it is on disk, not with the quantised one that is trained; "
                "set rollout.sync_adapter_only=false"
            )
        if lora is not None and self.rollout.sync_adapter_only and isinstance(self.rollout.engine, VllmRollout):
            self._require_plain(lora)
        if lora is not None and lora.adapter_path is not None and self.algorithm.kl_coef > 0:
            raise ValueError(_started_adapter("algorithm.kl_coef"))
        critic = None if self.critic is None else self.critic.engine
        for key, engine, numbers in (("engine", self.engine, "logprobs"), ("critic.engine", critic, "values")):
            if engine is not None and engine.lora is not None and engine.lora.dropout:
                raise ValueError(
                    f"{key}.lora.dropout={engine.lora.dropout} would make the {numbers} of two passes over the same "
                    "tokens differ by noise; reinforcement learning needs 0"
                )
        if lora is not None and self.reference is not None:
            raise ValueError(
                "reference has no effect with engine.lora: the reference policy is the policy without its adapter; "
                "remove it"
            )


class EvalSettings(Config):
    """What `shardwise eval` measures."""

    num_samples: PositiveInt = 1
    """Completions per prompt. 1 decodes greedily; more are sampled at rollout.temperature and give pass@k, mean@n and
    maj@n, on what is judged (the last of several turns), beside the greedy accuracy."""
    output_dir: Annotated[PathText, Field(min_length=1)] = "runs/eval"
    """Where results.json, samples.jsonl and config.yaml go."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seeds the sampling."""
    stall_timeout_seconds: Deadline | None = 7200.0
    """How long rank 0 may sample without finishing a prompt, or judge completions, before the command is taken for hung
    and ends, with the stacks of every rank. null: no limit."""


class EvalConfig(_CommandConfig):
    """`shardwise eval`: accuracy of a model on the validation files, per data source."""

    model: ModelConfig
    data: EvalDataConfig = EvalDataConfig.defaults()
    engine: ComputeConfig = ComputeConfig.defaults()
    rollout: SamplingConfig = SamplingConfig.defaults()
    reward: RewardConfig
    eval: EvalSettings = EvalSettings.defaults()

    @model_validator(mode="after")
    def _has_rows(self) -> Self:
        if not self.data.validation_files:
            raise ValueError("data.validation_files is empty; eval measures on the validation files")
        _require_environment(self.reward, self.rollout, self.data)
        _require_context(self.rollout, self.data)
        return self

    @model_validator(mode="after")
    def _keeps_its_weights(self) -> Self:
        if self.rollout.engine.sleep_level == 2:
            raise ValueError(
                "rollout.engine.sleep_level=2 drops the weights, and eval has no weight sync that would bring them "
                "again; set it to 1 or 0"
            )
        return self


TrainingConfig = SFTConfig | PreferenceConfig | RewardModelConfig | DistillConfig | RLConfig
"""The config of a command that trains."""
RecipeConfig = TrainingConfig | EvalConfig
"""The config of a command that runs on ranks."""
RECIPES: dict[str, type[RecipeConfig]] = {
    "sft": SFTConfig,
    "preference": PreferenceConfig,
    "reward-model": RewardModelConfig,
    "distill": DistillConfig,
    "rl": RLConfig,
    "eval": EvalConfig,
}
"""Name of a command -> its config class."""


def longest_sequence(config: RecipeConfig) -> tuple[str, int]:
    """Returns the keys that limit the sequences of a recipe's models, and how many tokens they allow. Reward models are
    left out: they read the text with tokenizers of their own."""
    if isinstance(config, RLConfig | EvalConfig):
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        return "data.max_prompt_tokens + rollout.max_response_tokens", longest
    return "data.max_sequence_tokens", config.data.max_sequence_tokens


def _completed(given: Any, default: Config) -> Any:
    """Returns a group of keys with those that it lacks taken from `default`, in the groups within it too."""
    if not isinstance(given, dict):
        return given
    inner = {key: _completed(given[key], value) for key, value in default if key in given and isinstance(value, Config)}
    return dict(default) | given | inner


def _with_layout(given: Any, default: LayoutConfig) -> Any:
    """Returns the group of a model with its layout (`engine`), if it has one, completed from `default`."""
    if not isinstance(given, dict) or "engine" not in given:
        return given
    return given | {"engine": _completed(given["engine"], default)}


def _started_adapter(what: str) -> str:
    return (
        f"{what} compares with the policy at its start, and that is the model with the adapter of "
        "engine.lora.adapter_path, which the policy without its adapters is not; merge it first (`shardwise export`) "
        "and start from the result"
    )


def _require_environment(reward: RewardConfig | None, rollout: SamplingConfig, data: EvalDataConfig) -> None:
    if reward is not None and reward.reads_environment and rollout.environment is None:
        raise ValueError(
            "reward.functions has an entry of type environment, but there is none; set "
            "rollout.environment=FILE.py:Class, or remove the entry"
        )
    has_tools = isinstance(rollout.environment, ToolsEnvironment)
    if has_tools and not data.apply_chat_template:
        raise ValueError(
            "rollout.environment.type=tools needs the chat template, which tells the policy of its tools and of what "
            "they return; set data.apply_chat_template=true"
        )
    if isinstance(rollout.environment, AgentEnvironment) and not data.apply_chat_template:
        raise ValueError(
            "rollout.environment.type=agent needs the chat template, which turns the messages of its requests into "
            "tokens; set data.apply_chat_template=true"
        )
    if not has_tools and data.tools_column != EvalDataConfig.model_fields["tools_column"].default:
        raise ValueError(f"data.tools_column={data.tools_column} has no effect without rollout.environment.type=tools")


def _require_context(rollout: SamplingConfig, data: EvalDataConfig) -> None:
    """Checks that the longest prompt with the longest completion fits into the rollout engine's context."""
    if rollout.engine.context_limit is None:
        return
    key, limit = rollout.engine.context_limit
    longest = data.max_prompt_tokens + rollout.max_response_tokens
    if longest > limit:
        raise ValueError(
            f"data.max_prompt_tokens={data.max_prompt_tokens} + rollout.max_response_tokens="
            f"{rollout.max_response_tokens} = {longest} is more than {key}={limit}; lower the first two, raise the "
            "last to the model's context at most, or remove it"
        )


def _require_files(data: DataConfig, trainer: TrainerConfig) -> None:
    """Checks that there are files to train on, and held-out ones where trainer.keep_best needs them."""
    if not data.train_files:
        raise ValueError("data.train_files is empty; give at least one jsonl or parquet file or datasets folder")
    best = trainer.keep_best
    if best is not None and best.metric.startswith("val/") and not data.validation_files:
        raise ValueError(
            f"trainer.keep_best.metric={best.metric} is measured on held-out rows, and data.validation_files is empty; "
            "give some, or a metric that is not of val/"
        )


def _require_room(data: SequenceDataConfig, layouts: Mapping[str, LayoutConfig], *, num_together: int = 1) -> None:
    """Checks that the longest sequences that must share a micro-batch fit into one, in every engine."""
    needed = num_together * data.max_sequence_tokens
    for name, layout in layouts.items():
        if needed > layout.max_tokens_per_micro_batch:
            given, rule = f"data.max_sequence_tokens={data.max_sequence_tokens}", "a sequence is never split"
            if num_together > 1:
                given, rule = f"{num_together} x {given} = {needed}", "a pair is never split"
            raise ValueError(
                f"{given} is more than {name}.max_tokens_per_micro_batch={layout.max_tokens_per_micro_batch}, and "
                f"{rule} over micro-batches; lower the first or raise the second"
            )


def _require_defaults(data: PreferenceDataConfig, keys: Iterable[str], where: str) -> None:
    """Checks that columns which nothing reads are not set."""
    for key in keys:
        if (given := getattr(data, key)) != PreferenceDataConfig.model_fields[key].default:
            raise ValueError(f"data.{key}={given} has no effect with {where}; remove it")


def _require_no_offload(engine: EngineConfig, what: str) -> None:
    for key in ("param_offload", "optimizer_offload"):
        if getattr(engine, key):
            raise ValueError(
                f"engine.{key}=true has no effect in {what}, where nothing else needs the device; "
                "remove it (engine.offload_policy=true keeps everything in host memory)"
            )

"""One config class per command, whose tree is exactly the YAML of the command; that of `rl` has a file of its own."""

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, PositiveInt, model_validator

from shardwise.config.base import Config, Deadline, PathText
from shardwise.config.command import (
    RowsCommandConfig,
    SamplingCommandConfig,
    TeacherConfig,
    require_files,
    require_room,
    require_start_without_adapters,
)
from shardwise.config.data import EvalDataConfig, PreferenceDataConfig, SupervisedDataConfig
from shardwise.config.engine import (
    ComputeConfig,
    EngineConfig,
    FrozenEngineConfig,
    LayoutConfig,
    ModelConfig,
    frozen_layout,
)
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
from shardwise.config.rl import RLConfig
from shardwise.config.rollout import SamplingConfig
from shardwise.config.trainer import BatchTrainerConfig, require_optimizer_fits, require_states_on_device


class SFTConfig(RowsCommandConfig):
    """`shardwise sft`: supervised fine-tuning."""

    command: ClassVar[str] = "sft"
    model: ModelConfig
    data: SupervisedDataConfig = SupervisedDataConfig.defaults()
    engine: EngineConfig = EngineConfig.defaults()
    trainer: BatchTrainerConfig = BatchTrainerConfig.defaults()

    @model_validator(mode="after")
    def _sequences_fit(self) -> Self:
        require_files(self.data, self.trainer)
        require_room(self, {"engine": self.engine})
        _require_no_offload(self.engine, "supervised fine-tuning")
        require_optimizer_fits(self.engine, self.trainer, engine="engine", optimizer="trainer")
        return self


class PreferenceConfig(RowsCommandConfig):
    """`shardwise preference`: DPO, IPO, SimPO and ORPO on pairs of answers, KTO on labelled ones."""

    command: ClassVar[str] = "preference"
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

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        require_files(self.data, self.trainer)
        layouts: dict[str, LayoutConfig] = {"engine": self.engine}
        if self.has_reference_engine:
            layouts["reference"] = frozen_layout(self.reference, self.engine)
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
        if self.uses_reference and self.reference_logprobs == "each_step":
            require_start_without_adapters(self.engine, f"loss={self.loss.name}")
        require_room(self, layouts, num_together=2 if self.is_paired else 1)
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


class DistillConfig(RowsCommandConfig):
    """`shardwise distill`: a student learns a teacher's distributions over the whole vocabulary, on given answers."""

    command: ClassVar[str] = "distill"
    model: ModelConfig
    data: SupervisedDataConfig = SupervisedDataConfig.defaults()
    engine: EngineConfig = EngineConfig.defaults()
    teacher: TeacherConfig
    distillation: DistillationConfig = DistillationConfig.defaults()
    trainer: BatchTrainerConfig = BatchTrainerConfig.defaults()

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        require_files(self.data, self.trainer)
        require_room(self, {"engine": self.engine, "teacher.engine": self.teacher.layout(self.engine)})
        require_states_on_device(self.engine, self.trainer, engine="engine", optimizer="trainer")
        require_optimizer_fits(self.engine, self.trainer, engine="engine", optimizer="trainer")
        return self


class RewardModelConfig(RowsCommandConfig):
    """`shardwise reward-model`: a model that scores answers, from pairs of them."""

    command: ClassVar[str] = "reward-model"
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
        require_files(self.data, self.trainer)
        require_room(self, {"engine": self.engine}, num_together=2)
        _require_defaults(self.data, ("response_column", "label_column"), "reward models, which learn from pairs")
        _require_no_offload(self.engine, "reward-model training")
        require_optimizer_fits(self.engine, self.trainer, engine="engine", optimizer="trainer")
        return self


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


class EvalConfig(SamplingCommandConfig):
    """`shardwise eval`: accuracy of a model on the validation files, per data source."""

    command: ClassVar[str] = "eval"
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
RECIPES: dict[str, type[RecipeConfig]] = {cls.command: cls for cls in get_args(RecipeConfig)}
"""Name of a command -> its config class."""


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

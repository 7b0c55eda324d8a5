"""One config class per command. The YAML of a command is exactly the tree of its class."""

from typing import Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from shardwise.config.base import Config
from shardwise.config.data import EvalDataConfig, PromptDataConfig, SupervisedDataConfig
from shardwise.config.engine import ComputeConfig, EngineConfig, FrozenEngineConfig, ModelConfig, OptimizerConfig
from shardwise.config.reward import RewardConfig
from shardwise.config.rl import AlgorithmConfig, GenerationConfig, RolloutConfig


class TrainerConfig(OptimizerConfig):
    """The loop around the optimizer."""

    output_dir: str = "runs/latest"
    """Everything the run writes goes here."""
    total_steps: PositiveInt | None = None
    """Steps of the run; null runs num_epochs over the training rows."""
    num_epochs: PositiveInt = 1
    """Passes over the training rows where total_steps is null."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Orders rows, seeds sampling. The same seed on the same layout gives the same metrics.jsonl."""
    validate_every_steps: Annotated[int, Field(ge=0)] = 0
    """Validate after every so many steps; 0 only at the end. Without validation files nothing is validated."""
    save_every_steps: Annotated[int, Field(ge=0)] = 0
    """Save a checkpoint after every so many steps; 0 only at the end."""
    tensorboard: bool = True
    """Write TensorBoard events to output_dir/tensorboard."""

    def optimizer_config(self) -> OptimizerConfig:
        """The part that an engine needs."""
        return OptimizerConfig(**{name: getattr(self, name) for name in OptimizerConfig.model_fields})


class SFTTrainerConfig(TrainerConfig):
    """The loop of supervised fine-tuning."""

    batch_size: PositiveInt = 32
    """Sequences of one optimizer step, over all ranks."""


class SFTConfig(Config):
    """`shardwise sft`: supervised fine-tuning."""

    model: ModelConfig
    data: SupervisedDataConfig = SupervisedDataConfig()
    engine: EngineConfig = EngineConfig()
    trainer: SFTTrainerConfig = SFTTrainerConfig()

    @model_validator(mode="after")
    def _sequences_fit(self) -> Self:
        _require_train_files(self.data.train_files)
        if self.data.max_sequence_tokens > self.engine.max_tokens_per_micro_batch:
            raise ValueError(
                f"data.max_sequence_tokens={self.data.max_sequence_tokens} is more than "
                f"engine.max_tokens_per_micro_batch={self.engine.max_tokens_per_micro_batch}, and a sequence is never "
                "split over micro-batches; lower the first or raise the second"
            )
        for key in ("param_offload", "optimizer_offload"):
            if getattr(self.engine, key):
                raise ValueError(
                    f"engine.{key}=true has no effect in supervised fine-tuning, where nothing else needs the device; "
                    "remove it (engine.offload_policy=true keeps everything in host memory)"
                )
        return self


class RLConfig(Config):
    """`shardwise rl`: reinforcement learning with verifiable rewards."""

    model: ModelConfig
    data: PromptDataConfig = PromptDataConfig()
    engine: EngineConfig = EngineConfig()
    reference: FrozenEngineConfig | None = None
    """The layout of the frozen reference policy, where algorithm.kl_coef needs one; null takes that of the policy."""
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()

    @model_validator(mode="after")
    def _sequences_fit(self) -> Self:
        _require_train_files(self.data.train_files)
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        layouts = {"engine": self.engine, "reference": self.reference_layout()}
        for name, layout in layouts.items():
            if longest > layout.max_tokens_per_micro_batch:
                raise ValueError(
                    f"data.max_prompt_tokens={self.data.max_prompt_tokens} + "
                    f"rollout.max_response_tokens={self.rollout.max_response_tokens} = {longest} is more than "
                    f"{name}.max_tokens_per_micro_batch={layout.max_tokens_per_micro_batch}, and a sequence is never "
                    "split over micro-batches; lower the first two or raise the last"
                )
        if self.reference is not None and self.algorithm.kl_coef == 0:
            raise ValueError(
                "reference has no effect with algorithm.kl_coef=0, which needs no reference policy; remove one of them"
            )
        if self.engine.optimizer_offload and self.trainer.optimizer == "adamw_cpu":
            raise ValueError(
                "trainer.optimizer=adamw_cpu already keeps its states in host memory, so engine.optimizer_offload=true "
                "has no effect; remove one of them"
            )
        self._require_fit_for_sampling()
        if self.rollout.group_size == 1:
            raise ValueError(
                f"rollout.group_size=1 leaves algorithm.advantage={self.algorithm.advantage} without a baseline "
                "(every advantage would be 0); use at least 2"
            )
        num_samples = self.rollout.num_prompts * self.rollout.group_size
        if self.algorithm.num_minibatches > num_samples:
            raise ValueError(
                f"algorithm.num_minibatches={self.algorithm.num_minibatches} is more than the {num_samples} samples of "
                "a step (rollout.num_prompts x rollout.group_size)"
            )
        return self

    def reference_layout(self) -> FrozenEngineConfig:
        """How the reference policy is laid out."""
        return self.engine.frozen() if self.reference is None else self.reference

    def _require_fit_for_sampling(self) -> None:
        lora = self.engine.lora
        if lora is not None and lora.dropout:
            raise ValueError(
                f"engine.lora.dropout={lora.dropout} would make the logprobs of two passes over the same tokens "
                "differ, and their ratio noise; reinforcement learning needs 0"
            )
        if lora is not None and self.reference is not None:
            raise ValueError(
                "reference has no effect with engine.lora: the reference policy is the policy without its adapter; "
                "remove it"
            )


class EvalSettings(Config):
    """What `shardwise eval` measures."""

    num_samples: PositiveInt = 1
    """Completions per prompt. 1 decodes greedily; more are sampled at rollout.temperature and give pass@k, mean@n
    and maj@n beside the greedy accuracy."""
    output_dir: str = "runs/eval"
    """Where results.json and samples.jsonl go."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seeds the sampling."""


class EvalConfig(Config):
    """`shardwise eval`: accuracy of a model on the validation files, per data source."""

    model: ModelConfig
    data: EvalDataConfig = EvalDataConfig()
    engine: ComputeConfig = ComputeConfig()
    rollout: GenerationConfig = GenerationConfig()
    reward: RewardConfig
    eval: EvalSettings = EvalSettings()

    @model_validator(mode="after")
    def _has_rows(self) -> Self:
        if not self.data.validation_files:
            raise ValueError("data.validation_files is empty; eval measures on the validation files")
        return self


def _require_train_files(files: list[str]) -> None:
    if not files:
        raise ValueError("data.train_files is empty; give at least one jsonl or parquet file or datasets folder")

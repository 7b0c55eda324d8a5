"""What the configs of several commands share: keys, models beside the trained one, and what they are held to."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import ValidationInfo, field_validator, model_validator

from shardwise.config.base import Config
from shardwise.config.data import DataConfig, EvalDataConfig, SequenceDataConfig
from shardwise.config.engine import (
    ComputeConfig,
    EngineConfig,
    FrozenEngineConfig,
    LayoutConfig,
    ModelConfig,
    frozen_layout,
)
from shardwise.config.environment import AgentEnvironment, ToolsEnvironment
from shardwise.config.reward import RewardConfig
from shardwise.config.rollout import SamplingConfig
from shardwise.config.trainer import TrainerConfig

AS_ENGINE = ("reference.", "critic.engine.", "teacher.engine.", "teachers.engine.")
"""How keys begin whose defaults are the values of the same keys of `engine`; `critic.engine.lora` has its own."""


class CommandConfig(Config):
    """The config of a command that runs on ranks."""

    command: ClassVar[str]
    """What it is called on the command line."""

    @classmethod
    def commands(cls) -> Mapping[str, type[Config]]:
        """See Config."""
        kinds = (RowsCommandConfig, SamplingCommandConfig)
        return {one.command: one for kind in kinds for one in kind.__subclasses__()}

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


class RowsCommandConfig(CommandConfig):
    """The config of a command that trains on rows as they are."""

    model: ModelConfig
    data: SequenceDataConfig


class SamplingCommandConfig(CommandConfig):
    """The config of a command that samples completions of prompts."""

    model: ModelConfig
    data: EvalDataConfig
    engine: ComputeConfig
    rollout: SamplingConfig
    reward: RewardConfig | None

    @model_validator(mode="after")
    def _environment_has_what_it_needs(self) -> Self:
        environment = self.rollout.environment
        if self.reward is not None and self.reward.reads_environment and environment is None:
            raise ValueError(
                "reward.functions has an entry of type environment, but there is none; set "
                "rollout.environment=FILE.py:Class, or remove the entry"
            )
        has_tools = isinstance(environment, ToolsEnvironment)
        if has_tools and not self.data.apply_chat_template:
            raise ValueError(
                "rollout.environment.type=tools needs the chat template, which tells the policy of its tools and of "
                "what they return; set data.apply_chat_template=true"
            )
        if isinstance(environment, AgentEnvironment) and not self.data.apply_chat_template:
            raise ValueError(
                "rollout.environment.type=agent needs the chat template, which turns the messages of its requests "
                "into tokens; set data.apply_chat_template=true"
            )
        if not has_tools and self.data.tools_column != EvalDataConfig.model_fields["tools_column"].default:
            raise ValueError(
                f"data.tools_column={self.data.tools_column} has no effect without rollout.environment.type=tools"
            )
        return self

    @model_validator(mode="after")
    def _sequences_fit_the_context_of_the_rollout_engine(self) -> Self:
        if self.rollout.engine.context_limit is None:
            return self
        key, limit = self.rollout.engine.context_limit
        said, num_tokens = longest_sequence(self)
        if num_tokens > limit:
            raise ValueError(
                f"{said} tokens are more than {key}={limit}; lower the former, raise the latter to the "
                "model's context at most, or remove it"
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

    def layout(self, student: EngineConfig) -> FrozenEngineConfig:
        """Returns its layout beside that of its student."""
        return frozen_layout(self.engine, student)


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


def longest_sequence(config: RowsCommandConfig | SamplingCommandConfig) -> tuple[str, int]:
    """Returns how many tokens the sequences of a command's models may have: in words, with the keys that say so, and as
    a number. Reward models are left out: they read the text with tokenizers of their own."""
    if isinstance(config, RowsCommandConfig):
        num_tokens = config.data.max_sequence_tokens
        return f"data.max_sequence_tokens={num_tokens}", num_tokens
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    num_tokens = prompt + response
    return f"data.max_prompt_tokens={prompt} + rollout.max_response_tokens={response} = {num_tokens}", num_tokens


def require_room(
    config: RowsCommandConfig | SamplingCommandConfig, layouts: Mapping[str, LayoutConfig], *, num_together: int = 1
) -> None:
    """Raises ValueError unless the longest sequences fit into a micro-batch of every engine.

    Args:
        layouts: config key -> layout of every engine that works on them.
        num_together: how many sequences must share a micro-batch.
    """
    said, num_tokens = longest_sequence(config)
    whole = "a sequence"
    if num_together > 1:
        num_tokens *= num_together
        said, whole = f"{num_together} x {said} = {num_tokens}", "a pair"
    for name, layout in layouts.items():
        if num_tokens > layout.max_tokens_per_micro_batch:
            raise ValueError(
                f"{said} tokens are more than {name}.max_tokens_per_micro_batch="
                f"{layout.max_tokens_per_micro_batch}, and {whole} is never split over micro-batches; lower the former "
                "or raise the latter"
            )


def require_files(data: DataConfig, trainer: TrainerConfig) -> None:
    """Raises ValueError unless there are files to train on, and held-out ones where trainer.keep_best needs them."""
    if not data.train_files:
        raise ValueError("data.train_files is empty; give at least one jsonl or parquet file or datasets folder")
    best = trainer.keep_best
    if best is not None and best.metric.startswith("val/") and not data.validation_files:
        raise ValueError(
            f"trainer.keep_best.metric={best.metric} is measured on held-out rows, and data.validation_files is empty; "
            "give some, or a metric that is not of val/"
        )


def require_start_without_adapters(engine: EngineConfig, what: str) -> None:
    """Raises ValueError: `what` compares with the policy at its start, for which the policy without its adapters is
    taken, and it starts from an adapter."""
    if engine.lora is not None and engine.lora.adapter_path is not None:
        raise ValueError(
            f"{what} compares with the policy at its start, and that is the model with the adapter of "
            "engine.lora.adapter_path, which the policy without its adapters is not; merge it first "
            "(`shardwise export`) and start from the result"
        )

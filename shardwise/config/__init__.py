"""The typed configuration: torch-free, frozen, without unknown keys. The YAML is exactly this tree."""

from shardwise.config.base import Config, key_paths
from shardwise.config.data import DataConfig, EvalDataConfig, HeldOutData, PromptDataConfig, SupervisedDataConfig
from shardwise.config.engine import (
    ComputeConfig,
    EngineConfig,
    FrozenEngineConfig,
    LayoutConfig,
    LoraConfig,
    ModelConfig,
    ModulePrecisionConfig,
    OptimizerConfig,
    WrapPolicyConfig,
)
from shardwise.config.errors import (
    ConfigError,
    DataError,
    ExportError,
    ModelError,
    RewardError,
    TrainingError,
    UserError,
)
from shardwise.config.recipes import EvalConfig, EvalSettings, RLConfig, SFTConfig, SFTTrainerConfig, TrainerConfig
from shardwise.config.reward import FunctionReward, JudgeReward, RewardConfig
from shardwise.config.rl import AlgorithmConfig, GenerationConfig, RolloutConfig

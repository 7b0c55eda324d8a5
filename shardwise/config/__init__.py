"""The typed configuration: torch-free, frozen, without unknown keys. The YAML is exactly this tree."""

from shardwise.config.algorithm import AlgorithmConfig, ClipCov, Gae, Gdpo, Gigpo, KlCov, SeqMeanTokenSumNorm
from shardwise.config.base import Choice, Config, key_paths, leaves, parts_of
from shardwise.config.command import TeacherConfig, longest_sequence
from shardwise.config.custom import Custom
from shardwise.config.data import (
    DataConfig,
    EvalDataConfig,
    HeldOutData,
    PreferenceDataConfig,
    PromptDataConfig,
    ReasoningGymTask,
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
    ModulePrecisionConfig,
    OptimizerConfig,
    WrapPolicyConfig,
    frozen_layout,
)
from shardwise.config.environment import (
    AgentEnvironment,
    CallFormat,
    CustomEnvironment,
    EnvironmentConfig,
    ToolsEnvironment,
)
from shardwise.config.errors import (
    ConfigError,
    DamagedError,
    DataError,
    EngineLostError,
    ExportError,
    JudgeLostError,
    ModelError,
    NotFiniteError,
    PeerLostError,
    RewardError,
    TrainingError,
    UserError,
    as_user_error,
    error_text,
    in_one_line,
)
from shardwise.config.kl import AdaptiveKl, KlController
from shardwise.config.placement import Colocated, Split
from shardwise.config.preference import (
    BradleyTerry,
    CustomPreference,
    DistillationConfig,
    JensenShannon,
    Kto,
    PreferenceLoss,
    RewardModelLoss,
)
from shardwise.config.recipes import (
    RECIPES,
    DistillConfig,
    EvalConfig,
    EvalSettings,
    PreferenceConfig,
    RecipeConfig,
    RewardModelConfig,
    SFTConfig,
    TrainingConfig,
)
from shardwise.config.resume import (
    allows_other_rows,
    changes_of_state,
    changes_that_matter,
    is_among,
    keys_to_allow,
    require_known_keys,
    require_known_length,
    without_places,
)
from shardwise.config.reward import EnvironmentReward, FunctionReward, JudgeReward, ModelReward, RewardConfig
from shardwise.config.rl import CriticConfig, RLConfig, SourceTeacherConfig
from shardwise.config.rollout import LARGEST_TOP_K, RolloutConfig, SamplingConfig
from shardwise.config.rollout_correction import MismatchRejection, RatioWeights, RolloutCorrectionConfig
from shardwise.config.rollout_engine import EmbeddedRollout, EngineProcessConfig, SglangRollout, VllmRollout
from shardwise.config.temperature import LARGEST_TEMPERATURE, LEAST_TEMPERATURE
from shardwise.config.trainer import BatchTrainerConfig, KeepBestConfig, TrainerConfig

"""How completions are sampled, and how many, where and when for a step of reinforcement learning."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from shardwise.config.base import Config
from shardwise.config.environment import EnvironmentConfig
from shardwise.config.placement import Colocated, Placement, Split
from shardwise.config.rollout_engine import (
    SGLANG_BANS_NO_TOKENS,
    SGLANG_TAKES_NO_MIN_P,
    EmbeddedRollout,
    RolloutEngineConfig,
    SglangRollout,
    VllmRollout,
)
from shardwise.config.temperature import Temperature

VLLM_LEAST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this."""
VLLM_LARGEST_TEMPERATURE = 2
"""vLLM refuses higher temperatures."""
LARGEST_TOP_K = 2**31 - 1
"""SGLang keeps top_k in 32 bits."""


class SamplingConfig(Config):
    """How completions are sampled."""

    engine: RolloutEngineConfig = EmbeddedRollout.defaults()
    """The engine that samples: embedded, vllm or sglang, alone or as the type in a group of keys."""
    temperature: Temperature = 1.0
    """Logits are divided by this, 1e-6 to 1e6, before sampling; rollout and trainer logprobs are of that
    distribution."""
    top_k: Annotated[int, Field(ge=0, le=LARGEST_TOP_K)] = 0
    """Sample from the k most likely tokens; 0 disables it. Like top_p and min_p it restricts sampling and changes no
    logprobs: they are those of the policy at the temperature, in rollout and training alike."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: sample from the most likely tokens that together have this probability; 1 disables it."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens less likely than this times the most likely token's probability; 0 disables it."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Strings that end a turn as soon as its text holds one of them; the tokens that wrote it are kept. Text has no
    special tokens: those go into stop_token_ids."""
    stop_token_ids: list[NonNegativeInt] = Field(default_factory=list)
    """Tokens that end a turn, beside the model's own end-of-sequence tokens."""
    bad_token_ids: list[NonNegativeInt] = Field(default_factory=list)
    """Tokens that are never drawn."""
    max_response_tokens: PositiveInt = 256
    """A completion ends at an end-of-sequence token or here; with an environment, all turns and answers together."""
    max_concurrent_sequences: PositiveInt = 128
    """The most rows that one rank decodes at a time; a finished row's place goes to the next request."""
    environment: EnvironmentConfig | None = None
    """What answers the policy between its turns: a class of your own, by its import path or as a group of keys, tools
    (type: tools), or an agent that asks for the turns (type: agent). null: a completion is one turn."""

    @model_validator(mode="after")
    def _vllm_can_sample_so(self) -> Self:
        if not isinstance(self.engine, VllmRollout):
            return self
        if self.temperature < VLLM_LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature:g}: engine=vllm would sample at {VLLM_LEAST_TEMPERATURE:g} without a "
                f"word; use at least that, or engine=embedded"
            )
        if self.temperature > VLLM_LARGEST_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature:g}: engine=vllm samples at {VLLM_LARGEST_TEMPERATURE} at most; use "
                "that, or engine=embedded"
            )
        restricting = {
            "top_k": self.top_k > 0,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "bad_token_ids": bool(self.bad_token_ids),
        }
        given = [name for name, restricts in restricting.items() if restricts]
        if given and not self.engine.may_ban_tokens(self.temperature):
            raise ValueError(
                f"{', '.join(given)} with temperature={self.temperature:g}: engine=vllm can give no logprobs of the "
                f"policy at a temperature once tokens are left out; set temperature=1, remove {', '.join(given)}, or "
                "use engine=embedded"
            )
        return self

    @model_validator(mode="after")
    def _sglang_can_sample_so(self) -> Self:
        if not isinstance(self.engine, SglangRollout):
            return self
        if self.bad_token_ids and not self.engine.may_ban_tokens(self.temperature):
            raise ValueError(SGLANG_BANS_NO_TOKENS)
        if self.min_p:
            raise ValueError(f"min_p={self.min_p:g} {SGLANG_TAKES_NO_MIN_P}")
        return self


class DynamicSamplingConfig(Config):
    """DAPO's dynamic sampling: groups whose completions do not differ are replaced until the batch is full."""

    by: Literal["reward", "correct"] = "reward"
    """What has to differ within a group: rewards, or correctness (reward.correct_at). With a reward for length or
    format nearly all rewards differ, so use correct."""

    max_rounds: PositiveInt = 10
    """The most rounds of sampling for one step; after the last, the step trains on what was found, and says how much
    that is."""


class RolloutConfig(SamplingConfig):
    """How much is sampled from the policy for one step."""

    num_prompts: PositiveInt = 8
    """Prompts of one step, over all ranks."""
    group_size: PositiveInt = 8
    """Completions sampled for each prompt; they form the group whose rewards are compared."""

    probe_every_syncs: NonNegativeInt = 50
    """After the first weight sync and every n-th, the rollout engine and the trainer have to give two dozen known
    tokens the same logprobs, or the run stops; 0 never compares them."""

    sync_adapter_only: bool = False
    """With engine.lora: only the adapter's weights travel in a weight sync, and the rollout engine computes with them
    beside the base model, as training does; false merges them first. Not for engine=sglang; engine=vllm takes it
    without engine.lora.use_dora and modules_to_save."""

    router_replay: bool = False
    """Mixtures of experts: in training, tokens go to the experts that they went to when they were sampled. Needs
    engine=embedded on ranks that train too, without an environment, and nothing compiled."""

    dynamic_sampling: DynamicSamplingConfig | None = None
    """Replace groups that teach nothing (DAPO); null keeps them."""

    placement: Placement = Colocated.defaults()
    """colocated: every rank trains and samples in turn. split: the last ranks only sample."""
    max_staleness: NonNegativeInt = 0
    """The largest lag, in policy updates, between the weights that sampled a completion and those that are trained on
    it. 0 samples after each step; 1 samples for the next step during this one; more lets sampling run further ahead.
    Needs placement=split."""
    partial: bool = False
    """Partial rollouts: a weight sync interrupts completions in flight, which continue under the new weights. Each
    token carries the version that sampled it; max_staleness bounds the oldest. Needs max_staleness of
    1 or more, and not engine=sglang; what is sampled then depends on timing, so a run does not repeat bit for bit."""

    @model_validator(mode="after")
    def _staleness_needs_ranks(self) -> Self:
        if self.max_staleness and self.split is None:
            raise ValueError(
                f"max_staleness={self.max_staleness} samples while training goes on, which ranks that do both in turn "
                "cannot; set rollout.placement=split, or max_staleness=0"
            )
        if self.partial and not self.max_staleness:
            raise ValueError(
                "partial=true interrupts what is sampled while training goes on, and with max_staleness=0 nothing is; "
                "set rollout.max_staleness to 1 or more, or partial=false"
            )
        if self.partial and isinstance(self.engine, SglangRollout):
            raise ValueError(
                "partial=true with engine=sglang: it cannot be interrupted; set engine=embedded or vllm, or "
                "partial=false"
            )
        return self

    @model_validator(mode="after")
    def _experts_can_be_replayed(self) -> Self:
        if not self.router_replay:
            return self
        embedded = isinstance(self.engine, EmbeddedRollout)
        problems = {
            f"engine={self.engine.type}, which does not tell which experts it chose": not embedded,
            "engine.process": embedded and self.engine.process is not None,
            "engine.compile_decode=true": isinstance(self.engine, EmbeddedRollout) and self.engine.compile_decode,
            "environment": self.environment is not None,
            "placement=split": self.split is not None,
        }
        for problem, is_present in problems.items():
            if is_present:
                raise ValueError(
                    f"router_replay=true with {problem}: choices of experts are kept by engine=embedded in the process "
                    "of a rank that trains, for completions of one turn; remove one of the two"
                )
        return self

    @model_validator(mode="after")
    def _engine_can_stand_there(self) -> Self:
        if self.split is not None and self.engine.sleep_level:
            raise ValueError(
                f"placement=split with engine.sleep_level={self.engine.sleep_level}: ranks that only sample have no "
                "trainer to give memory to; set engine.sleep_level=0, or placement=colocated"
            )
        if isinstance(self.engine, VllmRollout) and self.engine.process is None and self.split is not None:
            raise ValueError(
                "placement=split with engine=vllm: in the process of a rank vLLM forms its groups over all ranks of "
                "the job, and only some of them would; set rollout.engine.process={}, which gives it one of its own, "
                "placement=colocated, or engine=embedded"
            )
        return self

    @property
    def split(self) -> Split | None:
        """The ranks that only sample; None where all ranks train and sample in turn."""
        return self.placement if isinstance(self.placement, Split) else None

    def sampling(self) -> SamplingConfig:
        """Returns the keys that a rollout engine needs."""
        return SamplingConfig(**{name: getattr(self, name) for name in SamplingConfig.model_fields})

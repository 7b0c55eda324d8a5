"""What reinforcement learning adds: rollout, reward, algorithm."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from shardwise.config.base import Config


class GenerationConfig(Config):
    """How completions are sampled."""

    engine: Literal["embedded"] = "embedded"
    """embedded: Shardwise's own batched generation, on the trainer's ranks."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Logits are divided by this before sampling; rollout and trainer logprobs are of that distribution."""
    max_response_tokens: PositiveInt = 256
    """A completion ends at an end-of-sequence token or here."""
    max_concurrent_sequences: PositiveInt = 128
    """Rows that one rank decodes at a time; a finished row's place goes to the next request."""


class RolloutConfig(GenerationConfig):
    """How much is sampled from the policy for one step."""

    num_prompts: PositiveInt = 8
    """Prompts of one step, over all ranks."""
    group_size: PositiveInt = 8
    """Completions sampled for each prompt; they form the group whose rewards are compared."""

    def generation(self) -> GenerationConfig:
        """The part that a rollout engine needs."""
        return GenerationConfig(**{name: getattr(self, name) for name in GenerationConfig.model_fields})


class AlgorithmConfig(Config):
    """How rewards become a loss."""

    advantage: Literal["grpo", "rloo"] = "grpo"
    """grpo: (reward - group mean) / group std; rloo: reward - mean of the others in the group."""
    advantage_scale: Literal["std", "none"] | None = None
    """For grpo: divide by the group's standard deviation (also the meaning of null), or not (Dr.GRPO)."""
    policy_loss: Literal["ppo_clip"] = "ppo_clip"
    """ppo_clip: PPO's clipped surrogate, per token."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped from above at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """The bound on ratio times |advantage| where the advantage is negative; null is off."""
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"
    ] = "token-mean"
    """How per-token losses become one number over the whole optimizer step."""
    aggregation_divisor: PositiveFloat | None = None
    """The fixed length that seq-mean-token-sum-norm divides by (Dr.GRPO: rollout.max_response_tokens)."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """The weight of the KL divergence from the reference policy; 0 builds no reference engine."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """The per-token estimator of that divergence."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL term to the loss, or subtract it from the rewards."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps made from one rollout batch in one epoch."""
    num_epochs: PositiveInt = 1
    """Passes over one rollout batch."""

    @model_validator(mode="after")
    def _keys_have_effect(self) -> Self:
        if (self.aggregation == "seq-mean-token-sum-norm") != (self.aggregation_divisor is not None):
            raise ValueError(
                f"aggregation={self.aggregation} with aggregation_divisor={self.aggregation_divisor}: the divisor "
                "belongs to aggregation=seq-mean-token-sum-norm, which needs one (Dr.GRPO: rollout.max_response_tokens)"
            )
        if self.advantage != "grpo" and self.advantage_scale is not None:
            raise ValueError(
                f"advantage_scale={self.advantage_scale} has no effect with advantage={self.advantage}; remove it"
            )
        return self

"""What reinforcement learning adds: rollout, reward, algorithm."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from shardwise.config.base import Config


class EnvironmentConfig(Config):
    """What answers the policy between its turns."""

    path: str
    """`path/to/file.py:Class` or `package.module:Class` with reset(example), step(response), reward() and close()
    (docs/environments.md); every completion gets an instance of its own."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of every instance."""
    max_turns: PositiveInt = 8
    """The policy's turns in one completion."""
    timeout_seconds: PositiveFloat = 60.0
    """Of one call of a method; one that takes longer is a failure of its completion."""
    max_concurrent_calls: PositiveInt = 64
    """Instances that are called at the same time."""


def _as_group(given: Any) -> Any:
    return {"path": given} if isinstance(given, str) else given


class GenerationConfig(Config):
    """How completions are sampled."""

    engine: Literal["embedded"] = "embedded"
    """embedded: Shardwise's own batched generation, on the trainer's ranks."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Logits are divided by this before sampling; rollout and trainer logprobs are of that distribution."""
    max_response_tokens: PositiveInt = 256
    """A completion ends at an end-of-sequence token or here; with an environment, all turns and answers together."""
    max_concurrent_sequences: PositiveInt = 128
    """Rows that one rank decodes at a time; a finished row's place goes to the next request."""
    environment: Annotated[EnvironmentConfig | None, BeforeValidator(_as_group)] = None
    """What answers the policy between its turns; an import path, or a group of keys. null: a completion is one turn."""


class DynamicSamplingConfig(Config):
    """Groups that do not differ are dropped, and more prompts sampled until the batch is full."""

    by: Literal["reward", "correct"] = "reward"
    """In what: their rewards, or whether they are correct (reward.correct_at). With a reward for length or format
    nearly all rewards differ."""

    max_rounds: PositiveInt = 10
    """Rounds of sampling for one step; after the last the step trains on what was found, and says how much that is."""


class RolloutConfig(GenerationConfig):
    """How much is sampled from the policy for one step."""

    num_prompts: PositiveInt = 8
    """Prompts of one step, over all ranks."""
    group_size: PositiveInt = 8
    """Completions sampled for each prompt; they form the group whose rewards are compared."""

    dynamic_sampling: DynamicSamplingConfig | None = None
    """Replace groups that teach nothing (DAPO); null keeps them."""

    def generation(self) -> GenerationConfig:
        """The part that a rollout engine needs."""
        return GenerationConfig(**{name: getattr(self, name) for name in GenerationConfig.model_fields})

"""How rewards become a loss: one class for each function of `algorithms`, whose keys are the function's parameters.

Wherever a function is chosen, its name alone stands for its defaults (`advantage: rloo`), and an import path for a
function of one's own (`advantage: rules.py:my_advantage`).
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from shardwise.config.base import Choice, Config

Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
ClipLow = Annotated[float, Field(gt=0, lt=1)]


def named(default: str) -> BeforeValidator:
    """Reads a name, or an import path, as the choice with that name; keys without a name belong to the default one."""

    def expand(value: Any) -> Any:
        if isinstance(value, str):
            return {"name": "custom", "function": value} if ":" in value else {"name": value}
        return {"name": default, **value} if isinstance(value, dict) else value

    return BeforeValidator(expand)


class Custom(Choice):
    """A function of one's own."""

    name: Literal["custom"] = "custom"
    function: str
    """`path/to/file.py:name` or `package.module:name`; takes what the built-in ones take (docs/algorithms.md)."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Passed by keyword."""


class Grpo(Choice):
    """(reward - group mean) / group standard deviation."""

    name: Literal["grpo"] = "grpo"
    scale: Literal["std", "none"] = "std"
    """Divide by the group's standard deviation, or not (Dr.GRPO)."""


class GrpoPassk(Choice):
    """Only the best sample of a group gets an advantage: best - second best."""

    name: Literal["grpo_passk"] = "grpo_passk"
    scale: Literal["std", "none"] = "std"
    """Divide by the group's standard deviation, or not."""


class Gdpo(Choice):
    """grpo for each reward function on its own, summed with the functions' weights, whitened over the batch."""

    name: Literal["gdpo"] = "gdpo"


class Rloo(Choice):
    """Reward - mean of the others in the group."""

    name: Literal["rloo"] = "rloo"


class ReinforcePlusPlus(Choice):
    """The discounted return of each token, whitened over the batch; needs no groups."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: Probability = 1.0
    """The discount per token."""


class ReinforcePlusPlusBaseline(Choice):
    """Reward - group mean, whitened over the batch."""

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


class Remax(Choice):
    """Reward - reward of the greedy completion, which is sampled beside the group."""

    name: Literal["remax"] = "remax"


class Opo(Choice):
    """Reward - length-weighted group mean."""

    name: Literal["opo"] = "opo"


class Gpg(Choice):
    """(Reward - group mean) x samples / samples with a non-zero reward before penalties."""

    name: Literal["gpg"] = "gpg"


class Maxrl(Choice):
    """(Reward - group mean) / group mean before penalties."""

    name: Literal["maxrl"] = "maxrl"


class Gae(Choice):
    """Generalized advantage estimation from the values of a critic: PPO."""

    name: Literal["gae"] = "gae"
    gamma: Probability = 1.0
    """The discount per token."""
    lam: Probability = 1.0
    """0 trusts the critic's next value, 1 the sampled return."""
    whiten: bool = True
    """Shift and scale the advantages of a batch to mean 0 and variance 1."""


class Distill(Choice):
    """On-policy distillation: the teacher's logprob - the policy's, token by token; needs `teachers`."""

    name: Literal["distill"] = "distill"


Advantage = Annotated[
    Grpo
    | GrpoPassk
    | Gdpo
    | Rloo
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | Remax
    | Opo
    | Gpg
    | Maxrl
    | Gae
    | Distill
    | Custom,
    Field(discriminator="name"),
    named("grpo"),
]


GROUP_ADVANTAGES = frozenset(
    {"grpo", "grpo_passk", "gdpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "maxrl"}
)
"""Those that compare a sample with the others of its group."""


class PpoClip(Choice):
    """PPO's clipped surrogate, per token."""

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: ClipLow = 0.2
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped from above at 1 + clip_high; DAPO: 0.28."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """The bound on ratio times |advantage| where the advantage is negative; null is off."""


class Gspo(Choice):
    """The ratio of whole sequences (its geometric mean over tokens), clipped."""

    name: Literal["gspo"] = "gspo"
    clip_low: ClipLow = 3e-4
    """The sequence ratio is clipped from below at 1 - clip_low."""
    clip_high: PositiveFloat = 4e-4
    """The sequence ratio is clipped from above at 1 + clip_high."""


class Cispo(Choice):
    """The clipped ratio, detached, times the logprob: clipped tokens keep a gradient."""

    name: Literal["cispo"] = "cispo"
    clip_low: PositiveFloat = 10.0
    """The detached ratio is clipped from below at 1 - clip_low; 1 and above is no bound."""
    clip_high: PositiveFloat = 0.2
    """The detached ratio is clipped from above at 1 + clip_high."""


class Gmpo(Choice):
    """The geometric mean of clipped token ratios."""

    name: Literal["gmpo"] = "gmpo"
    clip_low: PositiveFloat = 0.4
    """The log ratio is clipped from below at -clip_low."""
    clip_high: PositiveFloat = 0.4
    """The log ratio is clipped from above at clip_high."""


class Sapo(Choice):
    """A soft gate instead of a clip."""

    name: Literal["sapo"] = "sapo"
    tau_positive: PositiveFloat = 1.0
    """How steep the gate is where the advantage is positive."""
    tau_negative: PositiveFloat = 1.05
    """How steep the gate is where the advantage is negative."""


class Reinforce(Choice):
    """-advantage x logprob; also the policy loss of GPG."""

    name: Literal["reinforce"] = "reinforce"


class ClipCov(Choice):
    """PPO's clip, and no gradient for a few tokens whose logprob and advantage go together most."""

    name: Literal["clip_cov"] = "clip_cov"
    clip_low: ClipLow = 0.2
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped from above at 1 + clip_high."""
    fraction: Share = 2e-4
    """The share of the optimizer step's trained tokens that lose their gradient."""
    cov_low: float = 1.0
    """They are drawn from the tokens with a covariance above this,"""
    cov_high: float = 5.0
    """and below this."""

    @model_validator(mode="after")
    def _range_holds_something(self) -> Self:
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low={self.cov_low} and cov_high={self.cov_high} leave nothing between them")
        return self


class KlCov(Choice):
    """No clip; a KL penalty on the few tokens whose logprob and advantage go together most."""

    name: Literal["kl_cov"] = "kl_cov"
    coef: NonNegativeFloat = 1.0
    """The weight of the penalty."""
    fraction: Share = 2e-4
    """The share of the optimizer step's trained tokens that get it."""


class DppoTv(Choice):
    """No gradient for tokens whose probability has moved too far (total variation)."""

    name: Literal["dppo_tv"] = "dppo_tv"
    threshold_low: PositiveFloat = 0.15
    """How far the probability may fall where the advantage is negative."""
    threshold_high: PositiveFloat = 0.15
    """How far the probability may rise where the advantage is positive."""


class DppoKl(Choice):
    """No gradient for tokens whose binary KL divergence has grown too large."""

    name: Literal["dppo_kl"] = "dppo_kl"
    threshold_low: PositiveFloat = 0.05
    """The bound where the advantage is negative and the probability has fallen."""
    threshold_high: PositiveFloat = 0.05
    """The bound where the advantage is positive and the probability has risen."""


class Topr(Choice):
    """Tapered off-policy REINFORCE: full weight for good samples, a truncated ratio for bad ones."""

    name: Literal["topr"] = "topr"
    ratio_cap: PositiveFloat = 1.0
    """The largest weight of a sample with a negative advantage."""


class Kimi(Choice):
    """Kimi k1.5's squared loss: a policy gradient with a squared log-ratio penalty."""

    name: Literal["kimi"] = "kimi"
    tau: PositiveFloat = 0.1
    """The weight of the penalty."""


PolicyLoss = Annotated[
    PpoClip | Gspo | Cispo | Gmpo | Sapo | Reinforce | ClipCov | KlCov | DppoTv | DppoKl | Topr | Kimi | Custom,
    Field(discriminator="name"),
    named("ppo_clip"),
]


SEQUENCE_LOSSES = frozenset({"gspo", "gmpo", "topr", "kimi"})
"""Those whose ratio is that of a whole sequence."""


class FixedKl(Choice):
    """kl_coef stays as it is."""

    name: Literal["fixed"] = "fixed"


class AdaptiveKl(Choice):
    """kl_coef rises while the KL divergence is above its target, and falls below it."""

    name: Literal["adaptive"] = "adaptive"
    target: PositiveFloat
    """The mean KL divergence per token to hold, in nats."""
    horizon: PositiveInt = 10_000
    """Samples after which a constant error of 20 % has changed the coefficient by 20 %."""


KlController = Annotated[FixedKl | AdaptiveKl, Field(discriminator="name"), named("fixed")]

KlEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]


class WeightsConfig(Config):
    """Importance weights of rollout correction: policy / rollout probability, bounded."""

    level: Literal["token", "sequence"] = "token"
    """The ratio of each token, or of its whole sequence."""
    mode: Literal["truncate", "mask"] = "truncate"
    """truncate: at most `high` (TIS); mask: 0 outside [low, high] (IcePop)."""
    low: NonNegativeFloat | None = None
    """The lower bound of mask."""
    high: PositiveFloat = 2.0
    """The upper bound."""

    @model_validator(mode="after")
    def _bounds_are_used(self) -> Self:
        if (self.mode == "mask") != (self.low is not None):
            raise ValueError(f"mode={self.mode} with low={self.low}: mask needs a lower bound, truncate has none")
        _require_order(low=self.low, high=self.high)
        return self


class RejectionConfig(Config):
    """Rejection of tokens or sequences on which trainer and rollout engine disagree."""

    level: Literal["token", "sequence-sum", "sequence-mean", "sequence-max"] = "token"
    """What is judged, and by which figure of its tokens."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """k1: the ratio policy / rollout itself; k2, k3: the KL estimate."""
    low: NonNegativeFloat | None = None
    """Rejected below this; null is no bound."""
    high: PositiveFloat | None = 2.0
    """Rejected above this; null is no bound."""

    @model_validator(mode="after")
    def _bounds_are_used(self) -> Self:
        if self.estimator != "k1" and self.low is not None:
            raise ValueError(
                f"low={self.low} with estimator={self.estimator}: small values of k2 and k3 are agreement; set only "
                "high"
            )
        if self.low is None and self.high is None:
            raise ValueError("low=null and high=null reject nothing; set one, or remove rejection")
        _require_order(low=self.low, high=self.high)
        return self


class RolloutCorrectionConfig(Config):
    """What is done about a rollout engine whose logprobs differ from the trainer's."""

    bypass: bool = False
    """Take the rollout's logprobs for old_logprobs: one forward pass fewer; the ratio of the policy loss corrects."""
    weights: WeightsConfig | None = None
    """Multiply each token's policy loss by an importance weight."""
    rejection: RejectionConfig | None = None
    """Leave tokens out of the loss and of its denominators."""

    @property
    def compares(self) -> bool:
        """Whether it needs the trainer's logprobs beside the rollout's."""
        return self.weights is not None or self.rejection is not None

    @model_validator(mode="after")
    def _bypass_stands_alone(self) -> Self:
        if self.bypass and self.compares:
            raise ValueError(
                "bypass=true makes old_logprobs the rollout's own, so weights and rejection would compare them with "
                "themselves; remove bypass, or weights and rejection"
            )
        return self


def _require_order(*, low: float | None, high: float | None) -> None:
    if low is not None and high is not None and low > high:
        raise ValueError(f"low={low} is above high={high}; swap them")


class OverlongConfig(Config):
    """DAPO's soft punishment of completions that come close to rollout.max_response_tokens."""

    buffer_tokens: PositiveInt
    """The penalty grows from 0 over the last so many tokens."""
    factor: PositiveFloat = 1.0
    """The penalty of a completion of full length."""


class AlgorithmConfig(Config):
    """How rewards become a loss."""

    advantage: Advantage = Grpo()
    """How a sample's advantage is computed; a name, {name, parameters}, or an import path."""
    policy_loss: PolicyLoss = PpoClip()
    """The loss of a token; a name, {name, parameters}, or an import path."""
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"
    ] = "token-mean"
    """How per-token losses become one number over the whole optimizer step."""
    aggregation_divisor: PositiveFloat | None = None
    """The fixed length that seq-mean-token-sum-norm divides by (Dr.GRPO: rollout.max_response_tokens)."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """The weight of the KL divergence from the reference policy; 0 builds no reference engine."""
    kl_estimator: KlEstimator = "k3"
    """The per-token estimator of that divergence; with + its value, and in the loss the gradient of k2."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL term to the loss, or subtract it from the rewards."""
    kl_controller: KlController = FixedKl()
    """How kl_coef changes during the run; a name, or {name, parameters}."""
    overlong_penalty: OverlongConfig | None = None
    """Subtracted from the rewards of overlong completions; null is none."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """What is done about a rollout engine whose logprobs differ from the trainer's; by default nothing."""
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
        if self.kl_coef == 0 and (self.kl_in == "reward" or self.kl_estimator != "k3"):
            raise ValueError(
                f"kl_in={self.kl_in} and kl_estimator={self.kl_estimator} have no effect with kl_coef=0; set kl_coef, "
                "or remove them"
            )
        if self.kl_coef == 0 and self.kl_controller.name == "adaptive":
            raise ValueError("kl_controller=adaptive scales kl_coef, and kl_coef=0 stays 0; set it, e.g. to 0.001")
        if self.kl_in == "reward" and self.kl_estimator.endswith("+"):
            raise ValueError(
                f"kl_estimator={self.kl_estimator} differs from {self.kl_estimator[:-1]} in its gradient only, which "
                "kl_in=reward has none of; remove the +"
            )
        return self

    @model_validator(mode="after")
    def _sequences_stay_whole(self) -> Self:
        rejection = self.rollout_correction.rejection
        if rejection is not None and rejection.level == "token" and self.policy_loss.name in SEQUENCE_LOSSES:
            raise ValueError(
                "rollout_correction.rejection.level=token takes tokens out of sequences whose ratio "
                f"policy_loss={self.policy_loss.name} takes as a whole; reject whole sequences with "
                "level=sequence-mean, sequence-sum or sequence-max"
            )
        return self

    @model_validator(mode="after")
    def _rewards_are_used(self) -> Self:
        if self.advantage.name not in ("gdpo", "distill"):
            return self
        takes = "compares the reward functions one by one" if self.advantage.name == "gdpo" else "reads no rewards"
        given = {"kl_in=reward": self.kl_in == "reward", "overlong_penalty": self.overlong_penalty is not None}
        for key in [key for key, is_given in given.items() if is_given]:
            raise ValueError(
                f"{key} changes the sum of the rewards, and advantage={self.advantage.name} {takes}; remove it"
            )
        return self

    @property
    def num_updates(self) -> int:
        """Optimizer steps made from one rollout batch."""
        return self.num_minibatches * self.num_epochs

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the policy scores a rollout batch before its first optimizer step. With a single one and no
        correction, the ratio is 1."""
        return not self.rollout_correction.bypass and (
            self.num_updates > 1 or self.rollout_correction.compares or self.policy_loss.name in ("clip_cov", "kl_cov")
        )

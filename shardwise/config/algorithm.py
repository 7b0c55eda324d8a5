"""How rewards become a loss: one class for each function of `algorithms`, whose keys are the function's parameters."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from shardwise.config.base import Choice, Config
from shardwise.config.custom import Custom, named
from shardwise.config.kl import K3, FixedKl, KlController, KlEstimator
from shardwise.config.rollout_correction import MismatchRejection, RolloutCorrectionConfig

Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
ClipLow = Annotated[float, Field(gt=0, lt=1)]


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


class Gigpo(Choice):
    """For completions of several turns: grpo over whole completions, plus grpo over single turns, each compared with
    the turns of its group that answered the same state."""

    name: Literal["gigpo"] = "gigpo"
    scale: Literal["std", "none"] = "std"
    """Divide by the groups' standard deviations, or not."""
    step_weight: NonNegativeFloat = 1.0
    """The weight of the part that compares single turns."""
    gamma: Probability = 0.95
    """The discount per turn on what later turns earn."""


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
    | Gigpo
    | Gae
    | Distill
    | Custom,
    Field(discriminator="name"),
    named("grpo"),
]


GROUP_ADVANTAGES = frozenset(
    {"grpo", "grpo_passk", "gdpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "maxrl", "gigpo"}
)
"""Advantages that compare a sample with the others of its group."""

BATCH_ADVANTAGES = frozenset({"reinforce_plus_plus", "gae"})
"""Advantages that compare a sample with the others of its step, or with what a critic expects."""


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
    """-advantage x logprob."""

    name: Literal["reinforce"] = "reinforce"


class GpgLoss(Choice):
    """GPG's policy loss, which is reinforce."""

    name: Literal["gpg"] = "gpg"


class ClipCov(Choice):
    """PPO's clip, and no gradient for a few of the tokens with a high covariance of logprob and advantage."""

    name: Literal["clip_cov"] = "clip_cov"
    clip_low: ClipLow = 0.2
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped from above at 1 + clip_high."""
    fraction: Share = 2e-4
    """The share of the optimizer step's trained tokens that lose their gradient."""
    cov_low: float = 1.0
    """These tokens are drawn from those whose covariance of logprob and advantage is above cov_low and below
    cov_high."""
    cov_high: float = 5.0
    """The upper bound of that range."""

    @model_validator(mode="after")
    def _range_holds_something(self) -> Self:
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low={self.cov_low} and cov_high={self.cov_high} leave nothing between them")
        return self


class KlCov(Choice):
    """No clip; a KL penalty on the few tokens with the highest covariance of logprob and advantage."""

    name: Literal["kl_cov"] = "kl_cov"
    coef: NonNegativeFloat = 1.0
    """The weight of the penalty."""
    fraction: Share = 2e-4
    """The share of the optimizer step's trained tokens that get the penalty."""


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
    PpoClip
    | Gspo
    | Cispo
    | Gmpo
    | Sapo
    | Reinforce
    | GpgLoss
    | ClipCov
    | KlCov
    | DppoTv
    | DppoKl
    | Topr
    | Kimi
    | Custom,
    Field(discriminator="name"),
    named("ppo_clip"),
]


SEQUENCE_LOSSES = frozenset({"gspo", "gmpo", "topr", "kimi"})
"""Losses whose ratio is that of a whole sequence."""


class TokenMean(Choice):
    """The sum over tokens / trained tokens."""

    name: Literal["token-mean"] = "token-mean"


class SeqMeanTokenMean(Choice):
    """The mean over sequences of the mean over their trained tokens."""

    name: Literal["seq-mean-token-mean"] = "seq-mean-token-mean"


class SeqMeanTokenSum(Choice):
    """The sum over tokens / sequences."""

    name: Literal["seq-mean-token-sum"] = "seq-mean-token-sum"


class SeqMeanTokenSumNorm(Choice):
    """The sum over tokens / (sequences x a fixed length)."""

    name: Literal["seq-mean-token-sum-norm"] = "seq-mean-token-sum-norm"
    divisor: PositiveFloat
    """The fixed length (Dr.GRPO: rollout.max_response_tokens)."""


class TokenSum(Choice):
    """The sum over tokens."""

    name: Literal["token-sum"] = "token-sum"


Aggregation = Annotated[
    TokenMean | SeqMeanTokenMean | SeqMeanTokenSum | SeqMeanTokenSumNorm | TokenSum | Custom,
    Field(discriminator="name"),
    named("token-mean"),
]


class ClippedValueLoss(Choice):
    """Half the squared error, with PPO's clip of the value."""

    name: Literal["clipped"] = "clipped"
    clip: PositiveFloat | None = 0.5
    """How far a value may move from what it was before the update; beyond that its gradient is cut. null is off."""


ValueLoss = Annotated[ClippedValueLoss | Custom, Field(discriminator="name"), named("clipped")]


def changed_keys(chosen: Choice) -> list[str]:
    """Returns the parameters whose value is not the default; null, which takes a bound away, does not count."""
    defaults = {key: field.default for key, field in type(chosen).model_fields.items()}
    return [key for key, value in chosen.arguments().items() if value is not None and value != defaults[key]]


class OverlongConfig(Config):
    """DAPO's soft punishment of completions that come close to rollout.max_response_tokens."""

    buffer_tokens: PositiveInt
    """The penalty grows from 0 over this many tokens before rollout.max_response_tokens."""
    factor: PositiveFloat = 1.0
    """The penalty of a completion of full length."""


class AlgorithmConfig(Config):
    """How rewards become a loss."""

    advantage: Advantage = Grpo.defaults()
    """How a sample's advantage is computed; a name, {name, parameters}, or an import path."""
    policy_loss: PolicyLoss = PpoClip.defaults()
    """The loss of a token; a name, {name, parameters}, or an import path."""
    aggregation: Aggregation = TokenMean.defaults()
    """How per-token losses become one number over the whole optimizer step; a name, {name, parameters}, or an import
    path."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """The weight of the KL divergence from the reference policy; 0 builds no reference engine."""
    kl_estimator: KlEstimator = K3.defaults()
    """The per-token estimator of that divergence; a name, {name, parameters}, or an import path."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL term to the loss, or subtract it from the rewards."""
    kl_controller: KlController = FixedKl.defaults()
    """How kl_coef changes during the run; a name, {name, parameters}, or an import path."""
    overlong_penalty: OverlongConfig | None = None
    """A penalty that is subtracted from the rewards of overlong completions; null is none."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig.defaults()
    """How training corrects for a rollout engine whose logprobs differ from the trainer's; by default not at all."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps made from one rollout batch in one epoch."""
    num_epochs: PositiveInt = 1
    """Passes over one rollout batch."""

    @model_validator(mode="after")
    def _keys_have_effect(self) -> Self:
        estimator = self.kl_estimator.name
        if self.kl_coef == 0 and (self.kl_in == "reward" or estimator != "k3"):
            raise ValueError(
                f"kl_in={self.kl_in} and kl_estimator={estimator} have no effect with kl_coef=0; set kl_coef, "
                "or remove them"
            )
        if self.kl_coef == 0 and self.kl_controller.name != "fixed":
            raise ValueError(
                f"kl_controller={self.kl_controller.name} moves kl_coef, and kl_coef=0 builds no reference to measure "
                "from; set it, e.g. to 0.001"
            )
        if self.kl_in == "reward" and estimator.endswith("+"):
            raise ValueError(
                f"kl_estimator={estimator} differs from {estimator[:-1]} in its gradient only, which kl_in=reward has "
                "none of; remove the +"
            )
        return self

    @model_validator(mode="after")
    def _ratio_moves(self) -> Self:
        """Refuses bounds on a ratio that is always 1: with one optimizer step per rollout batch, the policy is still
        the one that gave the old logprobs."""
        if self.num_updates > 1 or self.rollout_correction.bypass or isinstance(self.policy_loss, Custom):
            return self
        acting: tuple[str, ...] = ()
        if isinstance(self.policy_loss, ClipCov):
            acting = ("fraction", "cov_low", "cov_high")  # they select tokens
        if isinstance(self.policy_loss, Topr) and self.policy_loss.ratio_cap < 1:
            acting = ("ratio_cap",)
        if moved := [key for key in changed_keys(self.policy_loss) if key not in acting]:
            raise ValueError(
                f"policy_loss.{' and policy_loss.'.join(moved)} "
                f"{'has' if len(moved) == 1 else 'have'} no effect with one optimizer step per rollout batch, in which "
                "the ratio of policy and old policy is 1; set num_minibatches or num_epochs above 1, or "
                f"rollout_correction.bypass=true, or remove {'it' if len(moved) == 1 else 'them'}"
            )
        return self

    @model_validator(mode="after")
    def _sequences_stay_whole(self) -> Self:
        rejection = self.rollout_correction.rejection
        if (
            isinstance(rejection, MismatchRejection)
            and rejection.level == "token"
            and self.policy_loss.name in SEQUENCE_LOSSES
        ):
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

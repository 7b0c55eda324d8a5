"""The functions of an algorithm, chosen by name."""

from typing import get_args

import pytest
import yaml

from shardwise.algorithms.masked import Aggregation
from shardwise.config import (
    AdaptiveKl,
    AlgorithmConfig,
    ClipCov,
    Config,
    ConfigError,
    CriticConfig,
    Custom,
    DistillationConfig,
    Gae,
    KlCov,
    PreferenceConfig,
    RewardModelConfig,
    RolloutCorrectionConfig,
)
from shardwise.config.algorithm import (
    GROUP_ADVANTAGES,
    SEQUENCE_LOSSES,
    Cispo,
    ClippedValueLoss,
    Grpo,
    Gspo,
    OverlongConfig,
    PpoClip,
    ReinforcePlusPlus,
    SeqMeanTokenSumNorm,
)
from shardwise.config.base import groups_of, tag_of
from shardwise.config.rollout_correction import MismatchRejection, RatioWeights

ROOM = {"model": {"path": "m"}, "data": {"train_files": ["t"]}}
FIELDS: list[tuple[type[Config], str, dict]] = [
    (AlgorithmConfig, "advantage", {}),
    (AlgorithmConfig, "policy_loss", {"num_epochs": 2}),
    (AlgorithmConfig, "aggregation", {}),
    (AlgorithmConfig, "kl_estimator", {"kl_coef": 0.1}),
    (AlgorithmConfig, "kl_controller", {"kl_coef": 0.1}),
    (RolloutCorrectionConfig, "weights", {}),
    (RolloutCorrectionConfig, "rejection", {}),
    (CriticConfig, "value_loss", {}),
    (PreferenceConfig, "loss", ROOM),
    (RewardModelConfig, "loss", ROOM),
    (DistillationConfig, "divergence", {}),
]
"""Where a choice stands: the class, the key, and what must be beside it."""

CHOICES = [
    pytest.param(cls, key, beside, choice, id=f"{cls.__name__}-{key}-{tag_of(choice)[1]}")
    for cls, key, beside in FIELDS
    for choice in groups_of(cls.model_fields[key].annotation)
]

REQUIRED = {"function": "rules.py:mine", "target": 0.05, "divisor": 8.0}
OTHER = REQUIRED | {
    "scale": "none",
    "step_weight": 0.5,
    "weights": {"format": 0.25},
    "gamma": 0.625,
    "lam": 0.75,
    "whiten": False,
    "clip_low": 0.3,
    "clip_high": 0.7,
    "dual_clip": None,
    "tau_positive": 2.0,
    "tau_negative": 3.0,
    "fraction": 0.01,
    "cov_low": 0.5,
    "cov_high": 9.0,
    "coef": 2.0,
    "threshold_low": 0.3,
    "threshold_high": 0.4,
    "tau": 0.6,
    "ratio_cap": 5.0,
    "horizon": 77,
    "parameters": {"a": [1, {"b": None}]},
    "beta": 0.4,
    "label_smoothing": 0.2,
    "desirable_weight": 1.5,
    "undesirable_weight": 0.0,
    "uses_reference": False,
    "is_paired": False,
    "center_coef": 0.01,
    "clip": None,
    "mode": "mask",
    "level": "sequence",
    "low": 0.25,
    "high": 5.0,
}
"""For every key of a choice a value that is not its default."""
OTHERWISE = {"estimator": "k1"}
"""Its other values forbid the low bound."""


def keys_of(choice):
    return [key for key in choice.model_fields if key != choice.tag]


def required_of(choice):
    return {key: REQUIRED[key] for key, field in choice.model_fields.items() if field.is_required()}


def parse(cls, **tree):
    return cls.parse(tree, origin="test")


def message_of(cls, **tree):
    with pytest.raises(ConfigError) as error:
        parse(cls, **tree)
    return str(error.value).removeprefix("test: ")


@pytest.mark.parametrize(("cls", "key", "beside", "choice"), CHOICES)
def test_a_bare_name_stands_for_the_defaults_of_a_choice(cls, key, beside, choice):
    name = tag_of(choice)[1]
    if required_of(choice):
        for leaf in required_of(choice):
            assert f"{key}.{leaf}: required, but not given" in message_of(cls, **beside, **{key: name})
        return
    chosen = getattr(parse(cls, **beside, **{key: name}), key)
    assert chosen == choice()
    assert type(chosen) is choice


@pytest.mark.parametrize(("cls", "key", "beside", "choice"), CHOICES)
def test_every_key_of_a_choice_survives_a_round_trip_through_yaml(tmp_path, cls, key, beside, choice):
    given = {leaf: (OTHER | OTHERWISE)[leaf] for leaf in keys_of(choice)}
    if choice is MismatchRejection:
        given["level"] = "sequence-sum"
    for leaf in given.keys() - OTHERWISE.keys():
        assert choice.model_fields[leaf].get_default(call_default_factory=True) != given[leaf], "not a default"
    config = parse(cls, **beside, **{key: {"name": tag_of(choice)[1], **given}})
    assert getattr(config, key).arguments() == given
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    again = cls.load(path)
    assert again == config
    assert type(getattr(again, key)) is choice
    assert yaml.safe_load(path.read_text())[key] == {"name": tag_of(choice)[1], **given}


@pytest.mark.parametrize(("cls", "key", "beside", "choice"), CHOICES)
def test_no_error_path_holds_the_name_of_a_choice(cls, key, beside, choice):
    """pydantic puts the alternative into the path: `advantage.grpo.scale`; no key is called that."""
    name = tag_of(choice)[1]
    has = ", ".join(keys_of(choice)) or "none"
    unknown = message_of(cls, **beside, **{key: {"name": name, **required_of(choice), "nonsense": 1}})
    assert unknown == f"{key}.nonsense: name={name} has no such key; it has {has}"
    for leaf in keys_of(choice):
        wrong = 5 if leaf == "parameters" else {"x": ["y"]}
        bad = message_of(cls, **beside, **{key: {"name": name, **required_of(choice), leaf: wrong}})
        assert bad.startswith((f"{key}.{leaf}=", f"{key}.{leaf}.x=")), bad


@pytest.mark.parametrize(("cls", "key", "beside"), FIELDS)
def test_an_unknown_name_gets_the_nearest_and_all_there_are(cls, key, beside):
    names = [tag_of(choice)[1] for choice in groups_of(cls.model_fields[key].annotation)]
    typo = names[1][:-1] + "q"
    message = message_of(cls, **beside, **{key: typo})
    assert message.startswith(f"{key}={typo}: did you mean ")
    assert message.endswith(f"? use one of {', '.join(names)}")
    assert message_of(cls, **beside, **{key: "zzzz"}) == f"{key}=zzzz: use one of {', '.join(names)}"
    for value in (3, ["x"], True):
        assert message_of(cls, **beside, **{key: value}) == (
            f"{key}={value!r}: use one of {', '.join(names)}, alone or as the name in a group of keys"
        )


@pytest.mark.parametrize(
    ("key", "typo", "meant"),
    [
        ("advantage", "grpoo", "grpo"),
        ("advantage", "reinforce_plus_plus_baselin", "reinforce_plus_plus_baseline"),
        ("policy_loss", "ppo-clip", "ppo_clip"),
        ("policy_loss", "clipcov", "clip_cov"),
    ],
)
def test_the_nearest_name_is_the_one_that_was_meant(key, typo, meant):
    assert f"did you mean {meant}? " in message_of(AlgorithmConfig, **{key: typo})


@pytest.mark.parametrize(
    ("key", "given", "message"),
    [
        ("policy_loss", {"tau": 1}, "policy_loss.tau: name=ppo_clip has no such key; it has clip_low, clip_high, "
         "dual_clip"),
        ("policy_loss", {"name": "gspo", "dual_clip": 3}, "policy_loss.dual_clip: name=gspo has no such key; it has "
         "clip_low, clip_high"),
        ("policy_loss", {"name": "reinforce", "clip_low": 0.1}, "policy_loss.clip_low: name=reinforce has no such "
         "key; it has none"),
        ("advantage", {"lam": 1}, "advantage.lam: name=grpo has no such key; it has scale"),
        ("kl_controller", {"target": 1}, "kl_controller.target: name=fixed has no such key; it has none"),
    ],
)  # fmt: skip
def test_a_key_of_another_choice_is_refused_by_the_one_that_is_taken(key, given, message):
    """Trap 18. Keys without a name belong to the default choice."""
    assert message_of(AlgorithmConfig, **{key: given}) == message


def test_keys_without_a_name_belong_to_the_default_choice():
    algorithm = AlgorithmConfig.load(None, ["policy_loss.clip_high=0.28", "num_epochs=2", "advantage.scale=none"])
    assert (algorithm.policy_loss.name, algorithm.policy_loss.clip_high) == ("ppo_clip", 0.28)
    assert (algorithm.advantage.name, algorithm.advantage.scale) == ("grpo", "none")


@pytest.mark.parametrize(("cls", "key", "beside"), FIELDS)
@pytest.mark.parametrize("path", ["rules.py:mine", "/a b/rules.py:mine", "package.module:mine"])
def test_an_import_path_is_a_function_of_ones_own_wherever_one_is_chosen(cls, key, beside, path):
    chosen = getattr(parse(cls, **beside, **{key: path}), key)
    assert isinstance(chosen, Custom)
    assert (chosen.function, chosen.parameters) == (path, {})
    longer = {"name": "custom", "function": path, "parameters": {"depth": 2}}
    assert getattr(parse(cls, **beside, **{key: longer}), key) == type(chosen)(function=path, parameters={"depth": 2})


def test_group_advantages_are_those_whose_baseline_is_of_the_group():
    names = {tag_of(choice)[1] for choice in groups_of(AlgorithmConfig.model_fields["advantage"].annotation)}
    assert names >= GROUP_ADVANTAGES
    assert names - GROUP_ADVANTAGES == {"reinforce_plus_plus", "remax", "gae", "distill", "custom"}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"aggregation": {"name": "token-mean", "divisor": 8}},
            "aggregation.divisor: name=token-mean has no such key; it has none",
        ),
        *(
            (
                {"kl_controller": controller},
                f"kl_controller={name} moves kl_coef, and kl_coef=0 builds no reference to measure from; set it, e.g. "
                "to 0.001",
            )
            for name, controller in (("adaptive", {"name": "adaptive", "target": 0.1}), ("custom", "rules.py:mine"))
        ),
        (
            {"kl_estimator": "rules.py:mine"},
            "kl_in=loss and kl_estimator=custom have no effect with kl_coef=0; set kl_coef, or remove them",
        ),
        *(
            (
                {"kl_in": "reward", "kl_estimator": f"{plain}+", "kl_coef": 0.1},
                f"kl_estimator={plain}+ differs from {plain} in its gradient only, which kl_in=reward has none of; "
                "remove the +",
            )
            for plain in ("k1", "abs", "k3")
        ),
    ],
)
def test_keys_that_would_have_no_effect_together_are_refused(tree, message):
    assert message_of(AlgorithmConfig, **tree) == message


@pytest.mark.parametrize(
    ("policy_loss", "message"),
    [
        ({"clip_high": 0.28}, "policy_loss.clip_high has no effect"),
        ({"name": "clip_cov", "clip_low": 0.1, "fraction": 0.1}, "policy_loss.clip_low has no effect"),
        ({"name": "kl_cov", "coef": 0.5, "fraction": 0.1}, "policy_loss.coef and policy_loss.fraction have no effect"),
        ({"name": "sapo", "tau_positive": 2}, "policy_loss.tau_positive has no effect"),
        ({"name": "topr", "ratio_cap": 2}, "policy_loss.ratio_cap has no effect"),
        ({"name": "kimi", "tau": 2}, "policy_loss.tau has no effect"),
        ({"name": "dppo_tv", "threshold_low": 0.1}, "policy_loss.threshold_low has no effect"),
    ],
)
def test_what_bounds_a_ratio_needs_one_that_moves(policy_loss, message):
    found = message_of(AlgorithmConfig, policy_loss=policy_loss)
    assert found.startswith(
        f"{message} with one optimizer step per rollout batch, in which the ratio of policy and old "
    )
    assert "set num_minibatches or num_epochs above 1, or rollout_correction.bypass=true, or remove " in found
    for moving in ({"num_epochs": 2}, {"num_minibatches": 2}, {"rollout_correction": {"bypass": True}}):
        assert parse(AlgorithmConfig, policy_loss=policy_loss, **moving).policy_loss.arguments()


def test_without_a_ratio_that_moves_defaults_and_bounds_taken_away_stand():
    assert parse(AlgorithmConfig, policy_loss={"clip_high": 0.2, "dual_clip": None}).num_updates == 1
    for acts_at_1 in ({"name": "clip_cov", "fraction": 0.1}, {"name": "topr", "ratio_cap": 0.5}):
        assert parse(AlgorithmConfig, policy_loss=acts_at_1).num_updates == 1


@pytest.mark.parametrize(
    ("advantage", "takes"), [("gdpo", "compares the reward functions one by one"), ("distill", "reads no rewards")]
)
def test_what_changes_the_sum_of_rewards_has_no_effect_where_it_is_not_read(advantage, takes):
    for key, tree in {
        "kl_in=reward": {"kl_in": "reward", "kl_coef": 0.1},
        "overlong_penalty": {"overlong_penalty": {"buffer_tokens": 4}},
    }.items():
        assert message_of(AlgorithmConfig, advantage=advantage, **tree) == (
            f"{key} changes the sum of the rewards, and advantage={advantage} {takes}; remove it"
        )
        assert parse(AlgorithmConfig, advantage="rloo", **tree).advantage.name == "rloo"
    assert parse(AlgorithmConfig, advantage=advantage, kl_coef=0.1).kl_in == "loss"


def test_keys_that_fit_together_are_taken():
    assert parse(AlgorithmConfig, kl_coef=0.1, kl_estimator="k3+", kl_in="loss").kl_estimator.name == "k3+"
    assert (
        parse(AlgorithmConfig, kl_coef=0.1, kl_controller={"name": "adaptive", "target": 1}).kl_controller.target == 1
    )
    assert parse(AlgorithmConfig, kl_controller="fixed").kl_coef == 0


@pytest.mark.parametrize("policy_loss", sorted(SEQUENCE_LOSSES))
def test_a_sequence_whose_ratio_counts_as_a_whole_loses_no_tokens(policy_loss):
    def tree(**rejection):
        return {"policy_loss": policy_loss, "rollout_correction": {"rejection": rejection}}

    assert message_of(AlgorithmConfig, **tree()) == (
        f"rollout_correction.rejection.level=token takes tokens out of sequences whose ratio policy_loss={policy_loss} "
        "takes as a whole; reject whole sequences with level=sequence-mean, sequence-sum or sequence-max"
    )
    for level in ("sequence-mean", "sequence-sum", "sequence-max"):
        assert parse(AlgorithmConfig, **tree(level=level)).rollout_correction.rejection.level == level
    assert parse(AlgorithmConfig, **tree() | {"policy_loss": "ppo_clip"}).rollout_correction.compares


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({}, False),
        ({"num_minibatches": 2}, True),
        ({"num_epochs": 2}, True),
        ({"rollout_correction": {"weights": {}}}, True),
        ({"rollout_correction": {"rejection": {}}}, True),
        ({"policy_loss": "clip_cov"}, True),
        ({"policy_loss": "kl_cov"}, True),
        ({"policy_loss": "gspo"}, False),
        ({"rollout_correction": {"bypass": True}}, False),
        ({"rollout_correction": {"bypass": True}, "num_minibatches": 4, "policy_loss": "clip_cov"}, False),
    ],
)
def test_the_policy_scores_before_it_moves_only_where_something_needs_it(tree, expected):
    assert parse(AlgorithmConfig, **tree).needs_old_logprobs is expected


@pytest.mark.parametrize(
    ("cls", "key", "value"),
    [
        (Grpo, "scale", "mean"),
        (ReinforcePlusPlus, "gamma", 1.5),
        (Gae, "gamma", -0.1),
        (Gae, "lam", 1.1),
        (PpoClip, "clip_low", 0),
        (PpoClip, "clip_low", 1),
        (PpoClip, "clip_high", 0),
        (PpoClip, "dual_clip", 1),
        (Gspo, "clip_low", 1),
        (Cispo, "clip_low", 0),
        (ClipCov, "clip_low", 1),
        (ClipCov, "fraction", 0),
        (KlCov, "fraction", 1.5),
        (KlCov, "coef", -1),
        (AdaptiveKl, "horizon", 0),
        (RatioWeights, "high", 0),
        (RatioWeights, "level", "sequence-sum"),
        (MismatchRejection, "high", 0),
        (MismatchRejection, "estimator", "k4"),
        (MismatchRejection, "level", "sequence"),
        (OverlongConfig, "factor", 0),
        (OverlongConfig, "buffer_tokens", 0),
        (ClippedValueLoss, "clip", 0),
        (SeqMeanTokenSumNorm, "divisor", 0),
        (AlgorithmConfig, "kl_coef", -0.1),
        (AlgorithmConfig, "kl_in", "both"),
        (AlgorithmConfig, "num_minibatches", 0),
        (AlgorithmConfig, "num_epochs", 0),
    ],
)
def test_value_out_of_range_is_refused(cls, key, value):
    with pytest.raises(ConfigError, match=rf"(^test:|\n) *{key}={value!r}: input should be "):
        cls.parse({key: value}, origin="test")


def test_config_and_algorithms_know_the_same_aggregations():
    names = {tag_of(choice)[1] for choice in groups_of(AlgorithmConfig.model_fields["aggregation"].annotation)}
    assert names - {"custom"} == set(get_args(Aggregation))


def test_an_empty_range_of_covariances_is_refused():
    with pytest.raises(ConfigError) as error:
        AlgorithmConfig.parse({"policy_loss": {"name": "clip_cov", "cov_low": 5}}, origin="test")
    assert str(error.value) == "test: policy_loss: cov_low=5.0 and cov_high=5.0 leave nothing between them"

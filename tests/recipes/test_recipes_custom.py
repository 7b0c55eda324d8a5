"""Functions of one's own: those that equal built-in ones make the same step, and what they return is checked."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from pydantic import TypeAdapter

from shardwise.config import (
    AlgorithmConfig,
    ConfigError,
    CriticConfig,
    Custom,
    DistillationConfig,
    PreferenceConfig,
    PreferenceLoss,
    RecipeConfig,
    RewardModelLoss,
    RLConfig,
    TrainingError,
)
from shardwise.config.base import groups_of, tag_of
from shardwise.recipes.custom import _TAKEN, ARGUMENTS, EXTRAS, CustomFunction, _kind, extras_of, require_callable
from shardwise.recipes.losses import LossSource
from shardwise.types import Denominators, TokenBatch, TokenOutputs

PREFERENCE: TypeAdapter[PreferenceLoss] = TypeAdapter(PreferenceLoss)
REWARD_MODEL: TypeAdapter[RewardModelLoss] = TypeAdapter(RewardModelLoss)
STEP = Denominators(num_tokens=17, num_sequences=6)

OWN = """
import numpy as np
import torch
from shardwise.algorithms import bradley_terry, clipped_value_loss, dpo, kl_divergence
from shardwise.config import ConfigError
from shardwise.types import MetricValue

def policy(logprobs, old_logprobs, advantages, loss_mask, cu_seqlens, power=1):
    return torch.where(loss_mask, -advantages * logprobs ** power, 0.0), {"policy/own": MetricValue.mean(3.0, 1)}

def with_extras(logprobs, old_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, rollout_logprobs):
    return torch.where(loss_mask, logprobs * (ref_logprobs + 2 * rollout_logprobs), 0.0), {}

def seq_mean(losses, loss_mask, cu_seqlens, denominators, factor=1.0):
    parts = losses.split(cu_seqlens.diff().tolist())
    counts = [max(int(mask.sum()), 1) for mask in loss_mask.split(cu_seqlens.diff().tolist())]
    return factor * sum(part.sum() / n for part, n in zip(parts, counts)) / denominators.num_sequences

def k3(logprobs, ref_logprobs, scale=1.0):
    return scale * kl_divergence(logprobs, ref_logprobs, estimator="k3")

def value(values, old_values, returns, loss_mask, clip=0.5):
    return clipped_value_loss(values, old_values, returns, loss_mask, clip=clip)

def pairs(sums, ref_sums, lengths, beta=0.1):
    return dpo(sums, ref_sums, lengths, beta=beta, label_smoothing=0.0)

def scores(scores, margins, center_coef=0.0):
    return bradley_terry(scores, margins, center_coef=center_coef)

def no_metrics(first, *others):
    return first

def scalar(first, *others):
    return first.sum(), {}

def a_list(first, *others):
    return first.tolist(), {}

def three(first, *others):
    return first, {}, 1

def detached(first, *others):
    return (first if first.dim() == 1 else first[:, 0]).detach(), {}

def no_dict(first, *others):
    return first, 0.5

def plain_metric(first, *others):
    return (first if first.dim() == 1 else first[:, 0]) * 1, {"own/share": 0.5}

def a_float(*arguments):
    return 0.5

def per_token(first, *others):
    return first

def loose(first, *others):
    return first.detach()

def loose_sum(first, *others):
    return first.sum().detach()

def short(first, *others):
    return first[:-1]

def no_key(*arguments):
    return {}['x']

def leaves(*arguments):
    raise SystemExit(0)

def named(first, *others, metric):
    return (first if first.dim() == 1 else first[:, 0]) * 1, {eval(metric): MetricValue.mean(3.0, 1)}

def alike(first, *others):
    value = MetricValue.mean(3.0, 1)
    return (first if first.dim() == 1 else first[:, 0]) * 1, {"a/share": value, "b/share": value}

def of_all(first, *others):
    losses = (first if first.dim() == 1 else first[:, 0]) * 1
    return losses, {"own/share": MetricValue.sum(losses)}

def of_text(first, *others):
    return (first if first.dim() == 1 else first[:, 0]) * 1, {"own/share": MetricValue.mean(1, "a")}

def with_graph(first, *others):
    losses = (first if first.dim() == 1 else first[:, 0]) * 1
    return losses, {"own/share": MetricValue.mean((losses / losses).sum().view(1), np.float32(2))}

def complex_losses(first, *others):
    return (first if first.dim() == 1 else first[:, 0]) * 1j, {}

def zeroes(first, *others):
    others[-1].zero_() if others else first.zero_()
    return first, {}

def halves(values, old_values, returns, loss_mask):
    old_values.mul_(0.5)
    return values, {}

def refuses(*arguments):
    raise ConfigError("critic=1 is too small")
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "rules.py"
    path.write_text(OWN)
    return lambda name, **parameters: {"name": "custom", "function": f"{path}:{name}", "parameters": parameters}


def batch(lengths=(5, 4, 2, 6)):
    """Sequences whose first token is not trained, with every array that a loss may read."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    names = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")
    arrays = {name: torch.randn(num_tokens, generator=generator) - 1 for name in names}
    return TokenBatch(
        input_ids=torch.arange(num_tokens),
        position_ids=positions,
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        loss_mask=positions > 0,
        sample_index=list(range(len(lengths))),
        rewards=torch.tensor([0.5, 0.0, 0.25, 0.0]),
        **arrays,
    )


def empty():
    """What a rank without samples works on."""
    whole = batch((1,))
    return replace(whole, loss_mask=torch.zeros(1, dtype=torch.bool), sample_index=[])


def result_of(kind, config, given, numbers=None):
    """Loss, gradient and metrics."""
    loss_fn = LossSource.of(kind, config, **(numbers or {})).make().function
    generator = torch.Generator().manual_seed(1)
    scored = (torch.randn(len(given.input_ids), generator=generator) - 1).requires_grad_()
    name = "values" if kind in ("value", "reward_model") else "logprobs"
    loss, metrics = loss_fn(TokenOutputs(**{name: scored}, entropy=torch.zeros_like(scored)), given, STEP)
    loss.backward()
    return loss.item(), scored.grad.tolist(), {key: value.result() for key, value in metrics.items()}


def algorithm(**tree):
    return AlgorithmConfig.parse({"kl_coef": 0.3, **tree}, origin="test")


def critic(chosen):
    return CriticConfig.parse({"value_loss": chosen}, origin="test")


def of_policy(key):
    return lambda chosen: ("policy", algorithm(**{key: chosen}), {"kl_coef": 0.3})


KINDS = {
    "algorithm.aggregation": of_policy("aggregation"),
    "algorithm.kl_estimator": of_policy("kl_estimator"),
    "algorithm.policy_loss": of_policy("policy_loss"),
    "critic.value_loss": lambda chosen: ("value", critic(chosen), {}),
    "loss of preference": lambda chosen: ("preference", PREFERENCE.validate_python(chosen), {"kl": 0.0}),
    "loss of reward-model": lambda chosen: ("reward_model", REWARD_MODEL.validate_python(chosen), {}),
}
SAME = [
    ("algorithm.aggregation", "seq_mean", {}, "seq-mean-token-mean"),
    ("algorithm.kl_estimator", "k3", {}, "k3"),
    ("critic.value_loss", "value", {}, "clipped"),
    ("critic.value_loss", "value", {"clip": 0.1}, {"name": "clipped", "clip": 0.1}),
    ("loss of preference", "pairs", {}, "dpo"),
    ("loss of preference", "pairs", {"beta": 0.7}, {"name": "dpo", "beta": 0.7}),
    ("loss of reward-model", "scores", {"center_coef": 0.2}, {"center_coef": 0.2}),
]


@pytest.mark.parametrize(("key", "name", "parameters", "built_in"), SAME)
def test_a_function_that_equals_a_built_in_one_has_its_loss_gradient_and_metrics(own, key, name, parameters, built_in):
    found, expected = (
        result_of(kind, config, batch(), numbers)
        for kind, config, numbers in (KINDS[key](own(name, **parameters)), KINDS[key](built_in))
    )
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1] == pytest.approx(expected[1], rel=1e-6, abs=1e-8)
    assert any(found[1])
    assert found[2] == expected[2]


@pytest.mark.parametrize(("key", "name", "parameters", "built_in"), SAME)
def test_a_micro_batch_without_samples_has_loss_zero_and_a_graph(own, key, name, parameters, built_in):
    kind, config, numbers = KINDS[key](own(name, **parameters))
    loss, gradient, _ = result_of(kind, config, empty(), numbers)
    assert (loss, gradient) == (0.0, [0.0])


@pytest.mark.parametrize(
    ("key", "name", "parameter"),
    [
        ("algorithm.aggregation", "seq_mean", {"factor": 2.0}),
        ("algorithm.kl_estimator", "k3", {"scale": 2.0}),
        ("algorithm.policy_loss", "policy", {"power": 2}),
        ("critic.value_loss", "value", {"clip": 0.01}),
        ("loss of preference", "pairs", {"beta": 0.9}),
        ("loss of reward-model", "scores", {"center_coef": 0.9}),
    ],
)
def test_parameters_reach_the_function(own, key, name, parameter):
    plain, other = (
        result_of(kind, config, batch(), numbers)[0]
        for kind, config, numbers in (KINDS[key](own(name)), KINDS[key](own(name, **parameter)))
    )
    assert other != plain


def test_a_policy_loss_of_ones_own_is_summed_and_divided_as_the_built_in_ones(own):
    given = batch()
    loss, gradient, metrics = result_of("policy", algorithm(kl_coef=0, policy_loss=own("policy")), given,
                                        {"kl_coef": 0.0})  # fmt: skip
    assert gradient == pytest.approx(torch.where(given.loss_mask, -given.advantages / 17, 0.0).tolist(), rel=1e-6)
    assert metrics["policy/own"] == 3.0
    assert "policy/entropy" in metrics
    assert loss != 0


def test_a_policy_loss_of_ones_own_gets_the_logprobs_that_its_signature_names(own):
    given, config = batch(), algorithm(kl_in="reward", policy_loss=own("with_extras"))
    _, gradient, _ = result_of("policy", config, given, {"kl_coef": 0.0})
    expected = torch.where(given.loss_mask, (given.ref_logprobs + 2 * given.rollout_logprobs) / 17, 0.0)
    assert gradient == pytest.approx(expected.tolist(), rel=1e-5)
    with pytest.raises(
        ConfigError, match=r"policy_loss=.* asks for ref_logprobs, which this run does not have; it has r"
    ):
        result_of("policy", algorithm(kl_coef=0, policy_loss=own("with_extras")), replace(given, ref_logprobs=None),
                  {"kl_coef": 0.0})  # fmt: skip


LOSSES = "losses of shape [{}], one for each {}, and a dict of MetricValues by name)"
WRONG = [
    *(
        (key, name, f"{returned}, expected (" + LOSSES.format(size, each))
        for key, size, each in (
            ("algorithm.policy_loss", 17, "token"),
            ("critic.value_loss", 17, "token"),
            ("loss of preference", 2, "pair"),
            ("loss of reward-model", 2, "pair"),
        )
        for name, returned in (
            ("no_metrics", "a Tensor"),
            ("scalar", "losses of shape []"),
            ("a_list", "a tuple of list, dict"),
            ("three", "a tuple of Tensor, dict, int"),
            ("no_dict", "a tuple of Tensor, float"),
            ("detached", "losses without a graph back to what they were given"),
            ("plain_metric", "the metric own/share as a float"),
            ("complex_losses", "losses of torch.complex64"),
        )
    ),
    *(
        (key, name, f"the metric own/share with {part} in it, expected single numbers, such as mask.sum()")
        for key, size in (("algorithm.policy_loss", 17), ("loss of preference", 2))
        for name, part in (("of_all", f"a tensor of shape [{size}]"), ("of_text", "a str"))
    ),
    *(
        ("algorithm.aggregation", name, f"{returned}, expected a tensor of shape [], this micro-batch's part of a sum "
         "over the step")
        for name, returned in (
            ("a_float", "a float"),
            ("per_token", "a tensor of shape [17]"),
            ("loose_sum", "a tensor without a graph back to what it was given"),
        )
    ),
    *(
        ("algorithm.kl_estimator", name, f"{returned}, expected a tensor of shape [17], one estimate for each token")
        for name, returned in (
            ("a_float", "a float"),
            ("short", "a tensor of shape [16]"),
            ("loose", "a tensor without a graph back to what it was given"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("key", "name", "message"), WRONG)
def test_what_a_function_of_ones_own_returns_is_checked(own, key, name, message):
    kind, config, numbers = KINDS[key](own(name))
    with pytest.raises(TrainingError) as error:
        result_of(kind, config, batch(), numbers)
    shown = key.removesuffix(" of preference").removesuffix(" of reward-model")
    assert str(error.value) == f"{shown}={own(name)['function']} returned {message}"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("key", "size"), [("algorithm.policy_loss", 17), ("loss of preference", 2)])
def test_a_metric_of_ones_own_is_a_number_without_a_graph(own, key, size):
    """Of one with a graph torch warns where it is read."""
    kind, config, numbers = KINDS[key](own("with_graph"))
    *_, metrics = result_of(kind, config, batch(), numbers)
    assert [value for name, value in metrics.items() if name.endswith("share")] == [size / 2]


LOSS_KEYS = ("algorithm.policy_loss", "critic.value_loss", "loss of preference", "loss of reward-model")


@pytest.mark.parametrize("key", LOSS_KEYS)
@pytest.mark.parametrize(
    "name", ["", " own/share", "own/share ", "own/a\nb", "own/share\n", 3, None, ("a", "b"), "\ud800"]
)
def test_a_metric_of_ones_own_has_a_name_of_one_line(own, key, name):
    kind, config, numbers = KINDS[key](own("named", metric=repr(name)))
    with pytest.raises(TrainingError) as error:
        result_of(kind, config, batch(), numbers)
    shown = repr(name) if isinstance(name, str) else f"by {_kind(name)}"
    assert f" returned a metric named {shown}, expected a name that is one line of text" in str(error.value)


TAKEN = [
    *(
        (key, name)
        for key in LOSS_KEYS
        for name in (
            "step",
            "train/loss",
            "train/num_tokens",
            "train/busy/forward/rank_0",
            "own/busy/a/rank_12",
            "val/mine",
        )
    ),
    *(
        ("algorithm.policy_loss", name)
        for name in ("policy/entropy", "policy/ref_kl", "policy/kl_coef", "rollout/ratio", "reward/mean", "critic/loss")
    ),
    *(("critic.value_loss", name) for name in ("policy/entropy", "advantage/mine", "critic/explained_variance")),
    *((key, name) for key in LOSS_KEYS[2:] for name in ("loss", "own/loss")),
]


@pytest.mark.parametrize(("key", "name"), TAKEN)
def test_a_metric_of_ones_own_does_not_take_the_name_of_another(own, key, name):
    kind, config, numbers = KINDS[key](own("named", metric=repr(name)))
    with pytest.raises(TrainingError) as error:
        result_of(kind, config, batch(), numbers)
    assert f" returned a metric named {name!r}, which is for Shardwise's own metrics, expected ano" in str(error.value)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        *(
            (key, name)
            for key in LOSS_KEYS
            for name in ("own/share", "share", "steps", "training/loss mine", "Anteil/größte")
        ),
        *(
            ("algorithm.policy_loss", name)
            for name in ("policy/mine", "policy/approx_kl", "policy/entropy_bonus", "loss")
        ),
        *(("critic.value_loss", name) for name in ("critic/mine", "critic/value", "critic/loss_of_first")),
        *((key, name) for key in LOSS_KEYS[2:] for name in ("preference/margin", "policy/mine", "own/loss_of_first")),
    ],
)
def test_a_metric_of_ones_own_may_have_any_other_name(own, key, name):
    kind, config, numbers = KINDS[key](own("named", metric=repr(name)))
    assert result_of(kind, config, batch(), numbers)[2][name] == 3.0


@pytest.mark.parametrize("folder", ["engine", "recipes"])
def test_no_metric_of_a_critics_engine_is_free_for_its_loss(folder):
    """They are under train/ there, and reported under critic/."""
    sources = (Path(__file__).parents[2] / "shardwise" / folder).rglob("*.py")
    found = set(re.findall(r'f?"train(/[^"{]+)', "".join(path.read_text(encoding="utf-8") for path in sources)))
    of_supervised = {"/divergence", "/cross_entropy"}
    free = {name for name in found if not _TAKEN["critic.value_loss"].fullmatch(f"critic{name}")}
    assert found
    assert free - of_supervised <= {"/busy/"}  # whose pattern is in stragglers


@pytest.mark.parametrize("given", [10**400, -(10**400), math.inf, math.nan, -1.0])
def test_a_number_that_is_not_finite_is_refused(given):
    own = CustomFunction("algorithm.kl_controller", "rules.py:mine", lambda *_: given, {})
    with pytest.raises(
        TrainingError, match=r"kl_controller=rules.py:mine returned \S+, expected a finite number of at"
    ):
        own.number(own(0.1, 0.2, 8), meaning="the next kl_coef")


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (
            lambda given: given.to_sparse(),
            "a tensor of layout torch.sparse_coo, expected a dense one (torch.strided), as",
        ),
        (
            lambda given: torch.nested.nested_tensor(list(given), layout=torch.jagged),
            "a tensor of layout nested, expected a dense one",
        ),
        (lambda given: given.to("meta"), "a tensor on meta, expected one on cpu, like what it was given"),
        (lambda given: (given, given.to("meta")), "a tensor on meta, expected one on cpu"),
    ],
)
def test_a_tensor_that_holds_no_values_here_is_refused(made, told):
    own = CustomFunction("algorithm.advantage", "rules.py:mine", made, {})
    with pytest.raises(TrainingError, match=rf"^algorithm.advantage=rules.py:mine returned {re.escape(told)}"):
        own(torch.ones(2, 3))


@pytest.mark.parametrize("key", LOSS_KEYS)
def test_metrics_that_validation_would_take_for_one_are_named(own, key):
    kind, config, numbers = KINDS[key](own("alike"))
    if not key.startswith("loss"):
        assert {"a/share", "b/share"} <= result_of(kind, config, batch(), numbers)[2].keys()
        return
    with pytest.raises(TrainingError, match="returned the metrics a/share and b/share, which are one under val/, exp"):
        result_of(kind, config, batch(), numbers)


@pytest.mark.parametrize("key", KINDS)
def test_an_error_inside_a_function_of_ones_own_names_it_and_its_line(own, key):
    kind, config, numbers = KINDS[key](own("no_key"))
    with pytest.raises(TrainingError) as error:
        result_of(kind, config, batch(), numbers)
    shown = key.removesuffix(" of preference").removesuffix(" of reward-model")
    line = OWN.splitlines().index("    return {}['x']") + 1
    assert str(error.value) == f"{shown}={own('no_key')['function']} failed: KeyError: 'x' (rules.py line {line})"


@pytest.mark.parametrize("key", KINDS)
def test_a_function_of_ones_own_that_ends_its_process_fails_as_one_that_raises(own, key):
    kind, config, numbers = KINDS[key](own("leaves"))
    with pytest.raises(TrainingError, match=r"rules\.py:leaves failed: SystemExit: 0 \(rules\.py line \d+\)$"):
        result_of(kind, config, batch(), numbers)


@pytest.mark.parametrize("key", ["algorithm.policy_loss", "critic.value_loss"])
def test_a_function_of_ones_own_leaves_what_it_is_given_as_it_is(own, key):
    kind, config, numbers = KINDS[key](own("zeroes"))
    with pytest.raises(TrainingError, match=r"rules\.py:zeroes changed its argument number \d in place, and others"):
        result_of(kind, config, batch(), numbers)


def test_the_argument_that_is_changed_is_named_as_the_function_names_it(own):
    kind, config, numbers = KINDS["critic.value_loss"](own("halves"))
    with pytest.raises(TrainingError, match=r"rules\.py:halves changed its argument old_values in place, and others"):
        result_of(kind, config, batch(), numbers)


def test_an_error_that_says_itself_what_is_wrong_passes_a_function_of_ones_own(own):
    kind, config, numbers = KINDS["critic.value_loss"](own("refuses"))
    with pytest.raises(ConfigError, match=r"^critic=1 is too small$"):
        result_of(kind, config, batch(), numbers)


@pytest.mark.parametrize("key", KINDS)
def test_a_function_that_is_not_there_is_named_before_the_first_step(own, key):
    kind, config, numbers = KINDS[key](own("pairz"))
    with pytest.raises(ConfigError, match=r"rules\.py:pairz: .* has no 'pairz'; did you mean pairs\?"):
        LossSource.of(kind, config, **numbers).make()


def test_an_estimate_that_is_only_logged_needs_no_graph(own):
    _, _, metrics = result_of("policy", algorithm(kl_in="reward", kl_estimator=own("loose")), batch(),
                              {"kl_coef": 0.3})  # fmt: skip
    assert math.isfinite(metrics["policy/ref_kl"])


def test_terms_of_a_divergence_are_checked(own):
    def divergence_of(name):
        config = DistillationConfig.parse({"divergence": own(name), "temperature": 2.0}, origin="test")
        return LossSource.of("distillation", config).make().divergence

    student, teacher = torch.linspace(-2, -1, 15).view(3, 5).requires_grad_(), torch.linspace(-1, -3, 15).view(3, 5)
    assert divergence_of("k3").temperature == 2.0
    terms = divergence_of("k3").kind(student, teacher)
    torch.testing.assert_close(terms, torch.expm1(teacher - student) - (teacher - student))
    for name, returned in (
        ("a_float", "a float"),
        ("short", "a tensor of shape [2, 5]"),
        ("loose", "a tensor without a graph back to what it was given"),
    ):
        with pytest.raises(TrainingError) as error:
            divergence_of(name).kind(student, teacher)
        assert str(error.value) == (
            f"distillation.divergence={own(name)['function']} returned {returned}, expected a tensor of shape [3, 5], "
            "one term for each token and word"
        )


def places_of(cls, prefix=""):
    for name, field in cls.model_fields.items():
        groups = groups_of(field.annotation)
        if any(issubclass(group, Custom) for group in groups):
            yield prefix + name
        for group in groups:
            if tag_of(group) is None:
                yield from places_of(group, f"{prefix}{name}.")


@pytest.mark.parametrize("cls", get_args(RecipeConfig))
def test_every_key_that_takes_an_import_path_says_how_the_function_is_called(cls):
    assert set(places_of(cls)) == set(ARGUMENTS.get(cls, {}))


@pytest.mark.parametrize(
    ("key", "arguments"),
    [(key, arguments) for keys in ARGUMENTS.values() for key, arguments in keys.items()],
)
def test_the_page_in_docs_shows_how_every_function_is_called(key, arguments):
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    rows = [row.split("|") for row in page.splitlines() if row.startswith(f"| `{key}`")]
    shown = [tuple(re.sub(r" \[[^]]*\]", "", row[2]).strip(" `").split(", ")) for row in rows]
    assert arguments in shown


@pytest.mark.parametrize(
    ("tree", "there"),
    [
        ({}, {"rollout_logprobs", "reward_parts"}),
        ({"algorithm": {"kl_coef": 0.1}}, {"rollout_logprobs", "reward_parts", "ref_logprobs"}),
        ({"algorithm": {"num_epochs": 2}}, {"rollout_logprobs", "reward_parts", "old_logprobs"}),
        (
            {"algorithm": {"rollout_correction": {"bypass": True}}},
            {"rollout_logprobs", "reward_parts", "old_logprobs"},
        ),
        (
            {"critic": {}, "algorithm": {"advantage": "rules.py:mine", "kl_coef": 1, "num_epochs": 2}},
            {*EXTRAS["algorithm.advantage"], *EXTRAS["algorithm.policy_loss"]},
        ),
    ],
)
def test_what_a_run_has_for_functions_of_ones_own_follows_from_its_config(tree, there):
    base = {"model": {"path": "m"}, "data": {"train_files": "t"}, "reward": {"functions": "a:b"}}
    assert extras_of(RLConfig.parse(base | tree, origin="test")) == there


KINDS_OF_FUNCTIONS = """
class Klass:
    def __init__(self, *arguments): pass

class Called:
    def __call__(self, *arguments): pass

class Awaited:
    async def __call__(self, *arguments): pass

async def coroutine(*arguments): pass

async def stream(*arguments): yield 1

def generator(*arguments): yield 1

def plain(*arguments): pass

called, awaited, unnamed = Called(), Awaited(), lambda *arguments: None
"""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Klass", "class"),
        ("coroutine", "coroutine function"),
        ("awaited", "coroutine function"),
        ("generator", "generator"),
        ("stream", "generator"),
        ("plain", None),
        ("called", None),
        ("unnamed", None),
    ],
)
def test_what_computes_nothing_when_it_is_called_is_refused_before_the_start(tmp_path, name, kind):
    (tmp_path / "kinds.py").write_text(KINDS_OF_FUNCTIONS)
    base = {"model": {"path": "m"}, "data": {"train_files": "t"}, "reward": {"functions": "a:b"}}
    chosen = f"{tmp_path}/kinds.py:{name}"
    config = RLConfig.parse(base | {"algorithm": {"advantage": chosen}}, origin="test")
    if kind is None:
        require_callable(config)
        return
    with pytest.raises(ConfigError) as error:
        require_callable(config)
    expected = "a function of (token_rewards, loss_mask, group_ids)"
    assert str(error.value) == f"algorithm.advantage={chosen} is a {kind}, expected {expected}"


@pytest.mark.parametrize(
    ("name", "is_paired", "told"),
    [
        ("pairs", True, None),
        ("answers", False, None),
        (
            "answers",
            True,
            "missing a required argument: 'desirable'; set loss.is_paired=false for (sums, ref_sums, le",
        ),
        (
            "pairs",
            False,
            "too many positional arguments; set loss.is_paired=true for (sums, ref_sums, lengths)",
        ),
    ],
)
def test_a_preference_loss_of_the_other_kind_is_told_how_it_would_be_called(tmp_path, name, is_paired, told):
    (tmp_path / "own.py").write_text(
        "def pairs(sums, ref_sums, lengths): ...\ndef answers(sums, ref_sums, lengths, desirable, kl): ...\n"
    )
    loss = {"name": "custom", "function": f"{tmp_path}/own.py:{name}", "is_paired": is_paired}
    config = PreferenceConfig.parse({"model": {"path": "m"}, "data": {"train_files": "t"}, "loss": loss}, origin="t")
    if told is None:
        require_callable(config)
        return
    with pytest.raises(ConfigError, match=re.escape(told)):
        require_callable(config)

"""What one step of reinforcement learning does with a rollout."""

import functools
import json
import operator
from dataclasses import replace

import pytest
import torch

from shardwise.algorithms import adaptive_kl_coef
from shardwise.config import AlgorithmConfig, RewardConfig, RLConfig, TrainingError
from shardwise.observability import Spans
from shardwise.recipes.learner import Engines, Learner, minibatches, reward_columns
from shardwise.recipes.losses import LossSource
from shardwise.recipes.sampling.sampler import Rollout
from shardwise.recipes.sampling.samples import to_samples
from shardwise.types import MetricValue

OFFSETS = {"policy": 0.5, "reference": 0.25, "critic": 0.125, "teacher 0": 0.75, "teacher 1": 0.875}
"""A token's score is its id / 1000 plus this, minus 1 without adapters: what comes back shows where it came from."""
TEACHERS = {"advantage": "distill"}


def config(*, tree=None, **algorithm) -> RLConfig:
    whole = {
        "model": {"path": "m"},
        "data": {"train_files": "t.jsonl", "max_prompt_tokens": 100},
        "reward": {"functions": "a:b"},
        "algorithm": algorithm,
        "engine": {"max_tokens_per_micro_batch": 512},
    }
    return RLConfig.parse(whole | (tree or {}), origin="test")


def score(rank, batches, role, with_adapters):
    return [scores_of(batch.input_ids, role, with_adapters) for batch in batches]


def scores_of(token_ids, role, with_adapters=True):
    return token_ids / 1000 + OFFSETS[role] - float(not with_adapters)


class Trained:
    """Answers `train` with metrics; the KL divergence from the reference is what was asked for."""

    def __init__(self, ref_kl=0.0):
        self.ref_kl = ref_kl

    def __call__(self, rank, batches, denominators, role, *_):
        loss = {"train/loss": MetricValue.sum(2.0 if role == "policy" else 3.0)}
        if role == "critic":
            return loss | {name: MetricValue.mean(1.0, 1) for name in ("critic/value", "of_ours/train/value")}
        means = {"rollout/ratio": 2.0, "rollout/ratio_squared": 8.0, "rollout/logprob": -1.0, "policy/logprob": -2.0}
        return (
            loss
            | {name: MetricValue.mean(value, 1) for name, value in means.items()}
            | {"policy/ref_kl": MetricValue.mean(self.ref_kl, 1)}
        )


@pytest.fixture
def learner_of(fake_group, remote):
    def make(settings, *, roles=("policy",), ref_kl=0.0):
        group = fake_group(1, score=score, train=Trained(ref_kl), skip_step=lambda *_: {})
        engines = {role: remote(group, role, max_tokens_per_micro_batch=512) for role in roles}
        teachers = {"code": engines.get("teacher 0"), None: engines.get("teacher 1")}
        built = Engines(
            engines["policy"],
            reference=engines.get("reference"),
            critic=engines.get("critic"),
            teachers={source: engine for source, engine in teachers.items() if engine is not None},
        )
        return Learner(built, settings), group

    return make


@pytest.fixture
def rollout(make_group):
    groups = [
        make_group([1.0, 0.0, 1.0], lengths=[3, 1, 2], source="math"),
        make_group([0.0, 1.0, 1.0], lengths=[2, 2, 4], source="code", prompt_ids=(7, 8, 9)),
    ]
    return Rollout(groups=groups, greedy_rewards=None, metrics={})


def learn(learner, rollout, step=1):
    return {name: value.result() for name, value in learner.learn(rollout, step, Spans()).items()}


def calls_of(group, method):
    return [call for call in group.calls if call[0] == method]


def losses_of(group):
    """The sources of the losses that were bound."""
    return [LossSource.model_validate_json(source) for _, _, source in calls_of(group, "use_loss")]


def trained_tokens(call, field):
    """(token ids, values) of every sequence that a `train` call was given, by the sequence's tokens."""
    found = {}
    for shard in call[1]:
        for batch in shard:
            for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
                values = getattr(batch, field)
                found[tuple(batch.input_ids[start:end].tolist())] = None if values is None else values[start:end]
    return found


CRITIC = {"tree": {"critic": {}}, "advantage": {"name": "gae", "whiten": False}}
REFERENCE = ("policy", "reference")


@pytest.mark.parametrize(
    ("settings", "roles", "scored", "filled"),
    [
        ({}, ("policy",), [], {}),
        ({"num_minibatches": 2}, ("policy",), [("policy", True)], {"old_logprobs": ("policy", True)}),
        ({"num_epochs": 2}, ("policy",), [("policy", True)], {"old_logprobs": ("policy", True)}),
        ({"policy_loss": "kl_cov"}, ("policy",), [("policy", True)], {"old_logprobs": ("policy", True)}),
        (
            {"rollout_correction": {"weights": {}}},
            ("policy",),
            [("policy", True)],
            {"old_logprobs": ("policy", True)},
        ),
        ({"rollout_correction": {"bypass": True}, "num_epochs": 2}, ("policy",), [], {"old_logprobs": "rollout"}),
        ({"kl_coef": 0.1}, REFERENCE, [("reference", True)], {"ref_logprobs": ("reference", True)}),
        ({"kl_coef": 0.1, "kl_in": "reward"}, REFERENCE, [("reference", True)], {"ref_logprobs": ("reference", True)}),
        ({"kl_coef": 0.1}, ("policy",), [("policy", False)], {"ref_logprobs": ("policy", False)}),
        (
            {"kl_coef": 0.1, "num_minibatches": 2, "num_epochs": 2},
            REFERENCE,
            [("policy", True), ("reference", True)],
            {"old_logprobs": ("policy", True), "ref_logprobs": ("reference", True)},
        ),
        (CRITIC, ("policy", "critic"), [("critic", True)], {"values": ("critic", True)}),
        (
            CRITIC | {"num_minibatches": 3, "kl_coef": 0.1},
            ("policy", "reference", "critic"),
            [("policy", True), ("reference", True), ("critic", True)],
            {"old_logprobs": ("policy", True), "ref_logprobs": ("reference", True), "values": ("critic", True)},
        ),
    ],
)
def test_only_what_the_algorithm_needs_is_scored_and_it_reaches_the_policy(
    learner_of, rollout, settings, roles, scored, filled
):
    learner, group = learner_of(config(**settings), roles=roles)
    learn(learner, rollout)
    assert [call[2:] for call in calls_of(group, "score")] == scored
    (last, *_) = reversed([call for call in calls_of(group, "train") if call[3] == "policy"])
    samples = {tuple(s.token_ids.tolist()): s for s in to_samples(rollout.groups)}
    for field in ("old_logprobs", "ref_logprobs", "values"):
        for tokens, values in trained_tokens(last, field).items():
            match filled.get(field):
                case None:
                    assert values is None
                case "rollout":
                    assert values.tolist() == samples[tokens].rollout_logprobs.tolist()
                case (role, with_adapters):
                    torch.testing.assert_close(values, scores_of(torch.tensor(tokens), role, with_adapters))


@pytest.mark.parametrize(("every", "step", "is_due"), [(2, 1, True), (2, 2, False), (2, 3, True), (0, 1, False)])
def test_experts_reach_the_policy_alone_and_where_due_it_is_scored_with_and_without(
    learner_of, rollout, every, step, is_due
):
    """The learner's fake scores do not depend on experts, so both differences are those of the tokens' ids."""
    settings = {"router_replay": True, "probe_every_syncs": every}
    roles = ("policy", "reference", "critic")
    learner, group = learner_of(
        config(tree=CRITIC["tree"] | {"rollout": settings}, advantage="gae", kl_coef=0.1), roles=roles
    )
    groups = [
        replace(
            one,
            completions=[
                replace(
                    completion,
                    experts=torch.zeros(len(one.prompt_ids(completion)) + len(completion.token_ids) - 1, 3, 2).short(),
                )
                for completion in one.completions
            ],
        )
        for one in rollout.groups
    ]
    metrics = learn(learner, replace(rollout, groups=groups), step=step)
    given = [
        (call[0], call[2] if call[0] == "score" else call[3], call[1][0][0].experts is not None)
        for call in group.calls
        if call[0] in ("score", "train")
    ]
    others = [("score", "reference", False), ("score", "critic", False)]
    due = [("score", "policy", False), ("score", "policy", True)] if is_due else []
    assert given == [*others, *due, ("train", "critic", False), ("train", "policy", True)]
    for _, shards, *_ in calls_of(group, "train")[1:]:
        for batch in shards[0]:
            ends = batch.cu_seqlens[1:].long() - 1
            assert batch.experts[ends].unique().tolist() == [-1]
            assert batch.experts.shape == (len(batch.input_ids), 3, 2)
    apart = [
        (scores_of(sample.token_ids, "policy") - sample.rollout_logprobs).abs()[sample.loss_mask]
        for sample in to_samples(groups)
    ]
    for name in ("own", "replayed"):
        found = metrics.get(f"rollout/difference_{name}_experts")
        assert found == (pytest.approx(float(torch.cat(apart).mean())) if is_due else None)


@pytest.mark.parametrize(("num_minibatches", "num_epochs"), [(1, 1), (3, 1), (2, 2)])
def test_every_optimizer_step_sees_the_parts_of_the_step(learner_of, rollout, num_minibatches, num_epochs):
    settings = config(num_minibatches=num_minibatches, num_epochs=num_epochs)
    learner, group = learner_of(settings)
    metrics = learn(learner, rollout, step=4)
    trained = [list(trained_tokens(call, "advantages")) for call in calls_of(group, "train")]
    expected = [
        [tuple(sample.token_ids.tolist()) for sample in part]
        for part in minibatches(to_samples(rollout.groups), settings.algorithm, seed=0, step=4)
    ]
    assert [sorted(part) for part in trained] == [sorted(part) for part in expected]
    assert metrics["train/loss"] == 2.0, "the mean over optimizer steps"
    assert metrics["train/num_sequences"] == 6 / num_minibatches


def test_only_the_first_optimizer_step_tells_how_far_trainer_and_rollout_are_apart(fake_group, remote, rollout):
    """With bypass nothing is scored before it, and after it the policy is another one than the one that sampled."""
    calls = []

    def train(rank, batches, denominators, role, *_):
        calls.append(role)
        apart = float(len(calls))
        names = ("rollout/ratio", "rollout/ratio_squared", "rollout/logprob", "policy/logprob", "policy/entropy")
        return {name: MetricValue.mean(apart, 1) for name in names} | {"train/loss": MetricValue.sum(1.0)}

    group = fake_group(1, score=score, train=train)
    settings = config(rollout_correction={"bypass": True}, num_minibatches=2, num_epochs=2)
    policy = remote(group, "policy", max_tokens_per_micro_batch=512)
    metrics = learn(Learner(Engines(policy), settings), rollout)
    assert len(calls) == 4
    assert metrics["rollout/ratio"] == metrics["policy/logprob"] == 1.0
    assert metrics["rollout/chi2"] == 0.0
    assert metrics["policy/entropy"] == 2.5, "of all four"


def test_advantages_are_of_the_whole_step_and_not_of_a_minibatch(learner_of, rollout):
    found = []
    for num_minibatches in (1, 6):
        learner, group = learner_of(config(num_minibatches=num_minibatches))
        learn(learner, rollout)
        merged = {}
        for call in calls_of(group, "train"):
            merged |= trained_tokens(call, "advantages")
        found.append({tokens: values.tolist() for tokens, values in merged.items()})
    assert found[0] == found[1]
    assert len(found[0]) == 6
    assert any(any(values) for values in found[0].values())


def test_the_overlong_penalty_and_the_length_limit_reach_the_rewards(learner_of, rollout):
    """A completion of 4 of at most 4 tokens loses the whole factor."""
    advantage = {"advantage": {"name": "remax"}}
    rollout = replace(rollout, greedy_rewards=[0.0, 0.5])
    tree = {"rollout": {"max_response_tokens": 4}}
    learner, group = learner_of(config(tree=tree, overlong_penalty={"buffer_tokens": 2, "factor": 3.0}, **advantage))
    learn(learner, rollout)
    found = trained_tokens(calls_of(group, "train")[0], "advantages")
    last = {tokens: round(float(values[-1]), 5) for tokens, values in found.items()}
    assert last == {
        (7, 8, 100, 101, 102): 1.0 - 1.5,
        (7, 8, 110): 0.0,
        (7, 8, 120, 121): 1.0,
        (7, 8, 9, 100, 101): -0.5,
        (7, 8, 9, 110, 111): 0.5,
        (7, 8, 9, 120, 121, 122, 123): 0.5 - 3.0,
    }


def test_failed_rewards_are_left_out_where_the_config_says_so(learner_of, make_group):
    rollout = Rollout(
        groups=[make_group([1.0, 0.0, 9.0], failed=[False, False, True])], greedy_rewards=None, metrics={}
    )
    for on_failure, num_tokens in (("mask", 4), ("value", 6)):
        learner, _ = learner_of(config(tree={"reward": {"functions": "a:b", "on_failure": on_failure}}))
        metrics = learn(learner, rollout)
        assert metrics["train/num_tokens"] == metrics["tokens/trained"] == num_tokens
        assert metrics["tokens/masked"] == 6 - num_tokens


def test_gdpo_needs_parts_of_the_reward_unless_every_call_failed(learner_of, make_group):
    """A manager may return no part that all its results have."""
    tree = {"reward": {"functions": "a:b", "manager": "a:manage", "on_failure": "value"}}
    learner, group = learner_of(config(advantage="gdpo", tree=tree))
    without_parts = replace(make_group([1.0, 0.0, 1.0]), reward_parts=[{}, {"length": 2.0}, {}])
    judged = Rollout(groups=[without_parts], greedy_rewards=None, metrics={})
    with pytest.raises(TrainingError, match=r"gdpo compares the parts .* reward\.manager have none in common"):
        learn(learner, judged)
    failed = Rollout(groups=[make_group([0.0, 0.0], failed=[True, True])], greedy_rewards=None, metrics={})
    learn(learner, failed)
    (call,) = calls_of(group, "train")
    assert all(not advantages.any() for advantages in trained_tokens(call, "advantages").values())


def test_a_rejected_token_is_in_no_denominator(learner_of, rollout):
    """The trainer's logprobs are positive here, so every ratio is above the bound."""
    learner, group = learner_of(config(rollout_correction={"rejection": {"high": 1e-3}}))
    metrics = learn(learner, rollout)
    assert metrics["rollout/rejected_fraction"] == 1.0
    assert (metrics["train/num_tokens"], metrics["train/num_sequences"]) == (0, 0)
    assert (metrics["tokens/trained"], metrics["tokens/masked"]) == (0, 14)
    assert metrics["train/empty_steps"] == 1
    assert "train/loss" not in metrics
    assert calls_of(group, "skip_step") == [("skip_step", "policy")]
    assert not calls_of(group, "train")


def test_an_optimizer_step_without_a_trained_token_is_none_and_the_next_one_is_on_policy(
    learner_of, make_group, monkeypatch
):
    """Metrics of the first minibatch that trains are of the policy that sampled; those of later ones are not."""
    masking = {"reward": {"functions": "a:b", "on_failure": "mask"}}
    learner, group = learner_of(config(tree=masking, num_minibatches=3))
    failed = make_group([0.0, 1.0], failed=[True, True])
    rollout = Rollout(groups=[failed, make_group([1.0, 0.0]), make_group([1.0, 0.0])], greedy_rewards=None, metrics={})
    in_order = lambda samples, *_, **__: [samples[:2], samples[2:4], samples[4:]]  # noqa: E731
    monkeypatch.setattr("shardwise.recipes.learner.minibatches", in_order)
    found = learner.learn(rollout, 1, Spans())
    assert [call[0] for call in group.calls if call[0] in ("skip_step", "train")] == ["skip_step", "train", "train"]
    assert found["train/empty_steps"].result() == 1
    assert found["train/num_sequences"].result() == pytest.approx(4 / 3)
    assert found["rollout/ratio"].count == 1


def test_f44_steps_of_which_nothing_is_left_to_train_are_reported(learner_of, rollout, capsys):
    learner, _ = learner_of(config(rollout_correction={"rejection": {"high": 1e-3}}))
    for step in range(1, 11):
        learn(learner, rollout, step)
    (line,) = capsys.readouterr().err.splitlines()
    assert "no learning signal: for 10 steps nothing could be learnt" in line
    assert "rollout_correction.rejection" in line


def test_the_policy_waits_while_the_critic_warms_up(learner_of, rollout):
    """How far it is from the rollout is measured all the same."""
    settings = config(tree={"critic": {"critic_warmup_steps": 2}}, advantage="gae", num_minibatches=2)
    learner, group = learner_of(settings, roles=("policy", "critic"))
    for step in (1, 2):
        metrics = learn(learner, rollout, step)
        assert (metrics["critic/loss"], metrics["critic/value"]) == (3.0, 1.0)
        assert metrics["of_ours/train/value"] == 1.0
        assert "train/loss" not in metrics
        assert metrics["rollout/chi2"] >= 0
    assert [call[3] for call in calls_of(group, "train")] == ["critic"] * 4
    metrics = learn(learner, rollout, 3)
    assert [call[3] for call in calls_of(group, "train")][4:] == ["critic", "policy"] * 2
    assert (metrics["train/loss"], metrics["critic/loss"]) == (2.0, 3.0)
    assert (metrics["rollout/chi2"], metrics["rollout/effective_sample_size"]) == (7.0, 0.5)


def test_critic_and_policy_learn_from_the_same_samples(learner_of, rollout):
    learner, group = learner_of(config(**CRITIC), roles=("policy", "critic"))
    learn(learner, rollout)
    critic, policy = calls_of(group, "train")
    for field in ("values", "returns", "advantages"):
        first, second = trained_tokens(critic, field), trained_tokens(policy, field)
        assert {tokens: values.tolist() for tokens, values in first.items()} == {
            tokens: values.tolist() for tokens, values in second.items()
        }


def test_every_sample_is_taught_by_the_teacher_of_its_source(learner_of, rollout):
    teachers = [{"model": {"path": "c"}, "data_source": "code"}, {"model": {"path": "o"}}]
    learner, group = learner_of(
        config(tree={"teachers": teachers}, **TEACHERS), roles=("policy", "teacher 0", "teacher 1")
    )
    metrics = learn(learner, rollout)
    scored = {call[2]: call[1] for call in calls_of(group, "score")}
    assert list(scored) == ["teacher 0", "teacher 1"]
    found = trained_tokens(calls_of(group, "train")[0], "advantages")
    gaps = []
    for sample in to_samples(rollout.groups):
        role = "teacher 0" if sample.group == 1 else "teacher 1"
        gap = torch.where(sample.loss_mask, scores_of(sample.token_ids, role) - sample.rollout_logprobs, 0.0)
        torch.testing.assert_close(found[tuple(sample.token_ids.tolist())], gap)
        gaps.append(gap[sample.loss_mask])
    assert metrics["policy/teacher_kl"] == pytest.approx(-float(torch.cat(gaps).mean()), rel=1e-5)


def test_a_teacher_without_samples_in_a_step_does_not_work(learner_of, rollout):
    teachers = [{"model": {"path": "c"}, "data_source": "code"}, {"model": {"path": "o"}}]
    learner, group = learner_of(
        config(tree={"teachers": teachers}, **TEACHERS), roles=("policy", "teacher 0", "teacher 1")
    )
    learn(learner, replace(rollout, groups=rollout.groups[:1]))
    assert [call[2] for call in calls_of(group, "score")] == ["teacher 1"]


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_an_adaptive_coefficient_is_bound_anew_and_used_from_the_next_step_on(learner_of, rollout, kl_in):
    controller = {"name": "adaptive", "target": 0.1, "horizon": 60}
    settings = config(kl_coef=0.5, kl_in=kl_in, kl_estimator="k1", kl_controller=controller)
    learner, group = learner_of(settings, roles=REFERENCE, ref_kl=5.0)
    coefs = [0.5]
    for step in (1, 2):
        assert learn(learner, rollout, step)["policy/kl_coef"] == pytest.approx(coefs[-1])
        coefs.append(adaptive_kl_coef(coefs[-1], 5.0, target=0.1, horizon=60, num_samples=6))
    assert coefs[1] == pytest.approx(0.5 * (1 + 0.2 * 6 / 60))
    assert learner.kl_coef == pytest.approx(coefs[2])
    bound = losses_of(group)
    assert [source.kind for source in bound] == ["policy"] * 2
    assert [source.numbers["kl_coef"] for source in bound] == pytest.approx(coefs[1:])
    assert AlgorithmConfig.model_validate_json(bound[0].config) == settings.algorithm
    first, second = (trained_tokens(call, "advantages") for call in calls_of(group, "train"))
    moved = any(first[tokens].tolist() != second[tokens].tolist() for tokens in first)
    assert moved == (kl_in == "reward")


CONTROLLERS = """
def adaptive(kl_coef, kl, num_samples, target=0.1, horizon=60):
    error = min(max(kl / target - 1, -0.2), 0.2)
    return max(kl_coef * (1 + error * num_samples / horizon), 0.0)

def below(kl_coef, kl, num_samples):
    return -0.5

def endless(kl_coef, kl, num_samples):
    return kl / 1e-320

def text(kl_coef, kl, num_samples):
    return "0.1"

def off(kl_coef, kl, num_samples):
    return 0
"""


@pytest.fixture
def controller(tmp_path):
    (tmp_path / "controllers.py").write_text(CONTROLLERS)
    return lambda name: f"{tmp_path / 'controllers.py'}:{name}"


def test_a_controller_of_ones_own_moves_the_coefficient_as_the_built_in_one(learner_of, rollout, controller):
    longer = {"name": "custom", "function": controller("adaptive"), "parameters": {"horizon": 30}}
    for own, built_in in (
        (controller("adaptive"), {"name": "adaptive", "target": 0.1, "horizon": 60}),
        (longer, {"name": "adaptive", "target": 0.1, "horizon": 30}),
    ):
        coefs = []
        for chosen in (own, built_in):
            learner, group = learner_of(config(kl_coef=0.5, kl_controller=chosen), roles=REFERENCE, ref_kl=5.0)
            for step in (1, 2):
                learn(learner, rollout, step)
            coefs.append([source.numbers["kl_coef"] for source in losses_of(group)])
        assert coefs[0] == coefs[1]
        assert len(set(coefs[0])) == 2


def test_a_coefficient_of_zero_stays_bound(learner_of, rollout, controller):
    learner, group = learner_of(config(kl_coef=0.5, kl_controller=controller("off")), roles=REFERENCE, ref_kl=5.0)
    assert [learn(learner, rollout, step)["policy/kl_coef"] for step in (1, 2)] == [0.5, 0.0]
    assert [source.numbers for source in losses_of(group)] == [{"kl_coef": 0.0}] * 2


@pytest.mark.parametrize(("name", "returned"), [("below", "-0.5"), ("endless", "inf"), ("text", "a str")])
def test_the_coefficient_of_a_controller_of_ones_own_is_checked(learner_of, rollout, controller, name, returned):
    learner, _ = learner_of(config(kl_coef=0.5, kl_controller=controller(name)), roles=REFERENCE, ref_kl=5.0)
    with pytest.raises(TrainingError) as error:
        learn(learner, rollout)
    assert str(error.value) == (
        f"algorithm.kl_controller={controller(name)} returned {returned}, expected a finite number of at least 0, the "
        "next kl_coef"
    )


@pytest.mark.parametrize("settings", [{}, {"kl_coef": 0.5}])
def test_a_fixed_coefficient_stays_and_is_bound_once_outside(learner_of, rollout, settings):
    learner, group = learner_of(config(**settings), roles=REFERENCE, ref_kl=5.0)
    metrics = learn(learner, rollout)
    assert losses_of(group) == []
    assert metrics.get("policy/kl_coef") == settings.get("kl_coef")


def test_the_coefficient_stays_while_the_policy_waits(learner_of, rollout):
    controller = {"name": "adaptive", "target": 0.1, "horizon": 60}
    settings = config(
        tree={"critic": {"critic_warmup_steps": 1}}, advantage="gae", kl_coef=0.5, kl_controller=controller
    )
    learner, group = learner_of(settings, roles=("policy", "reference", "critic"), ref_kl=5.0)
    assert learn(learner, rollout)["policy/kl_coef"] == 0.5
    assert (learner.kl_coef, losses_of(group)) == (0.5, [])


def test_tokens_are_selected_for_each_optimizer_step(learner_of, rollout):
    settings = config(policy_loss={"name": "kl_cov", "fraction": 0.3}, num_minibatches=2)
    learner, group = learner_of(settings)
    learn(learner, rollout)
    for call in calls_of(group, "train"):
        num_selected = sum(int(values.sum()) for values in trained_tokens(call, "selected").values())
        assert num_selected == max(1, int(0.3 * call[2].num_tokens))


def test_engines_that_learn_are_saved_and_the_others_are_frozen(fake_group, remote):
    policy, reference, critic, teacher = (remote(fake_group(), role) for role in ("policy", "reference", "critic", "t"))
    assert Engines(policy).saved == {"": policy}
    assert Engines(policy).frozen == []
    whole = Engines(policy, reference=reference, critic=critic, teachers={None: teacher})
    assert whole.saved == {"": policy, "critic": critic}
    assert whole.frozen == [reference, teacher]


def test_columns_hold_the_reward_functions_and_nothing_else_they_return(make_group):
    """A failed call has reward.failure_value, and the other completions keep their scores."""
    parts = [{"a": 1.0, "acc": 1.0, "b": 2.0}, {"b": 5.0}, {"a": 3.0, "acc": 0.0, "b": 4.0}]
    groups = [make_group([0.0] * 3, parts=parts, failed=[False, True, False])]
    functions = ["x.py:a", {"function": "y.py:b", "weight": 7.0}]
    assert reward_columns(groups, RewardConfig(functions=functions, on_failure="mask")) == {
        "a": [1.0, 0.0, 3.0],
        "b": [2.0, 5.0, 4.0],
    }
    valued = RewardConfig(functions=functions, on_failure="value", failure_value=-1.5)
    assert reward_columns(groups, valued)["a"] == [1.0, -1.5, 3.0]
    managed = RewardConfig(functions=[], manager="z.py:C", on_failure="mask")
    assert reward_columns(groups, managed) == {"a": [1.0, 0.0, 3.0], "acc": [1.0, 0.0, 0.0], "b": [2.0, 5.0, 4.0]}


@pytest.mark.parametrize(
    ("num_samples", "num_minibatches", "num_epochs"), [(12, 3, 2), (13, 4, 1), (5, 5, 3), (8, 1, 2)]
)
def test_minibatches_partition_the_samples_in_every_epoch(make_group, num_samples, num_minibatches, num_epochs):
    samples = to_samples([make_group([0.0] * num_samples)])
    algorithm = AlgorithmConfig(num_minibatches=num_minibatches, num_epochs=num_epochs)
    parts = list(minibatches(samples, algorithm, seed=3, step=7))
    assert len(parts) == num_minibatches * num_epochs
    epochs = [
        functools.reduce(operator.iadd, parts[i : i + num_minibatches], [])
        for i in range(0, len(parts), num_minibatches)
    ]
    for epoch in epochs:
        assert sorted(map(id, epoch)) == sorted(map(id, samples))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    orders = [[id(sample) for sample in epoch] for epoch in epochs]
    assert len({tuple(order) for order in orders}) == num_epochs
    again = list(minibatches(samples, algorithm, seed=3, step=7))
    assert [[id(s) for s in part] for part in again] == [[id(s) for s in part] for part in parts]
    for other in ({"seed": 4, "step": 7}, {"seed": 3, "step": 8}):
        moved = [id(s) for part in minibatches(samples, algorithm, **other) for s in part]
        assert moved != functools.reduce(operator.iadd, orders, [])


def test_one_minibatch_in_one_epoch_is_the_samples_as_they_are(make_group):
    samples = to_samples([make_group([0.0] * 5)])
    assert list(minibatches(samples, AlgorithmConfig(), seed=0, step=1)) == [samples]


def test_f44_steps_without_a_learning_signal_are_reported_once_in_ten(learner_of, make_group, capsys):
    learner, _ = learner_of(config())
    dull = Rollout(groups=[make_group([1.0, 1.0, 1.0])], greedy_rewards=None, metrics={})
    bright = Rollout(groups=[make_group([1.0, 0.0, 1.0])], greedy_rewards=None, metrics={})
    for step in range(1, 10):
        learn(learner, dull, step)
    learn(learner, bright, 10)
    assert capsys.readouterr().err == ""
    for step in range(11, 31):
        learn(learner, dull, step)
    first, second = capsys.readouterr().err.splitlines()
    assert "no learning signal: for 10 steps" in first
    assert "no learning signal: for 20 steps" in second
    assert "advantage/zero_variance_fraction = 1" in first


def test_f44_advantages_that_compare_no_group_compare_a_step(learner_of, make_group, capsys):
    learner, _ = learner_of(config(advantage={"name": "reinforce_plus_plus", "gamma": 0.5}))
    apart = Rollout(groups=[make_group([1.0, 1.0]), make_group([0.0, 0.0])], greedy_rewards=None, metrics={})
    dull = Rollout(groups=[make_group([1.0, 1.0]), make_group([1.0, 1.0])], greedy_rewards=None, metrics={})
    for step in range(1, 12):
        learn(learner, apart, step)
    assert capsys.readouterr().err == ""
    for step in range(12, 22):
        learn(learner, dull, step)
    (line,) = capsys.readouterr().err.splitlines()
    assert "no learning signal: for 10 steps the rewards have been all equal, of a step" in line


def test_fewer_samples_than_minibatches_make_fewer_optimizer_steps(make_group):
    """Dynamic sampling may leave a small batch; no optimizer step is without samples."""
    samples = to_samples([make_group([1.0, 0.0, 1.0])])
    parts = list(minibatches(samples, AlgorithmConfig(num_minibatches=8), seed=0, step=1))
    assert sorted(len(part) for part in parts) == [1, 1, 1]


def test_a_learner_goes_on_with_the_coefficient_and_the_idle_steps_of_another(learner_of, rollout, make_group, capsys):
    """The tenth idle step in a row warns, wherever the run stopped before."""
    controller = {"name": "adaptive", "target": 0.1, "horizon": 60}
    settings = config(kl_coef=0.5, kl_controller=controller)
    first, _ = learner_of(settings, roles=REFERENCE, ref_kl=5.0)
    idle = Rollout(groups=[make_group([1.0, 1.0])], greedy_rewards=None, metrics={})
    for step in range(1, 10):
        learn(first, idle, step)
    second, group = learner_of(settings, roles=REFERENCE, ref_kl=5.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.kl_coef == first.kl_coef > 0.5
    assert losses_of(group)[-1].numbers == {"kl_coef": first.kl_coef}
    assert "no learning signal" not in capsys.readouterr().err
    learn(second, idle, 10)
    assert "no learning signal: for 10 steps" in capsys.readouterr().err


def test_a_fixed_coefficient_is_the_configs_whatever_the_state_says(learner_of):
    learner, group = learner_of(config(kl_coef=0.5), roles=REFERENCE)
    learner.load_state_dict({"kl_coef": 0.1, "num_idle_steps": 0})
    assert learner.kl_coef == 0.5
    assert losses_of(group) == []

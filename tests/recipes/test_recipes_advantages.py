"""Advantages bound to samples, against loops in numpy."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from noisy_samples import as_lists, rewritten, two_groups, with_noise

from shardwise.config import AlgorithmConfig, ConfigError, TrainingError
from shardwise.recipes.advantages import (
    ADVANTAGES,
    Scored,
    turns_and_states,
    with_advantages,
)
from shardwise.recipes.sampling.samples import to_samples
from shardwise.types import Sample


def advantages_of(samples, algorithm, *, kl_coef=None, reward_parts=None, **scored):
    algorithm = AlgorithmConfig.parse(algorithm, origin="test")
    return with_advantages(
        Scored(samples=samples, reward_parts=reward_parts or {}, **scored),
        algorithm,
        kl_coef=algorithm.kl_coef if kl_coef is None else kl_coef,
    )


@pytest.mark.parametrize("advantage", ["grpo", "grpo without std", "rloo"])
@pytest.mark.parametrize("coef", [0.3, 0.7])
def test_advantages_with_the_kl_term_in_the_reward_equal_a_numpy_loop(make_group, advantage, coef):
    """R = reward - coef * sum of k1 over the completion, then the group's baseline; coef is the one of the moment."""
    samples = list(with_noise(two_groups(make_group), "ref_logprobs"))
    scored, metrics = advantages_of(
        samples,
        {
            "advantage": {"name": "rloo"} if advantage == "rloo" else
            {"name": "grpo", "scale": "none" if "without" in advantage else "std"},
            "kl_coef": 0.3,
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
        kl_coef=coef,
    )  # fmt: skip
    outcomes = np.array([s.reward - coef * float((s.rollout_logprobs - s.ref_logprobs).sum()) for s in samples])
    for start in (0, 3):
        members = outcomes[start : start + 3]
        for i in range(3):
            match advantage:
                case "grpo":
                    expected = (members[i] - members.mean()) / (members.std(ddof=1) + 1e-6)
                case "grpo without std":
                    expected = members[i] - members.mean()
                case _:
                    expected = members[i] - np.delete(members, i).mean()
            found = scored[start + i]
            assert found.advantages.shape == found.token_ids.shape
            np.testing.assert_allclose(found.advantages[found.loss_mask], expected, rtol=1e-5, atol=1e-6)
            assert not found.advantages[~found.loss_mask].any()
    assert metrics["advantage/num_zero_variance_groups"].result() == 0


@pytest.mark.parametrize("advantage", ["gpg", "maxrl"])
def test_statistics_of_outcomes_know_no_penalties(make_group, advantage):
    """Outcomes 1 and 0, less a penalty of 0.5 for each and a KL term of 2 x 0.25 for the wrong one: R = 0.5 and -1,
    which deviate by 0.75 from their mean; alpha is 2 / 1, and 1 / p is 2."""
    samples = to_samples([make_group([1.0, 0.0])])
    samples = [replace(s, reward=s.reward - 0.5, ref_logprobs=s.rollout_logprobs.clone()) for s in samples]
    samples[1].ref_logprobs[-2:] -= 0.25
    algorithm = {"advantage": advantage, "kl_coef": 1.0, "kl_in": "reward", "kl_estimator": "k1"}
    scored, _ = advantages_of(samples, algorithm, outcome_rewards=[1.0, 0.0])
    assert [sample.advantages[-1].item() for sample in scored] == pytest.approx([2 * 0.75, 2 * -0.75])


def test_a_kl_term_in_the_loss_leaves_rewards_alone(make_group):
    samples = list(with_noise(to_samples([make_group([1.0, 0.0, 1.0])]), "ref_logprobs"))
    plain, _ = advantages_of(samples, {"advantage": {"scale": "none"}})
    in_loss, _ = advantages_of(samples, {"advantage": {"scale": "none"}, "kl_coef": 5.0, "kl_in": "loss"})
    for a, b in zip(plain, in_loss, strict=True):
        assert a.advantages.tolist() == b.advantages.tolist()
        assert a.returns is None
    assert plain[0].advantages.tolist() == pytest.approx([0, 0, 1 / 3, 1 / 3])
    assert plain[1].advantages.tolist() == pytest.approx([0, 0, -2 / 3, -2 / 3])


def test_groups_that_teach_nothing_are_counted(make_group):
    samples = to_samples([make_group([1.0, 1.0]), make_group([0.0, 0.0]), make_group([1.0, 0.0])])
    _, metrics = advantages_of(samples, {})
    assert metrics["advantage/num_zero_variance_groups"].result() == 2


def test_f41_masked_failures_are_no_part_of_a_groups_statistics(make_group):
    """A group of three in which one call failed is a group of two."""
    group = make_group([1.0, 0.0, 5.0], failed=[False, False, True])
    scored, metrics = advantages_of(to_samples([group], mask_failed=True), {"advantage": {"scale": "none"}})
    assert [sample.advantages[-1].item() for sample in scored] == [0.5, -0.5, 0.0]
    assert metrics["advantage/num_groups_without_baseline"].result() == 0


@pytest.mark.parametrize("name", ADVANTAGES)
def test_parameters_of_an_estimator_reach_it(make_group, monkeypatch, name):
    """What is set in the config, and not a default, is what the function is called with."""
    other = {"scale": "none", "gamma": 0.625}
    keys = {"grpo": ["scale"], "grpo_passk": ["scale"], "reinforce_plus_plus": ["gamma"]}.get(name, [])
    parameters = {key: other[key] for key in keys}
    calls = []

    def estimator(token_rewards, loss_mask, group_ids, **given):
        calls.append((token_rewards, loss_mask, group_ids, given))
        return torch.arange(loss_mask.numel(), dtype=torch.float32).view(loss_mask.shape)

    monkeypatch.setitem(ADVANTAGES, name, estimator)
    samples = two_groups(make_group)
    scored, _ = advantages_of(samples, {"advantage": {"name": name, **parameters}})
    ((token_rewards, loss_mask, group_ids, given),) = calls
    assert given == parameters
    assert group_ids.tolist() == [0, 0, 0, 1, 1, 1]
    width = loss_mask.shape[1]
    for row, sample in enumerate(samples):
        length = len(sample.token_ids)
        assert loss_mask[row].tolist() == sample.loss_mask.tolist() + [False] * (width - length)
        assert float(token_rewards[row].sum()) == sample.reward
        assert scored[row].advantages.tolist() == [row * width + place for place in range(length)]


def test_gae_equals_a_loop_and_gives_the_critic_its_returns(make_group):
    gamma, lam = 0.9, 0.75
    samples = list(with_noise(two_groups(make_group), "values"))
    advantage = {"name": "gae", "gamma": gamma, "lam": lam, "whiten": False}
    scored, metrics = advantages_of(samples, {"advantage": advantage})
    errors, targets = [], []
    for sample, found in zip(samples, scored, strict=True):
        values, last = sample.values.double().numpy(), int(sample.loss_mask.nonzero()[-1])
        following, carried = 0.0, 0.0
        for t in reversed(sample.loss_mask.nonzero().flatten().tolist()):
            delta = (sample.reward if t == last else 0.0) + gamma * following - values[t]
            carried = delta + gamma * lam * carried
            following = values[t]
            assert found.advantages[t].item() == pytest.approx(carried, rel=1e-5, abs=1e-6)
            assert found.returns[t].item() == pytest.approx(carried + values[t], rel=1e-5, abs=1e-6)
            errors.append(carried)
            targets.append(carried + values[t])
        assert not found.advantages[~found.loss_mask].any()
    explained = 1 - np.var(errors) / np.var(targets)
    assert metrics["critic/explained_variance"].result() == pytest.approx(explained, rel=1e-4)
    whitened, _ = advantages_of(samples, {"advantage": {**advantage, "whiten": True}})
    trained = torch.cat([s.advantages[s.loss_mask] for s in whitened])
    assert float(trained.mean()) == pytest.approx(0, abs=1e-6)
    assert float(trained.var(unbiased=True)) == pytest.approx(1, rel=0.1)
    for a, b in zip(whitened, scored, strict=True):
        assert a.returns.tolist() == b.returns.tolist()


def test_gdpo_scales_every_reward_function_in_its_group_before_they_are_added(make_group):
    """A function with large scores hides no other; weights are those of reward.functions."""
    rewards = {"big": [100.0, 0.0, 50.0, 10.0, 20.0, 0.0], "small": [0.0, 0.1, 0.1, 0.0, 0.0, 0.2]}
    samples = two_groups(make_group)
    weights = {"big": 0.5, "small": 1.0}
    scored, metrics = advantages_of(samples, {"advantage": "gdpo"}, reward_parts=rewards, reward_weights=weights)
    assert metrics["advantage/zero_variance_fraction"].result() == 0
    combined = np.zeros(6)
    for name, weight in (("big", 0.5), ("small", 1.0)):
        for start in (0, 3):
            members = np.array(rewards[name][start : start + 3])
            combined[start : start + 3] += weight * (members - members.mean()) / (members.std(ddof=1) + 1e-6)
    tokens = np.concatenate([[value] * int(s.loss_mask.sum()) for value, s in zip(combined, samples, strict=True)])
    found = np.concatenate([s.advantages[s.loss_mask].numpy() for s in scored])
    scale = np.sqrt(((tokens - tokens.mean()) ** 2).mean() / ((found - found.mean()) ** 2).mean())
    np.testing.assert_allclose(found, (tokens - tokens.mean()) / scale, rtol=1e-4, atol=1e-5)
    assert found.std() == pytest.approx(1.0, rel=0.1)
    weights = {"big": 0.0, "small": 1.0}
    other, _ = advantages_of(samples, {"advantage": "gdpo"}, reward_parts=rewards, reward_weights=weights)
    assert other[0].advantages.tolist() != scored[0].advantages.tolist()


def test_gdpo_gives_what_a_manager_returns_the_weight_one(make_group):
    """Entries of reward.functions that a manager does without have no rewards."""
    rewards, samples = {"own": [1.0, 0.0, 0.5, 0.0, 1.0, 1.0]}, two_groups(make_group)
    plain, _ = advantages_of(samples, {"advantage": "gdpo"}, reward_parts=rewards)
    beside, _ = advantages_of(samples, {"advantage": "gdpo"}, reward_parts=rewards, reward_weights={"unused": 3.0})
    assert [s.advantages.tolist() for s in beside] == [s.advantages.tolist() for s in plain]


def test_remax_compares_with_the_greedy_completion_of_the_same_prompt(make_group):
    samples = two_groups(make_group)
    greedy = [0.25] * 3 + [2.0] * 3
    scored, _ = advantages_of(samples, {"advantage": "remax"}, greedy_rewards=greedy)
    for sample, found, baseline in zip(samples, scored, greedy, strict=True):
        expected = [sample.reward - baseline if trained else 0.0 for trained in sample.loss_mask.tolist()]
        assert found.advantages.tolist() == pytest.approx(expected)


def test_distillation_moves_the_policy_to_the_teacher_token_by_token(make_group):
    samples = two_groups(make_group)
    teacher = [torch.where(s.loss_mask, -0.5 - 0.1 * torch.arange(len(s.token_ids)), 0.0) for s in samples]
    scored, metrics = advantages_of(samples, {"advantage": "distill"}, teacher_logprobs=teacher)
    gaps = []
    for sample, found, values in zip(samples, scored, teacher, strict=True):
        for t, trained in enumerate(sample.loss_mask.tolist()):
            gap = float(values[t] - sample.rollout_logprobs[t]) if trained else 0.0
            assert found.advantages[t].item() == pytest.approx(gap, abs=1e-6)
            gaps += [gap] * trained
    assert metrics["policy/teacher_kl"].result() == pytest.approx(-np.mean(gaps), rel=1e-5)


OWN = """
import torch

def by_row(token_rewards, loss_mask, group_ids, scale=1.0):
    return scale * torch.where(loss_mask, group_ids.float()[:, None] + token_rewards.sum(1, keepdim=True), 0.0)

def a_list(token_rewards, loss_mask, group_ids):
    return token_rewards.tolist()

def one_each(token_rewards, loss_mask, group_ids):
    return token_rewards.sum(1)

def nan(token_rewards, loss_mask, group_ids):
    return torch.where(loss_mask, float("nan"), 0.0)

def nan_elsewhere(token_rewards, loss_mask, group_ids):
    return torch.where(loss_mask, 2.0, float("nan"))

def lambda_returns(token_rewards, loss_mask, group_ids, *, values, gamma, lam):
    # GAE, unwhitened, as a loop over each row.
    advantages = torch.zeros_like(values)
    for row in range(len(values)):
        following = carried = 0.0
        for t in reversed(loss_mask[row].nonzero().flatten().tolist()):
            delta = float(token_rewards[row, t]) + gamma * following - float(values[row, t])
            carried = delta + gamma * lam * carried
            following = float(values[row, t])
            advantages[row, t] = carried
    return advantages

def with_returns(token_rewards, loss_mask, group_ids, values):
    return 3 * values, torch.where(loss_mask, 2 * values, float("nan"))

def wrong_returns(token_rewards, loss_mask, group_ids):
    return token_rewards, token_rewards.sum(1)

def nan_returns(token_rewards, loss_mask, group_ids):
    return token_rewards, token_rewards / 0

def of_parts(token_rewards, loss_mask, group_ids, reward_parts, rollout_logprobs, old_logprobs=None, ref_logprobs=None):
    assert old_logprobs is None
    of_sample = reward_parts["big"] - reward_parts["small"]
    return of_sample[:, None] + rollout_logprobs + (0 if ref_logprobs is None else 10 * ref_logprobs)
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "rules.py").write_text(OWN)
    return lambda name: f"{tmp_path / 'rules.py'}:{name}"


def test_an_estimator_of_ones_own_gets_what_the_built_in_ones_get(make_group, own):
    samples = two_groups(make_group)
    chosen = {"name": "custom", "function": own("by_row"), "parameters": {"scale": 2.0}}
    scored, _ = advantages_of(samples, {"advantage": chosen})
    for sample, found in zip(samples, scored, strict=True):
        expected = 2 * (sample.group + sample.reward)
        assert found.advantages.tolist() == pytest.approx([expected * t for t in sample.loss_mask.tolist()])
    scored, _ = advantages_of(samples, {"advantage": own("nan_elsewhere")})
    assert float(scored[0].advantages[-1]) == 2.0


@pytest.mark.parametrize(
    ("name", "returned"),
    [
        ("a_list", "a list"),
        ("one_each", "a tensor of shape [6]"),
    ],
)
def test_what_an_estimator_of_ones_own_returns_is_checked(make_group, own, name, returned):
    with pytest.raises(TrainingError) as error:
        advantages_of(two_groups(make_group), {"advantage": own(name)})
    assert str(error.value) == (
        f"algorithm.advantage={own(name)} returned {returned}, expected a tensor of shape [6, 6], one advantage for "
        "each token"
    )


def test_f37_what_is_not_finite_is_named_before_it_spreads(make_group, own):
    """One infinite logprob of the rollout engine, and KL in the reward: the whole group would be NaN."""
    samples = [replace(s, ref_logprobs=torch.zeros(len(s.token_ids))) for s in two_groups(make_group)]
    broken = samples[1].rollout_logprobs.clone()
    broken[-1] = -torch.inf
    samples[1] = replace(samples[1], rollout_logprobs=broken)
    with pytest.raises(TrainingError, match=r"algorithm\.advantage=grpo gave nan for row r, token [0-9]+ "):
        advantages_of(samples, {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"})


def test_a_number_of_ones_own_estimator_that_is_not_finite_names_it_and_its_causes(make_group, own):
    with pytest.raises(TrainingError) as error:
        advantages_of(two_groups(make_group), {"advantage": own("nan")})
    assert str(error.value).startswith(f"algorithm.advantage={own('nan')} gave nan for row r, token ")
    assert str(error.value).endswith(
        "; the function divides by 0 there, say, or a reward, logprob or value of its group is not finite"
    )


def test_an_estimator_of_the_kl_divergence_of_ones_own_works_in_the_reward(make_group, tmp_path):
    """It gets tokens in one row, [T], in the reward too."""
    (tmp_path / "kl.py").write_text(
        "def k1(logprobs, ref_logprobs):\n    assert logprobs.dim() == 1\n    return logprobs - ref_logprobs\n"
    )
    samples = list(with_noise(two_groups(make_group), "ref_logprobs"))
    found, expected = (
        advantages_of(samples, {"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": estimator})[0]
        for estimator in (f"{tmp_path / 'kl.py'}:k1", "k1")
    )
    assert as_lists(found, "advantages") == as_lists(expected, "advantages")


def test_kl_in_the_reward_takes_the_trainers_logprobs_where_they_are(make_group):
    settings = {"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1"}
    samples = [replace(s, ref_logprobs=torch.zeros(len(s.token_ids))) for s in two_groups(make_group)]
    plain, _ = advantages_of(samples, settings)
    same, _ = advantages_of([replace(s, old_logprobs=s.rollout_logprobs) for s in samples], settings)
    other, _ = advantages_of(
        [replace(s, old_logprobs=s.rollout_logprobs * (n + 1)) for n, s in enumerate(samples)], settings
    )
    assert [s.advantages.tolist() for s in same] == [s.advantages.tolist() for s in plain]
    assert [s.advantages.tolist() for s in other] != [s.advantages.tolist() for s in plain]


def test_an_estimator_of_ones_own_that_is_not_there_is_named(make_group, own):
    with pytest.raises(ConfigError, match=r"algorithm\.advantage=.* has no 'by_rwo'; did you mean by_row\?"):
        advantages_of(two_groups(make_group), {"advantage": own("by_rwo")})


def test_gae_of_ones_own_trains_the_critic_as_the_built_in_one(make_group, own):
    samples = list(with_noise(two_groups(make_group), "values"))
    parameters = {"gamma": 0.9, "lam": 0.75}
    chosen = {"name": "custom", "function": own("lambda_returns"), "parameters": parameters}
    found, metrics = advantages_of(samples, {"advantage": chosen})
    expected, other = advantages_of(samples, {"advantage": {"name": "gae", "whiten": False, **parameters}})
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.advantages, b.advantages)
        torch.testing.assert_close(a.returns, b.returns)
    assert metrics.keys() == other.keys() == {"critic/explained_variance", "advantage/num_samples_without_tokens"}
    name = "critic/explained_variance"
    assert metrics[name].result() == pytest.approx(other[name].result(), rel=1e-5)


def test_an_estimator_of_ones_own_may_give_returns_of_its_own(make_group, own):
    """What it says about untrained tokens is ignored."""
    samples = list(with_noise(two_groups(make_group), "values"))
    for sample, found in zip(samples, advantages_of(samples, {"advantage": own("with_returns")})[0], strict=True):
        torch.testing.assert_close(found.advantages, 3 * sample.values)
        torch.testing.assert_close(found.returns, 2 * sample.values)


def test_without_a_critic_there_are_no_returns(make_group, own):
    samples = two_groups(make_group)
    assert advantages_of(samples, {"advantage": own("by_row")})[0][0].returns is None
    with pytest.raises(TrainingError, match="returned a tuple of Tensor, Tensor, expected a tensor of shape "):
        advantages_of(samples, {"advantage": own("wrong_returns")})
    with pytest.raises(ConfigError) as error:
        advantages_of(samples, {"advantage": own("with_returns")})
    assert str(error.value) == (
        f"algorithm.advantage={own('with_returns')} asks for values, which this run does not have; it has "
        "rollout_logprobs, reward_parts (values need critic, ref_logprobs algorithm.kl_coef, old_logprobs several "
        "optimizer steps for a rollout batch or algorithm.rollout_correction)"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong_returns", "returned a tensor of shape [6], expected a tensor of shape [6, 6], one return for each "
         "token"),
        ("a_list", "returned a list, expected a tensor of shape [6, 6], one advantage for each token, or a pair of "
         "advantages and returns"),
    ],
)  # fmt: skip
def test_what_an_estimator_of_ones_own_returns_beside_a_critic_is_checked(make_group, own, name, message):
    samples = list(with_noise(two_groups(make_group), "values"))
    with pytest.raises(TrainingError) as error:
        advantages_of(samples, {"advantage": own(name)})
    assert str(error.value) == f"algorithm.advantage={own(name)} {message}"
    with pytest.raises(TrainingError, match="gave nan for row r, token "):
        advantages_of(samples, {"advantage": own("nan_returns")})


@pytest.mark.parametrize("has_reference", [False, True])
def test_an_estimator_of_ones_own_gets_what_it_asks_for_by_name(make_group, own, has_reference):
    """A parameter with a default is filled where the run has it."""
    samples = list(with_noise(two_groups(make_group), *(["ref_logprobs"] if has_reference else [])))
    parts = {"big": [3.0, 0, 1, 2, 5, 4], "small": [1.0, 1, 0, 0, 2, 0]}
    scored, _ = advantages_of(samples, {"advantage": own("of_parts")}, reward_parts=parts)
    for n, (sample, found) in enumerate(zip(samples, scored, strict=True)):
        expected = parts["big"][n] - parts["small"][n] + sample.rollout_logprobs
        if has_reference:
            expected = expected + 10 * sample.ref_logprobs
        torch.testing.assert_close(found.advantages, expected)


def test_gdpo_counts_groups_whose_every_part_is_equal_and_samples_without_tokens(make_group):
    """Parts of weight 0 are not compared; those of other weights are, though their sums are equal."""
    rewards = {"big": [1.0, 0.0, 0.5, 2.0, 2.0, 2.0], "small": [0.0, 1.0, 0.5, 1.0, 1.0, 1.0], "off": [*range(6)]}
    samples = two_groups(make_group)
    weights = {"big": 1.0, "small": 1.0, "off": 0.0}
    _, metrics = advantages_of(samples, {"advantage": "gdpo"}, reward_parts=rewards, reward_weights=weights)
    assert metrics["advantage/zero_variance_fraction"].result() == 0.5
    assert metrics["advantage/num_samples_without_tokens"].result() == 0
    empty = rewritten(samples[0], loss_mask=torch.zeros_like(samples[0].loss_mask))
    _, metrics = advantages_of([empty, *samples[1:]], {"advantage": "reinforce_plus_plus"})
    assert metrics["advantage/num_samples_without_tokens"].result() == 1


def test_every_array_is_of_its_own_sample(make_group):
    """Samples of different lengths in any order get the same numbers."""
    samples = list(with_noise(two_groups(make_group), "values"))
    whole, _ = advantages_of(samples, {"advantage": {"name": "gae", "whiten": False}})
    order = [4, 0, 5, 2, 1, 3]
    mixed, _ = advantages_of([samples[n] for n in order], {"advantage": {"name": "gae", "whiten": False}})
    for n, found in zip(order, mixed, strict=True):
        torch.testing.assert_close(found.advantages, whole[n].advantages)
    assert len(set(itertools.chain(*(s.advantages[s.loss_mask].tolist() for s in whole)))) == 12


def test_turns_begin_where_they_did_and_states_are_what_stands_before_them():
    def sample(group, token_ids, trained, turn_starts):
        mask = torch.tensor([character == "x" for character in trained])
        return Sample(uid="a", token_ids=torch.tensor(token_ids), loss_mask=mask, group=group, turn_starts=turn_starts)

    samples = [
        sample(0, [5, 6, 1, 9, 7, 7, 2, 9], "..xx..xx", [2, 6]),
        sample(0, [5, 6, 1, 7, 7, 3, 8, 4], "..x..x.x", [2, 5, 7]),
        sample(1, [5, 2, 7, 7, 2], ".x..x", [1, 4]),
        sample(1, [5, 2, 2], "...", [1]),  # its reward failed
        sample(1, [5, 3], "..", []),  # an agent that failed at once
    ]
    turns, states = turns_and_states(samples)
    assert [turns[row, samples[row].loss_mask.nonzero().flatten()].tolist() for row in range(5)] == [
        [0, 0, 1, 1],
        [0, 1, 2],
        [0, 1],
        [],
        [],
    ]
    prompt, told = states[0, :2].tolist()
    assert states[1, :3].tolist() == [prompt, told, states[1, 2]]
    assert len({prompt, told, int(states[1, 2]), *states[2, :2].tolist()}) == 5  # other groups have other states
    _, states = turns_and_states([samples[0], sample(0, [8, 1, 9, 7, 7, 2, 9], ".xx..xx", [1, 5])])
    assert states[0, 0] != states[1, 0]  # an agent has written a prompt of its own
    assert states[0, 1] == states[1, 1]
    unanswered = sample(0, [5, 6, 1, 9, 2, 9], "..xxxx", [2, 4])
    turns, states = turns_and_states([samples[0], unanswered])
    assert turns[1, 2:6].tolist() == [0, 0, 1, 1]
    assert states[1, 0] == states[0, 0]
    assert len(set(states.flatten().tolist())) == 3  # nothing was said, which is a state too

"""`shardwise rl` with the parts that GRPO does not need: critic, teachers, reward models, other losses, user code."""

import json
import math

import pytest
import torch
from runs import granite_folder
from safetensors.torch import load_file
from tiny_models import tiny_model
from transformers import AutoModelForTokenClassification

from shardwise.rewards import load_function

ADVANTAGE, LOSS = "examples/custom_advantage/median.py:above_median", "examples/custom_loss/asymmetric.py:asymmetric"


def options(assets, output_dir, **extra) -> list[str]:
    return [
        f"model.path={assets.model}",
        f"data.train_files={assets.parquet}",
        "data.max_prompt_tokens=40",
        "engine.max_tokens_per_micro_batch=128",
        "rollout.num_prompts=4",
        "rollout.group_size=4",
        "rollout.max_response_tokens=8",
        f"reward.functions={assets.reward}",
        "trainer.total_steps=2",
        "trainer.learning_rate=1e-2",
        "trainer.tensorboard=false",
        f"trainer.output_dir={output_dir}",
        *(f"{key}={json.dumps(value)}" for key, value in extra.items()),
    ]


@pytest.fixture
def rl(assets, command, metrics_of, tmp_path):
    """Runs a variant on one rank; returns the metrics of its steps."""

    def run(name="run", **extra):
        done = command("rl", *options(assets, tmp_path / name, **extra))
        assert done.code == 0, done.err
        return metrics_of(tmp_path / name)

    return run


@pytest.fixture(scope="module")
def two_ranks(assets, job, tmp_path_factory):
    """A critic in a layout of its own, and everything that may leave the device does."""
    folder = tmp_path_factory.mktemp("ppo") / "run"
    critic = {
        "engine": {"fsdp_size": 1, "param_offload": True, "optimizer_offload": True, "max_tokens_per_micro_batch": 256},
        "optimizer": {"learning_rate": 0.01},
        "critic_warmup_steps": 1,
    }
    extra = {
        "algorithm.advantage": {"name": "gae", "lam": 0.9},
        "critic": critic,
        "engine.param_offload": True,
        "engine.optimizer_offload": True,
        "algorithm.kl_coef": 0.05,
        "trainer.total_steps": 3,
    }
    done = job(2, "rl", *options(assets, folder, **extra), timeout=180)
    assert done.code == 0, done.err
    return folder


def test_ppo_trains_a_critic_beside_the_policy_which_waits_for_it(two_ranks, metrics_of):
    first, second, third = metrics_of(two_ranks)
    assert "train/grad_norm" not in first
    assert first["critic/grad_norm"] > 0
    assert second["train/grad_norm"] > 0
    assert third["critic/loss"] < first["critic/loss"]
    assert third["critic/explained_variance"] <= 1
    assert second["policy/ref_kl"] == pytest.approx(0.0, abs=1e-9)  # the policy has not moved yet
    assert third["policy/ref_kl"] > 0


def test_policy_critic_and_reference_make_the_same_steps_where_two_ranks_share_sequences(
    assets, rl, job, metrics_of, tmp_path
):
    critic = {"optimizer": {"learning_rate": 0.01}}
    extra = {"algorithm.advantage": {"name": "gae", "lam": 0.9}, "algorithm.kl_coef": 0.05}
    one = rl("one", critic=critic, **extra)
    shared = {"ulysses_size": 2}
    extra |= {"critic": {**critic, "engine": shared}, "reference": shared, "engine": shared}
    done = job(2, "rl", *options(assets, tmp_path / "two", **extra))
    assert done.code == 0, done.err
    for left, right in zip(one, metrics_of(tmp_path / "two"), strict=True):
        for name in ("train/loss", "train/grad_norm", "critic/loss", "critic/grad_norm", "policy/ref_kl"):
            assert left[name] == pytest.approx(right[name], abs=1e-4), name


def test_the_critic_of_a_checkpoint_loads_in_transformers(two_ranks):
    folder = two_ranks / "checkpoints" / "step_3"
    critic = AutoModelForTokenClassification.from_pretrained(folder / "critic" / "hf")
    assert critic.score.weight.shape[0] == 1
    assert critic.score.weight.abs().sum() > 0


def test_a_run_may_start_from_a_trained_critic(two_ranks, rl):
    critic = {"model": {"path": str(two_ranks / "checkpoints" / "step_3" / "critic" / "hf")}}
    first, _ = rl(**{"algorithm.advantage": "gae", "critic": critic})
    assert first["critic/grad_norm"] > 0


def test_a_critic_of_a_family_without_such_a_class_trains_and_brings_its_code(assets, rl, tmp_path):
    critic = {"model": {"path": granite_folder(assets, tmp_path / "granite")}, "optimizer": {"learning_rate": 0.01}}
    first, *_, last = rl(**{"algorithm.advantage": "gae", "critic": critic, "trainer.total_steps": 3})
    assert last["critic/loss"] < first["critic/loss"]
    saved = tmp_path / "run" / "checkpoints" / "step_3" / "critic" / "hf"
    found = AutoModelForTokenClassification.from_pretrained(saved, trust_remote_code=True)
    assert type(found).__name__ == "GraniteForTokenClassification"
    assert not torch.equal(found.base_model.norm.weight, tiny_model("granite").base_model.norm.weight)
    (again, _) = rl("again", **{"algorithm.advantage": "gae", "critic": critic | {"model": {"path": str(saved)}}})
    assert again["critic/loss"] < first["critic/loss"]


def cells(in_default: str, others: str) -> list:
    """Names as parameters; the others run only in `make test-full`."""
    return [*in_default.split(), *(pytest.param(name, marks=pytest.mark.full) for name in others.split())]


@pytest.mark.parametrize("advantage", cells("reinforce_plus_plus remax", "grpo_passk gdpo opo gpg maxrl"))
def test_every_other_advantage_moves_the_policy(rl, advantage):
    first, second = rl(**{"algorithm.advantage": advantage})
    assert first["train/grad_norm"] > 1e-4
    assert math.isfinite(second["train/loss"])


@pytest.mark.parametrize("loss", cells("gspo cispo", "kl_cov gmpo sapo reinforce clip_cov dppo_tv dppo_kl topr kimi"))
def test_every_other_policy_loss_moves_the_policy(rl, loss):
    """On the tokens of the current policy each has the gradient of REINFORCE, up to a factor."""
    first, second = rl(**{"algorithm.policy_loss": loss, "algorithm.num_minibatches": 2, "trainer.learning_rate": 1e-3})
    assert first["train/grad_norm"] > 1e-3
    assert math.isfinite(second["train/loss"])


def test_dynamic_sampling_replaces_groups_that_teach_nothing(rl, tmp_path):
    (tmp_path / "often_equal.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(len(solution_str)) if extra_info['index'] % 2 else 1.0\n"
    )
    extra = {
        "reward.functions": f"{tmp_path / 'often_equal.py'}:score",
        "rollout.dynamic_sampling": {"max_rounds": 10},
        "algorithm.overlong_penalty": {"buffer_tokens": 4},
        "algorithm.policy_loss": {"clip_high": 0.28},
        "algorithm.num_minibatches": 2,
    }
    for row in rl(**extra):
        assert row["advantage/num_zero_variance_groups"] == 0
        assert row["rollout/num_dropped_groups"] > 0
        assert row["tokens/dropped"] > 0
        assert row["tokens/sampled"] == row["tokens/trained"] + row["tokens/masked"] + row["tokens/dropped"]
        assert row["rollout/num_missing_groups"] == 0
        assert 1 < row["rollout/num_rounds"] <= 10
        assert row["train/num_sequences"] == 16 / 2


def test_a_mixture_draws_sources_by_their_weights(rl):
    only, mixed = rl(
        **{"data.mixture": [{"weights": {"sums": 1}}, {"from_step": 2, "weights": {"sums": 1, "products": 1}}]}
    )
    assert "reward/mean/sums" not in only  # one source needs no figure of its own
    assert mixed["reward/mean"] == pytest.approx((mixed["reward/mean/sums"] + mixed["reward/mean/products"]) / 2)


def test_rollout_correction_finds_nothing_to_correct_in_the_embedded_engine(rl):
    correction = {"weights": {"level": "sequence"}, "rejection": {"low": 0.5, "high": 2.0}}
    (plain, _), (corrected, _) = rl("plain"), rl("corrected", **{"algorithm.rollout_correction": correction})
    assert corrected["rollout/rejected_fraction"] == 0
    assert corrected["rollout/weight"] == pytest.approx(1.0, abs=1e-4)
    assert corrected["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=1e-4)


def test_steps_of_which_everything_is_rejected_change_no_weight(rl, assets, tmp_path):
    """No ratio lies above 1.5. Weight decay alone would move the weights."""
    nothing = {"algorithm.rollout_correction": {"rejection": {"low": 1.5, "high": 2.0}}, "trainer.weight_decay": 0.5}
    for row in rl(**nothing):
        assert row["rollout/rejected_fraction"] == 1
        assert row["train/num_tokens"] == 0
        assert row["train/empty_steps"] == 1
        assert not row.keys() & {"train/grad_norm", "train/loss", "policy/entropy"}
    saved = load_file(tmp_path / "run/checkpoints/step_2/hf/model.safetensors")
    for name, weight in load_file(assets.model / "model.safetensors").items():
        assert torch.equal(saved[name], weight), name


def test_the_kl_controller_raises_its_coefficient_above_the_target(rl):
    controller = {"name": "adaptive", "target": 1e-6, "horizon": 16}
    rows = rl(**{"algorithm.kl_coef": 0.1, "algorithm.kl_controller": controller, "trainer.total_steps": 3})
    coefs = [row["policy/kl_coef"] for row in rows]
    assert coefs[0] == 0.1
    assert coefs[1] == pytest.approx(0.1 * 0.8)  # no divergence yet: as far below the target as the clip allows
    assert coefs[2] == pytest.approx(coefs[1] * 1.2)


def test_a_teacher_pulls_the_policy_towards_itself(rl, assets, command, tmp_path):
    sft = ["trainer.total_steps=8", "trainer.learning_rate=1e-2", "trainer.tensorboard=false"]
    common = [f"model.path={assets.model}", f"data.train_files={assets.sft}", "data.max_sequence_tokens=64"]
    assert command("sft", *common, *sft, f"trainer.output_dir={tmp_path / 'teacher'}").code == 0
    teachers = [{"model": {"path": str(tmp_path / "teacher")}}]
    rows = rl(
        **{
            "algorithm.advantage": "distill",
            "teachers": teachers,
            "data.train_files": str(assets.rl),
            "reward": None,
            "rollout.num_prompts": 32,
            "trainer.total_steps": 20,
            "trainer.learning_rate": 3e-3,
        }
    )
    assert not [name for name in rows[0] if name.startswith("reward")]
    (first, *_) = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert not [name for name in json.loads(first) if name.startswith("reward")]
    assert rows[-1]["policy/teacher_kl"] < 0.7 * rows[0]["policy/teacher_kl"]


@pytest.mark.parametrize(
    ("key", "function"),
    [("algorithm.advantage", ADVANTAGE), ("algorithm.policy_loss", LOSS)],
    ids=["custom_advantage", "custom_loss"],
)
def test_examples_of_ones_own_functions_run(rl, key, function):
    first, second = rl(**{key: function})
    assert first["train/grad_norm"] > 1e-3
    assert ("policy/bad_tokens" in second) == (key == "algorithm.policy_loss")


def test_the_example_of_ones_own_reward_runs(rl):
    reward = load_function("examples/custom_reward/brevity.py:right_and_brief")
    solution = "4 and 3 is 7\n#### 7"
    for truth in (solution, "7", 7):
        assert reward("gsm8k", solution, truth, {})["score"] > 1
        assert reward("gsm8k", "#### 8", truth, {})["score"] == 0
    first, _ = rl(**{"reward.functions": "examples/custom_reward/brevity.py:right_and_brief"})
    assert 0 <= first["reward_part/brevity"] <= 1
    assert first["reward/mean"] == pytest.approx(first["reward_part/acc"], abs=0.2)


EVERY_PART = """
import torch
from shardwise.algorithms import kl_divergence
from shardwise.types import MetricValue

def advantages(token_rewards, loss_mask, group_ids, *, values, lam):
    total, following, carried = torch.zeros_like(values, dtype=torch.float64), 0, 0
    for t in reversed(range(values.shape[1])):
        value, trained = values[:, t].double(), loss_mask[:, t]
        delta = token_rewards[:, t].double() + following - value
        carried = torch.where(trained, delta + lam * carried, carried)
        following = torch.where(trained, value, following)
        total[:, t] = carried
    return torch.where(loss_mask, total, 0.0), total + values.double()

def aggregation(losses, loss_mask, cu_seqlens, denominators):
    return losses.sum() / denominators.num_tokens

def estimate(logprobs, ref_logprobs):
    return kl_divergence(logprobs, ref_logprobs, estimator="k3")

def controller(kl_coef, kl, num_samples, target, horizon):
    return kl_coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * num_samples / horizon)

def value_loss(values, old_values, returns, loss_mask, clip):
    values, old_values, returns = (torch.where(loss_mask, array, 0.0) for array in (values, old_values, returns))
    near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    losses, held = (values - returns) ** 2, (near - returns) ** 2
    def mean(of):
        return MetricValue.mean(torch.where(loss_mask, of.detach(), 0).sum(), loss_mask.sum())
    names = {"critic/value": values, "critic/return": returns, "critic/clip_fraction": held > losses}
    return torch.maximum(losses, held) / 2, {name: mean(of) for name, of in names.items()}

def ratios(old_logprobs, rollout_logprobs, loss_mask):
    return (old_logprobs.double() - rollout_logprobs.double()).exp().clamp(max=2.0)

def kept(old_logprobs, rollout_logprobs, loss_mask):
    ratios = (old_logprobs.double() - rollout_logprobs.double()).exp()
    return (0.5 <= ratios) & (ratios <= 2.0)
"""


def test_every_part_replaced_by_ones_own_that_equals_it_gives_the_same_bytes(assets, command, tmp_path):
    (tmp_path / "parts.py").write_text(EVERY_PART)

    def own(name, **parameters):
        return {"name": "custom", "function": f"{tmp_path / 'parts.py'}:{name}", "parameters": parameters}

    adaptive = {"target": 0.001, "horizon": 64}
    parts = {
        "algorithm.advantage": (own("advantages", lam=0.9), {"name": "gae", "lam": 0.9, "whiten": False}),
        "algorithm.aggregation": (own("aggregation"), "token-mean"),
        "algorithm.kl_estimator": (own("estimate"), "k3"),
        "algorithm.kl_controller": (own("controller", **adaptive), {"name": "adaptive", **adaptive}),
        "algorithm.rollout_correction.weights": (own("ratios"), "ratio"),
        "algorithm.rollout_correction.rejection": (own("kept"), {"low": 0.5, "high": 2.0}),
        "critic.value_loss": (own("value_loss", clip=0.1), {"name": "clipped", "clip": 0.1}),
    }
    beside = {"algorithm.kl_coef": 0.1, "algorithm.num_minibatches": 2, "trainer.total_steps": 3}
    beside["critic.optimizer.learning_rate"] = 0.05
    written = []
    for place in range(2):
        chosen = {key: alternatives[place] for key, alternatives in parts.items()}
        done = command("rl", *options(assets, tmp_path / f"run {place}", **beside, **chosen))
        assert done.code == 0, done.err
        written.append((tmp_path / f"run {place}" / "metrics.jsonl").read_bytes())
    assert written[0] == written[1]
    last = json.loads(written[0].splitlines()[-1])
    assert last["policy/ref_kl"] > 0
    assert last["policy/kl_coef"] != 0.1
    assert last["critic/clip_fraction"] > 0


def test_a_function_of_ones_own_that_returns_the_wrong_shape_is_named(assets, command, tmp_path):
    (tmp_path / "wrong.py").write_text(
        "def per_sample(token_rewards, loss_mask, group_ids):\n    return token_rewards.sum(1)\n"
        "def mean(logprobs, old_logprobs, advantages, loss_mask, cu_seqlens):\n    return logprobs.mean(), {}\n"
    )
    for key, name, message in (
        ("algorithm.advantage", "per_sample", "a tensor of shape [16], expected a tensor of shape [16, "),
        ("algorithm.policy_loss", "mean", "losses of shape [], expected (losses of shape ["),
    ):
        given = f"{tmp_path / 'wrong.py'}:{name}"
        done = command("rl", *options(assets, tmp_path / name, **{key: given}))
        assert done.code == 2
        assert f"{key}={given} returned {message}" in done.err


def test_a_function_of_ones_own_that_is_not_there_is_found_before_a_model_is_loaded(assets, command, tmp_path):
    done = command(
        "rl", *options(assets, tmp_path / "run", **{"algorithm.advantage": "nowhere.py:f", "model.path": "x"})
    )
    assert done.code == 2
    assert "algorithm.advantage=nowhere.py:f: there is no file nowhere.py" in done.err

"""`shardwise rl` as a user runs it, with a reward file and data made for verl."""

import importlib.util
import json
import statistics

import pytest
import torch
from family_table import COMMON, FAMILIES
from forgetful_engine import ForgetfulEngine
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from shardwise.recipes.rank.rollout_engines import build_rollout

STEPS, TEMPERATURE = 3, 0.8


def options(assets, output_dir) -> list[str]:
    return [
        f"model.path={assets.model}",
        f"data.train_files={assets.parquet}",
        "data.max_prompt_tokens=40",
        "engine.max_tokens_per_micro_batch=128",
        "rollout.num_prompts=4",
        "rollout.group_size=4",
        "rollout.max_response_tokens=8",
        "rollout.max_concurrent_sequences=3",
        f"rollout.temperature={TEMPERATURE}",
        f"reward.functions={assets.reward}",
        f"trainer.total_steps={STEPS}",
        "trainer.learning_rate=1e-2",
        "trainer.save_every_steps=1",
        "trainer.tensorboard=false",
        f"trainer.output_dir={output_dir}",
    ]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def two_ranks(assets, job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl") / "run"
    done = job(2, "rl", *options(assets, folder))
    assert done.code == 0, done.err
    return folder


def test_rollout_and_trainer_agree_on_every_step_of_two_ranks(two_ranks, metrics_of):
    metrics = metrics_of(two_ranks)
    assert [row["step"] for row in metrics] == [1, 2, 3]
    for row in metrics:
        assert row["rollout/logprob_abs_diff_max"] < 1e-4
        assert row["train/grad_norm"] > 1e-3
        assert row["reward/failed"] == 0.0
        assert row["train/num_sequences"] == 16.0


def test_rewards_in_the_metrics_are_those_of_the_users_function(two_ranks, assets, metrics_of):
    spec = importlib.util.spec_from_file_location("rules", assets.reward.partition(":")[0])
    rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    samples = lines(two_ranks / "samples.jsonl")
    assert len(samples) == STEPS * 16
    for sample in samples:
        number = int(sample["uid"].rsplit(" ", 1)[1])
        assert sample["ground_truth"] == str(2 * number)
        assert f"<|system|>Add.<|end|><|user|>{number}+{number}=" in sample["prompt"]
        expected = rules.compute_score("", sample["completion"], sample["ground_truth"], {"index": number})
        own_score = expected.pop("score")
        assert sample["reward"] == own_score
        assert sample["reward_parts"] == expected | {"compute_score": own_score}
    for row in metrics_of(two_ranks):
        rewards = [sample["reward"] for sample in samples if sample["step"] == row["step"]]
        assert row["reward/mean"] == pytest.approx(statistics.mean(rewards))
        assert row["reward/max"] == max(rewards)


def test_completions_carry_the_version_and_the_logprobs_of_the_weights_that_sampled_them(two_ranks, assets):
    """The samples of step n against transformers on the checkpoint of step n - 1, at the rollout's temperature."""
    for step in range(1, STEPS + 1):
        folder = assets.model if step == 1 else two_ranks / "checkpoints" / f"step_{step - 1}" / "hf"
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        tokenizer_ids = {}
        for sample in (row for row in lines(two_ranks / "samples.jsonl") if row["step"] == step):
            assert sample["policy_version"] == step - 1
            prompt = tokenizer_ids.setdefault(sample["prompt"], _encode(folder, sample["prompt"]))
            ids = torch.tensor([prompt + sample["token_ids"]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt) - 1 : -1].double() / TEMPERATURE
            found = torch.log_softmax(logits, dim=-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            torch.testing.assert_close(
                torch.tensor(sample["logprobs"], dtype=torch.float64), found, atol=1e-4, rtol=0, msg=f"step {step}"
            )


def _encode(folder, text):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder).encode(text)


def test_the_same_seed_gives_the_same_bytes(two_ranks, assets, job, tmp_path):
    done = job(2, "rl", *options(assets, tmp_path / "run"))
    assert done.code == 0, done.err
    for name in ("metrics.jsonl", "samples.jsonl", f"checkpoints/step_{STEPS}/hf/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (two_ranks / name).read_bytes()


def test_one_rank_samples_the_same_completions_and_makes_the_same_steps(
    two_ranks, assets, command, metrics_of, tmp_path
):
    done = command("rl", *options(assets, tmp_path / "run"))
    assert done.code == 0, done.err
    found, expected = lines(tmp_path / "run" / "samples.jsonl"), lines(two_ranks / "samples.jsonl")
    assert [row["token_ids"] for row in found] == [row["token_ids"] for row in expected]
    for one, two in zip(metrics_of(tmp_path / "run"), metrics_of(two_ranks), strict=True):
        for name in ("train/loss", "train/grad_norm", "policy/entropy", "reward/mean"):
            assert one[name] == pytest.approx(two[name], abs=1e-4), name


VARIANTS = {
    "kl in the loss": ["algorithm.kl_coef=0.1"],
    "kl in the reward": ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.kl_estimator=k1"],
    "rloo": ["algorithm.advantage=rloo"],
    "dr grpo": [
        "algorithm.advantage={name: grpo, scale: none}",
        "algorithm.aggregation={name: seq-mean-token-sum-norm, divisor: 8}",
    ],
    "minibatches": ["algorithm.num_minibatches=2", "algorithm.num_epochs=2"],
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in ("kl in the loss", "rloo") else ()) for name in VARIANTS],
)
def test_settings_of_the_algorithm_change_what_they_should(two_ranks, assets, command, metrics_of, tmp_path, name):
    """The first rollout is the same in all of them; what is made of it is not."""
    done = command("rl", *options(assets, tmp_path / "run"), *VARIANTS[name], "trainer.total_steps=2")
    assert done.code == 0, done.err
    base, (first, second) = metrics_of(two_ranks)[0], metrics_of(tmp_path / "run")
    assert first["reward/mean"] == base["reward/mean"]
    assert first["rollout/logprob_abs_diff_max"] < 1e-4
    match name:
        case "kl in the loss":
            # The policy still is the reference: the KL term is 0, and with it the change of the first step.
            assert first["policy/ref_kl"] == pytest.approx(0.0, abs=1e-9)
            assert first["train/grad_norm"] == pytest.approx(base["train/grad_norm"], abs=1e-4)
            assert second["policy/ref_kl"] > 1e-3
        case "kl in the reward":
            assert first["train/loss"] == pytest.approx(base["train/loss"], abs=1e-3)
            assert second["policy/ref_kl"] != 0.0
        case "rloo":
            # n / (n - 1) times the centred rewards, without the division by the standard deviation.
            dr = [*VARIANTS["dr grpo"][:1], "trainer.total_steps=1"]
            assert command("rl", *options(assets, tmp_path / "centred"), *dr).code == 0
            (centred,) = metrics_of(tmp_path / "centred")
            assert first["train/grad_norm"] == pytest.approx(centred["train/grad_norm"] * 4 / 3, rel=1e-4)
            assert first["train/grad_norm"] != pytest.approx(base["train/grad_norm"], rel=1e-2)
        case "dr grpo":
            # The same sums over 16 * 8 tokens instead of the trained ones, advantages not scaled.
            centred_options = [*VARIANTS["dr grpo"][:1], "trainer.total_steps=1"]
            assert command("rl", *options(assets, tmp_path / "centred"), *centred_options).code == 0
            (centred,) = metrics_of(tmp_path / "centred")
            ratio = centred["train/num_tokens"] / (16 * 8)
            assert first["train/grad_norm"] == pytest.approx(centred["train/grad_norm"] * ratio, rel=1e-4)
        case "minibatches":
            # Four optimizer steps, each over 8 of the 16 samples; the later ones are off-policy.
            assert first["train/num_sequences"] == 8.0
            assert first["policy/approx_kl"] > 1e-6
            assert base["policy/approx_kl"] == 0.0
            assert first["rollout/logprob_abs_diff"] < 1e-5


@pytest.mark.full
def test_a_run_whose_rollout_weights_are_dropped_by_sleeping_is_that_of_one_that_keeps_them(
    assets, command, monkeypatch, tmp_path
):
    """The trainer works between a sync and the next sampling: it saves at every step, and is probed and validated."""
    keys = ["rollout.probe_every_syncs=2", f"data.validation_files={assets.parquet}", "trainer.validate_every_steps=1"]
    done = command("rl", *options(assets, tmp_path / "kept"), *keys)
    assert done.code == 0, done.err
    engines = []

    def build(*arguments, **named):
        engines.append(ForgetfulEngine(build_rollout(*arguments, **named)))
        return engines[0]

    monkeypatch.setattr("shardwise.recipes.rank.rollout_host.build_rollout", build)
    done = command("rl", *options(assets, tmp_path / "dropped"), *keys)
    assert done.code == 0, done.err
    assert engines[0].num_dropped > STEPS
    assert engines[0].num_syncs > STEPS + 1
    for name in ("metrics.jsonl", "samples.jsonl", f"checkpoints/step_{STEPS}/hf/model.safetensors"):
        assert (tmp_path / "dropped" / name).read_bytes() == (tmp_path / "kept" / name).read_bytes(), name


def test_accuracy_of_the_held_out_rows_is_measured_during_the_run(assets, command, metrics_of, tmp_path):
    """`acc` of the reward function says that every second row is correct, whatever the policy wrote."""
    held_out = [f"data.validation_files={assets.parquet}", "data.max_validation_rows=7", "trainer.total_steps=1"]
    done = command("rl", *options(assets, tmp_path / "run"), *held_out)
    assert done.code == 0, done.err
    (row,) = metrics_of(tmp_path / "run")
    assert row["val/accuracy"] == pytest.approx(3 / 7)
    assert row["val/accuracy/sums"] == 1.0
    assert row["val/accuracy/products"] == 0.0


@pytest.mark.full
@pytest.mark.parametrize(
    "lora", [[], ["engine.lora.rank=4", "rollout.sync_adapter_only=true"]], ids=["whole", "adapter"]
)
def test_a_model_with_linear_attention_is_sampled_and_trained_alike(assets, job, tmp_path, metrics_of, lora):
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_text", **COMMON | FAMILIES["qwen3_5_text"] | sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    asked = [*options(assets, tmp_path / "run"), f"model.path={tmp_path / 'model'}", *lora]
    done = job(2, "rl", *asked)
    assert done.code == 0, done.err
    metrics = metrics_of(tmp_path / "run")
    assert len(metrics) == STEPS
    for row in metrics:
        assert row["rollout/logprob_abs_diff_max"] < 1e-4
        assert row["train/grad_norm"] > 0

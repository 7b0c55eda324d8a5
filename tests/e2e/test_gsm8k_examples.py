"""The GSM8K examples as they are, on the real data set, with a small model in place of the one they name."""

import os
from pathlib import Path

import pytest

from shardwise.data import build_model_folder, train_tokenizer

ROOT = Path(__file__).parents[2]
GSM8K = Path(os.environ.get("SHARDWISE_GSM8K", ROOT.parent / "shared" / "data" / "gsm8k"))
COMMON = ["data.on_overlong=drop", "data.max_train_rows=96", "data.max_validation_rows=8", "engine.param_dtype=float32"]

pytestmark = pytest.mark.skipif(
    not (GSM8K / "train.jsonl").is_file(), reason=f"no GSM8K in {GSM8K}; set SHARDWISE_GSM8K to its folder"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gsm8k") / "model"
    lines = (GSM8K / "train.jsonl").read_text(encoding="utf-8").splitlines()[:500]
    tokenizer = train_tokenizer(lines, vocab_size=1024)
    build_model_folder(folder, tokenizer=tokenizer, hidden_size=64, num_layers=2, intermediate_size=128)
    return folder


def files() -> list[str]:
    return [f"data.train_files={GSM8K / 'train.jsonl'}", f"data.validation_files={GSM8K / 'test.jsonl'}"]


def test_sft_then_grpo_then_eval_run_on_the_real_rows(model, command, job, metrics_of, tmp_path):
    sft, rl = tmp_path / "sft", tmp_path / "rl"
    steps = ["trainer.total_steps=8", "trainer.batch_size=12", "trainer.learning_rate=1e-2", "trainer.warmup_steps=0"]
    run = job(
        *[2, "sft", "-c", "examples/gsm8k_sft.yaml", f"model.path={model}"],
        *[f"trainer.output_dir={sft}", "trainer.validate_every_steps=8", *files(), *steps, *COMMON],
    )
    assert run.code == 0, run.err
    losses = [row["train/loss"] for row in metrics_of(sft)]
    assert losses[-1] < losses[0] - 1, losses
    assert metrics_of(sft)[-1]["val/loss"] < losses[0] - 1

    small = ["rollout.num_prompts=4", "rollout.group_size=2", "rollout.max_response_tokens=16", "trainer.total_steps=2"]
    trained = sft / "checkpoints" / "step_8" / "hf"
    run = command(
        *["rl", "-c", "examples/gsm8k_grpo.yaml", f"model.path={trained}", f"trainer.output_dir={rl}"],
        *[*files(), *small, "trainer.warmup_steps=0", *COMMON],
    )
    assert run.code == 0, run.err
    rows = metrics_of(rl)
    assert len(rows) == 2
    assert all(0 <= row["reward/mean"] <= 1 for row in rows)
    assert all(row["rollout/logprob_abs_diff_max"] < 1e-4 for row in rows)
    assert rows[0]["policy/ref_kl"] < 1e-6  # the reference is the policy that the run starts from

    run = command(
        *["eval", "-c", "examples/gsm8k_eval.yaml", f"model.path={rl / 'checkpoints' / 'step_2' / 'hf'}"],
        *[f"eval.output_dir={tmp_path / 'eval'}", "eval.num_samples=2", "rollout.max_response_tokens=8"],
        *[files()[1], "data.on_overlong=drop", "data.max_validation_rows=4", "engine.param_dtype=float32"],
    )
    assert run.code == 0, run.err
    assert "pass@2" in run.out

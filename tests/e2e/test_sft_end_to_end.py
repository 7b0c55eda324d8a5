"""`shardwise sft` as a user runs it: on two ranks, under torchrun, on one."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS, ROWS = 6, 48


def options(assets, output_dir) -> list[str]:
    return [
        f"model.path={assets.model}",
        f"data.train_files={assets.sft}",
        f"data.validation_files={assets.sft.with_name('sft_validation.jsonl')}",
        f"data.max_train_rows={ROWS}",
        "data.max_sequence_tokens=64",
        "engine.max_tokens_per_micro_batch=96",
        f"trainer.total_steps={STEPS}",
        "trainer.batch_size=16",
        "trainer.learning_rate=5e-3",
        "trainer.tensorboard=false",
        f"trainer.output_dir={output_dir}",
    ]


@pytest.fixture(scope="module")
def two_ranks(assets, shell, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft") / "run"
    done = shell("shardwise", "sft", "--nproc", "2", *options(assets, folder))
    assert done.code == 0, done.err
    return folder


def test_loss_falls_and_every_file_of_the_run_is_there(two_ranks, metrics_of):
    metrics = metrics_of(two_ranks)
    losses = [row["train/loss"] for row in metrics]
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    # A random model knows nothing: ln 261 = 5.56.
    assert losses[0] == pytest.approx(5.56, abs=0.1)
    assert losses[-1] < losses[0] - 1.0
    assert all(row["train/num_sequences"] == 16 for row in metrics)
    assert {path.name for path in two_ranks.iterdir()} == {
        "config.yaml", "metrics.jsonl", "performance.jsonl", "checkpoints",
    }  # fmt: skip
    assert {path.name for path in (two_ranks / "checkpoints").iterdir()} == {f"step_{STEPS}", "latest"}


def test_exported_folder_loads_in_transformers_and_scores_the_validation_rows_as_the_run_did(
    two_ranks, assets, metrics_of
):
    """val/loss of the last step, recomputed with transformers from the exported folder, row by row."""
    folder = two_ranks / "checkpoints" / f"step_{STEPS}" / "hf"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = map(json.loads, assets.sft.with_name("sft_validation.jsonl").read_text().splitlines())
    total, count = 0.0, 0
    for row in rows:
        prompt = tokenizer.encode(f"<|user|>{row['prompt']}<|end|><|assistant|>")
        answer = tokenizer.encode(f"{row['response']}<|end|>")
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0].double()
        logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        total -= float(logprobs.gather(1, torch.tensor(answer)[:, None]).sum())
        count += len(answer)
    assert metrics_of(two_ranks)[-1]["val/loss"] == pytest.approx(total / count, abs=1e-5)


@pytest.mark.full
def test_the_same_seed_under_torchrun_gives_the_same_bytes(two_ranks, assets, shell, tmp_path):
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shardwise")
    done = shell(*torchrun, "sft", *options(assets, tmp_path / "run"))
    assert done.code == 0, done.err
    for name in ("metrics.jsonl", f"checkpoints/step_{STEPS}/hf/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (two_ranks / name).read_bytes()


def test_one_rank_gives_the_losses_of_two(two_ranks, assets, command, metrics_of, tmp_path):
    done = command("sft", *options(assets, tmp_path / "run"))
    assert done.code == 0, done.err
    for one, two in zip(metrics_of(tmp_path / "run"), metrics_of(two_ranks), strict=True):
        assert one.keys() == two.keys()
        for name in ("train/loss", "train/grad_norm", "val/loss"):
            if name in one:
                assert one[name] == pytest.approx(two[name], abs=1e-5), name
        assert one["train/num_tokens"] == two["train/num_tokens"]


def test_another_seed_gives_other_losses(two_ranks, assets, command, metrics_of, tmp_path):
    done = command("sft", *options(assets, tmp_path / "run"), "trainer.seed=1", "trainer.total_steps=1")
    assert done.code == 0, done.err
    assert metrics_of(tmp_path / "run")[0]["train/loss"] != metrics_of(two_ranks)[0]["train/loss"]

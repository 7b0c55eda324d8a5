"""Training of reward models."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from shardwise.config import RewardModelConfig
from shardwise.recipes.reward_model import train, validate
from shardwise.types import Sample

ROWS = [{"prompt": f"{n}+3=", "chosen": str(n + 3), "rejected": "9" * (1 + n % 3), "margin": 0.25 * n} for n in
        range(4)]  # fmt: skip


def config(**tree) -> RewardModelConfig:
    return RewardModelConfig.parse({"model": {"path": "m"}, "data": {"train_files": "t"}} | tree, origin="test")


OWN = """
from shardwise.algorithms import bradley_terry

def mine(scores, margins, center_coef):
    return bradley_terry(scores, margins, center_coef=center_coef)
"""


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("center_coef", [0.0, 0.5])
@pytest.mark.parametrize("is_own", [False, True])
def test_validation_is_the_mean_loss_of_the_pairs(fake_group, remote, tmp_path, size, center_coef, is_own):
    """The score stands at the last token, and is the only output that is not 0."""
    lengths, scores, margins = [5, 3, 4, 6, 2, 7], [0.5, 1.5, -1.0, -2.0, 3.0, 0.0], [0.7, 0.0, 1.2]
    samples = [
        Sample(
            uid=str(n),
            token_ids=torch.full((length,), n),
            loss_mask=torch.arange(length) >= 1,
            reward=margins[n // 2] * (n % 2 == 0),
        )
        for n, length in enumerate(lengths)
    ]

    def score(rank, batches, role, with_adapters):
        assert role == "reward model"
        found = []
        for batch in batches:
            values = torch.zeros(len(batch.input_ids))
            for n, end in zip(batch.sample_index, batch.cu_seqlens[1:].tolist(), strict=True):
                values[end - 1] = scores[n]
            found.append(values)
        return found

    engine = remote(fake_group(size, score=score), "reward model", max_tokens_per_micro_batch=11)
    (tmp_path / "rules.py").write_text(OWN)
    loss = {"center_coef": center_coef}
    if is_own:
        loss = {"name": "custom", "function": f"{tmp_path / 'rules.py'}:mine", "parameters": loss}
    found = validate(engine, samples, config(loss=loss))
    expected = [
        math.log1p(math.exp(-(scores[n] - scores[n + 1] - margins[n // 2])))
        + center_coef * (scores[n] + scores[n + 1]) ** 2
        for n in (0, 2, 4)
    ]
    assert found["val/loss"].result() == pytest.approx(np.mean(expected), rel=1e-5)
    assert found["val/accuracy"].result() == pytest.approx(2 / 3)
    assert found["val/margin"].result() == pytest.approx(np.mean([-1.0, 1.0, 3.0]))


def test_a_run_learns_to_tell_answers_apart_and_its_checkpoint_scores_in_transformers(
    group_of_one, model_folder, write_jsonl, tmp_path
):
    file = write_jsonl("rows.jsonl", ROWS)
    settings = config(
        model={"path": str(model_folder)},
        data={"train_files": file, "validation_files": file, "apply_chat_template": False, "margin_column": "margin",
              "max_sequence_tokens": 12},
        engine={"max_tokens_per_micro_batch": 24},
        loss={"center_coef": 0.01},
        trainer={"output_dir": str(tmp_path), "total_steps": 6, "batch_size": 4, "tensorboard": False,
                 "learning_rate": 0.01, "validate_every_steps": 1},
    )  # fmt: skip
    train(settings, group_of_one)
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert metrics[5]["train/loss"] < 0.5 * metrics[0]["train/loss"]
    assert metrics[5]["val/accuracy"] == 1.0
    for before, after in itertools.pairwise(metrics):
        assert before["val/loss"] == pytest.approx(after["train/loss"], rel=1e-3)
        assert before["val/accuracy"] == after["preference/accuracy"]

    folder = tmp_path / "checkpoints" / "step_6" / "hf"
    scorer, tokenizer = (cls.from_pretrained(folder) for cls in (AutoModelForSequenceClassification, AutoTokenizer))
    losses = []
    for row in ROWS:
        with torch.no_grad():
            chosen, rejected = (
                float(scorer(torch.tensor([[*tokenizer.encode(row["prompt"] + row[side]), tokenizer.eos_token_id]]))
                      .logits[0, 0])
                for side in ("chosen", "rejected")
            )  # fmt: skip
        losses.append(math.log1p(math.exp(-(chosen - rejected - row["margin"]))) + 0.01 * (chosen + rejected) ** 2)
    assert np.mean(losses) == pytest.approx(metrics[5]["val/loss"], rel=1e-3)

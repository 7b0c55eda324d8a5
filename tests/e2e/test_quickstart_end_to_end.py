"""The quickstart as a newcomer runs it, whole."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

FILES = ("config.yaml", "metrics.jsonl", "performance.jsonl", "samples.jsonl", "tensorboard", "sft/metrics.jsonl")


@pytest.mark.full
def test_reinforcement_learning_adds_15_points_on_two_ranks_in_six_minutes(shell, tmp_path):
    folder = tmp_path / "quickstart"
    run = shell("shardwise", "quickstart", "--output-dir", str(folder), timeout=540)
    assert run.code == 0, run.err
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) == {"accuracy", "seconds"}
    accuracy = summary["accuracy"]
    assert accuracy["untrained"] < 0.05 < accuracy["sft"]
    assert accuracy["rl"] >= accuracy["sft"] + 0.15, accuracy
    assert all((folder / name).exists() for name in FILES)
    assert list((folder / "tensorboard").glob("events.*"))
    for value in accuracy.values():
        assert f"{value:.1%}" in run.out

    (checkpoint,) = (folder / "checkpoints").glob("step_*/hf")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "47+85="}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    expected = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    talk = shell("shardwise", "generate", str(folder), "--prompt", "47+85=", "--max-tokens", "16")
    assert talk.out.strip() == expected.strip()

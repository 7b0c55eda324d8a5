"""`shardwise eval` and `shardwise generate` as a user runs them."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture
def evaluated(assets, command, tmp_path):
    done = command(
        "eval",
        f"model.path={assets.model}",
        f"data.validation_files={assets.parquet}",
        "data.max_prompt_tokens=40",
        "rollout.max_response_tokens=6",
        f"reward.functions={assets.reward}",
        "eval.num_samples=4",
        f"eval.output_dir={tmp_path / 'eval'}",
    )
    assert done.code == 0, done.err
    samples = [json.loads(line) for line in (tmp_path / "eval" / "samples.jsonl").read_text().splitlines()]
    return done, json.loads((tmp_path / "eval" / "results.json").read_text()), samples


def test_eval_writes_what_its_samples_say(evaluated, assets):
    done, results, samples = evaluated
    kinds = {kind: [s for s in samples if s["kind"] == kind] for kind in ("greedy", "sampled")}
    assert (len(kinds["greedy"]), len(kinds["sampled"])) == (20, 80)
    assert list(results) == ["measured", "products", "sums", "all"]
    for source in ("products", "sums"):
        sampled = [s for s in kinds["sampled"] if s["data_source"] == source]
        assert results[source]["num_prompts"] == 10
        assert results[source]["mean@4"] == pytest.approx(sum(s["correct"] for s in sampled) / len(sampled))
    # The reward's acc is 1 on the rows of "sums" alone, which makes every number known.
    for name, value in results["sums"].items():
        assert value == (10 if name == "num_prompts" else 1.0), name
    assert results["all"]["pass@4"] == results["all"]["maj@4"] == results["all"]["greedy_accuracy"] == 0.5
    table = [line.strip("│ ").replace(" ", "").split("│") for line in done.out.splitlines() if "│" in line]
    assert [row[:3] for row in table] == [["products", "10", "0.0%"], ["sums", "10", "100.0%"], ["all", "20", "50.0%"]]
    assert {"greedy_accuracy", "maj@4"} <= set(done.out.replace("┃", " ").split())
    assert {sample["reward_failure"] for sample in samples} == {None}


def test_greedy_completions_of_eval_are_those_of_transformers(evaluated, assets):
    _, _, samples = evaluated
    model = AutoModelForCausalLM.from_pretrained(assets.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    for sample in [s for s in samples if s["kind"] == "greedy"][:5]:
        ids = tokenizer.encode(sample["prompt"])
        output = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)
        assert tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True) == sample["completion"]


def test_generate_prints_the_completion_on_standard_output_alone(assets, shell):
    done = shell("shardwise", "generate", str(assets.model), "-p", "47+85=", "--max-tokens", "5", "--raw")
    assert done.code == 0, done.err
    model = AutoModelForCausalLM.from_pretrained(assets.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    ids = tokenizer.encode("47+85=")
    output = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False)
    assert done.out == tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True) + "\n"
    assert "Traceback" not in done.err

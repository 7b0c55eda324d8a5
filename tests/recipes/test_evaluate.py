import json
import os
from dataclasses import replace
from itertools import combinations
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from tiny_models import tiny_vision_model

from shardwise.config import ConfigError, EvalConfig, ModelError, RewardConfig
from shardwise.data import train_tokenizer
from shardwise.recipes import evaluate as evaluate_module
from shardwise.recipes.checkpointing.writer_lock import writer_lock
from shardwise.recipes.evaluate import by_source, evaluate, greedy_accuracy, majority_is_correct, pass_at_k, summarize

REWARD = RewardConfig(functions="a:b")


@pytest.mark.parametrize("num_samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(num_samples):
    for num_correct in range(num_samples + 1):
        correct = [True] * num_correct + [False] * (num_samples - num_correct)
        for k in range(1, num_samples + 1):
            subsets = list(combinations(correct, k))
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(
    ("texts", "correct", "expected"),
    [
        (["5", "6", "5"], [True, False, True], True),
        (["5", "6", "6"], [True, False, False], False),
        # Different words, one answer.
        (["it is 5", "= 5.0", "6", "6", "so 5"], [True, True, False, False, True], True),
        # A tie goes to the answer that was given first.
        (["6", "5", "6", "5"], [False, True, False, True], False),
        (["5", "6", "6", "5"], [True, False, False, True], True),
    ],
)
def test_majority_vote_by_hand(texts, correct, expected):
    assert majority_is_correct(texts, correct) is expected


def test_summary_by_hand(make_group):
    """Source a: greedy 1 of 2 right; of four samples 3 and 1 are right. Source b: greedy right, 0 of 4."""
    greedy = [make_group([1.0], source="a"), make_group([0.0], source="b"), make_group([0.0], source="a")]
    sampled = [
        make_group([1.0, 1.0, 0.0, 1.0], source="a", texts=["5", "5", "6", "5"]),
        make_group([0.0] * 4, source="b", texts=["1", "2", "3", "4"]),
        make_group([0.0, 0.0, 1.0, 0.0], source="a", texts=["7", "7", "5", "8"]),
    ]
    found = summarize(greedy, sampled, REWARD)
    assert list(found) == ["a", "b", "all"]
    assert found["a"] == pytest.approx(
        {
            "num_prompts": 2,
            "greedy_accuracy": 0.5,
            "mean@4": 0.5,
            "pass@1": 0.5,
            # 3 of 4: no pair without a correct one; 1 of 4: 3 of 6 pairs have it.
            "pass@2": (1 + 0.5) / 2,
            "pass@4": 1.0,
            "maj@4": 0.5,
        }
    )
    assert found["b"].keys() == found["a"].keys()
    assert {name: value for name, value in found["b"].items() if value} == {"num_prompts": 1}
    assert found["all"]["greedy_accuracy"] == pytest.approx(1 / 3)
    assert found["all"]["mean@4"] == pytest.approx(4 / 12)
    assert found["all"]["pass@2"] == pytest.approx(1.5 / 3)
    assert found["all"]["pass@4"] == pytest.approx(2 / 3)
    assert found["all"]["maj@4"] == pytest.approx(1 / 3)


def test_summary_without_samples_is_the_greedy_accuracy_alone(make_group):
    assert summarize([make_group([1.0])], None, REWARD) == {
        "sums": {"num_prompts": 1, "greedy_accuracy": 1.0},
        "all": {"num_prompts": 1, "greedy_accuracy": 1.0},
    }


def test_the_vote_is_on_the_last_turns_which_are_judged(make_group):
    """What an environment said, or the policy in turns before, is no answer."""
    sampled = make_group([0.0, 1.0, 1.0], texts=["1 no: 7", "2 no: 8", "3 no: 8"])
    sampled = replace(sampled, texts=[f"{text} so north" for text in sampled.texts], answers=["south", *2 * ["north"]])
    assert summarize([make_group([0.0])], [sampled], REWARD)["all"]["maj@3"] == 1.0


def test_three_samples_give_pass_at_1_and_2(make_group):
    found = summarize([make_group([0.0])], [make_group([1.0, 0.0, 0.0], texts=["5", "6", "6"])], REWARD)["all"]
    assert found["pass@1"] == pytest.approx(1 / 3)
    assert found["pass@2"] == pytest.approx(2 / 3)
    assert found["maj@3"] == 0.0
    assert "pass@4" not in found


def test_correctness_is_acc_where_there_is_one_and_the_score_elsewhere(make_group):
    groups = [
        make_group([0.2], parts=[{"b": 0.2, "acc": 1.0}]),
        make_group([1.0], parts=[{"b": 1.0, "acc": 0.0}]),
        make_group([0.7], parts=[{"b": 0.7}]),
    ]
    assert summarize(groups, None, REWARD)["all"]["greedy_accuracy"] == pytest.approx(1 / 3)
    lenient = RewardConfig(functions="a:b", correct_at=0.7)
    assert summarize(groups, None, lenient)["all"]["greedy_accuracy"] == pytest.approx(2 / 3)


def test_sources_are_sorted_with_all_at_the_end(make_group):
    groups = [make_group([1.0], source=name) for name in ("zoo", "abc", "zoo")]
    found = by_source(groups)
    assert {name: len(members) for name, members in found.items()} == {"abc": 1, "zoo": 2, "all": 3}
    assert list(found) == ["abc", "zoo", "all"]


def test_a_source_called_all_keeps_its_row(make_group):
    """As the rows of all.jsonl have. So does one with the name of what is measured."""
    groups = [make_group([1.0], source=name) for name in ("all", "measured", "zoo")]
    assert {name: len(members) for name, members in by_source(groups).items()} == {
        "all (source)": 1, "measured (source)": 1, "zoo": 1, "all": 3,
    }  # fmt: skip


def test_greedy_accuracy_counts_per_source(make_group):
    class Rollouter:
        def collect(self, examples, *, num_completions, temperature, seed, stream):
            assert (num_completions, temperature) == (1, 0.0)
            return examples

    groups = [make_group([1.0], source="a"), make_group([0.0], source="a"), make_group([1.0], source="b")]
    found = {name: value.result() for name, value in greedy_accuracy(Rollouter(), groups, REWARD).items()}
    assert found == {"val/accuracy/a": 0.5, "val/accuracy/b": 1.0, "val/accuracy": pytest.approx(2 / 3)}


def evaluation(model_folder, files, output_dir, *overrides):
    keys = [f"model.path={model_folder}", f"data.validation_files={files}", f"eval.output_dir={output_dir}"]
    lengths = ["data.max_prompt_tokens=40", "rollout.max_response_tokens=2"]
    return EvalConfig.load(None, [*keys, *lengths, "reward.functions=shardwise.rewards.math:exact_match", *overrides])


def test_a_checkpoint_that_a_run_removes_before_an_evaluation_is_told_as_that(
    whole_run, prune, group_of_one, write_jsonl, tmp_path
):
    files = write_jsonl("v.jsonl", [{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}])
    prune(evaluate_module, "prompt_examples")
    with pytest.raises(ModelError, match=rf"step_3/hf was removed while .*; start again with {whole_run}, of which"):
        evaluate(evaluation(whole_run, files, tmp_path / "eval"), group_of_one)


def test_results_say_what_was_measured_and_stay_with_their_samples_when_more_is(
    group_of_one, model_folder, write_jsonl, tmp_path
):
    rows = [{"prompt": f"{n}+1=", "reward_model": {"ground_truth": str(n + 1)}} for n in range(3)]
    files, run = write_jsonl("sums.jsonl", rows), tmp_path / "run"
    overrides = [(), ("eval.num_samples=2", "eval.seed=7", "rollout.temperature=0.5", "data.max_validation_rows=2")]
    measured = [evaluation(model_folder, files, run, *more) for more in overrides]
    found = [evaluate(config, group_of_one) for config in measured]
    group_of_one.call("close")
    assert {path.name for path in run.iterdir() if path.is_file() and not path.name.startswith(".")} == {
        name + place for name in ("results.json", "samples.jsonl", "config.yaml") for place in ("", ".1")
    }
    of_both = {"model.path": str(model_folder), "data.validation_files": [files], "rollout.max_response_tokens": 2}
    of_each = [
        {"data.max_validation_rows": None, "rollout.temperature": None, "eval.num_samples": 1, "eval.seed": 0},
        {"data.max_validation_rows": 2, "rollout.temperature": 0.5, "eval.num_samples": 2, "eval.seed": 7},
    ]
    for number, (place, num_samples) in enumerate(((".1", 3), ("", 2 + 4))):
        results = json.loads((run / f"results.json{place}").read_text())
        assert results.pop("measured") == of_both | of_each[number]
        assert results == found[number]
        assert len((run / f"samples.jsonl{place}").read_text().splitlines()) == num_samples
        assert EvalConfig.load(run / f"config.yaml{place}") == measured[number]


class Describes:
    """Answers the first turn with what the row says."""

    def reset(self, example):
        self.answer = example.ground_truth

    def step(self, response):
        return self.answer

    def reward(self):
        return 1.0

    def close(self): ...


def asks(example, endpoint):
    """The first request says what the row says."""
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": example.ground_truth}]}
    request = Request(
        f"{endpoint.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {endpoint.api_key}"},
    )
    try:
        with urlopen(request, timeout=10):
            return 1.0
    except HTTPError as refused:
        raise ValueError(json.load(refused)["error"]["message"]) from None


@pytest.mark.parametrize(
    ("environment", "failed"),
    [
        ({"type": "custom", "path": f"{__file__}:Describes", "max_turns": 2}, "step() returned what cannot be read: "),
        ({"type": "agent", "path": f"{__file__}:asks"}, "the agent failed: ValueError: the request: "),
    ],
)
def test_what_spells_the_token_of_images_fails_its_own_episode(
    group_of_one, write_jsonl, tmp_path, capsys, environment, failed
):
    """The engine, which knows a part of an image by it, would end the run."""
    tokenizer = train_tokenizer(["2+3=5"], vocab_size=261)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image_pad|>"]})
    model = tiny_vision_model("qwen3_vl", vocab_size=262)
    model.config.image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    said = ["a cat", "<|image_pad|>", "a dog"]
    files = write_jsonl("v.jsonl", [{"prompt": "?", "reward_model": {"ground_truth": answer}} for answer in said])
    config = evaluation(
        tmp_path / "model",
        files,
        tmp_path / "run",
        f"rollout.environment={json.dumps(environment)}",
        "rollout.max_response_tokens=50",
        f"rollout.stop_token_ids={list(range(262))}",
        "reward.functions=[{type: environment}]",
        "reward.on_failure=value",
    )
    evaluate(config, group_of_one)
    group_of_one.call("close")
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [sample["reward"] for sample in samples] == [1.0, 0.0, 1.0]
    assert f"row v.jsonl line 2: {failed}" in capsys.readouterr().err.replace("\n", " ")


def test_an_output_folder_that_cannot_be_taken_is_named_before_anything_is_computed(
    group_of_one, model_folder, write_jsonl, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    files = write_jsonl("v.jsonl", [{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}])
    monkeypatch.setattr("shardwise.recipes.evaluate.Rollouter", None)
    with pytest.raises(ConfigError, match=r"eval.output_dir=.*file/results cannot be written to: .*Not a directory"):
        evaluate(evaluation(model_folder, files, tmp_path / "file" / "results"), group_of_one)
    with (
        writer_lock(tmp_path / "run"),
        pytest.raises(ConfigError, match=rf"eval.output_dir=.*run is written to by process {os.getpid()} on "),
    ):
        evaluate(evaluation(model_folder, files, tmp_path / "run"), group_of_one)

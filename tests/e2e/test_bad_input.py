"""What a user gets wrong: each time one line that names the thing and the remedy, exit code 2, no process left."""

import json
import re
import shutil

import pytest
import torch
from family_table import save_model
from safetensors.torch import load_file, save_file
from sharded_lora import random_adapter
from transformers import AutoTokenizer

from shardwise.config import LoraConfig

SFT_ROWS = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(8)]
RL_ROWS = [{"prompt": f"{i}+1=", "reward_model": {"ground_truth": str(i + 1)}} for i in range(8)]


def write(path, rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def sft(assets, command, tmp_path):
    """Runs sft on the rows; keys override the defaults."""

    def run(rows=SFT_ROWS, *extra, **keys):
        options = {
            "model.path": assets.model,
            "data.train_files": write(tmp_path / "train.jsonl", rows) if isinstance(rows, list) else rows,
            "data.max_sequence_tokens": 64,
            "trainer.total_steps": 1,
            "trainer.batch_size": 2,
            "trainer.tensorboard": "false",
            "trainer.output_dir": tmp_path / "run",
            **{key.replace("__", "."): value for key, value in keys.items()},
        }
        return command("sft", *(f"{key}={value}" for key, value in options.items()), *extra)

    return run


@pytest.fixture
def rl(assets, command, tmp_path):
    def run(rows=RL_ROWS, **keys):
        options = {
            "model.path": assets.model,
            "data.train_files": write(tmp_path / "train.jsonl", rows) if isinstance(rows, list) else rows,
            "data.max_prompt_tokens": 40,
            "rollout.num_prompts": 2,
            "rollout.group_size": 2,
            "rollout.max_response_tokens": 4,
            "reward.functions": "shardwise.rewards.math:exact_match",
            "reward.num_workers": 1,
            "trainer.total_steps": 2,
            "trainer.tensorboard": "false",
            "trainer.output_dir": tmp_path / "run",
            **{key.replace("__", "."): value for key, value in keys.items()},
        }
        return command("rl", *(f"{key}={value}" for key, value in options.items()))

    return run


def assert_one_line(done, *parts: str) -> None:
    """`parts` are regular expressions that the message must contain: the thing, and what to do about it."""
    assert done.code == 2, done.err
    lines = done.err.splitlines()
    assert len(lines) == 1, done.err
    assert lines[0].startswith("error: ")
    for part in parts:
        assert re.search(part, lines[0]), f"{part!r} is not in {lines[0]!r}"


def test_the_inputs_of_these_tests_are_good_as_they_are(sft, rl):
    assert sft().code == 0
    assert rl(trainer__resume="never").code == 0


# The command line and the config


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"trainer.learning_rat": 1}, ["trainer.learning_rat: unknown key", "did you mean trainer.learning_rate"]),
        ({"trainer.batchsize": 1}, ["trainer.batchsize: unknown key", "did you mean trainer.batch_size"]),
        ({"engine.batch_size": 1}, ["engine.batch_size: unknown key", "did you mean trainer.batch_size"]),
        ({"trainer.total_steps": "ten"}, ["trainer.total_steps='ten'", "valid integer"]),
        ({"trainer.total_steps": 0}, ["trainer.total_steps=0", "greater than 0"]),
        ({"data.max_sequence_tokens": 5000}, ["=5000", "engine.max_tokens_per_micro_batch=4096", "lower|raise"]),
        ({"trainer.lr_schedule": "exponential"}, ["trainer.lr_schedule='exponential'", "'cosine'"]),
        ({"data.train_files": "[]"}, ["data.train_files is empty", "give at least one"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_key_or_value_is_named_with_what_is_allowed(sft, keys, parts):
    assert_one_line(sft(**{key.replace(".", "__"): value for key, value in keys.items()}), *parts)


def test_a_missing_config_file_is_named(command):
    assert_one_line(command("sft", "-c", "nowhere.yaml"), "config file nowhere.yaml does not exist", "-c")


def test_a_config_that_is_not_yaml_is_named_with_the_place(command, tmp_path):
    (tmp_path / "broken.yaml").write_text("model:\n  path: [unclosed\ntrainer: 3\n")
    assert_one_line(command("sft", "-c", str(tmp_path / "broken.yaml")), "broken.yaml is not valid YAML", "line 3")


def test_an_override_without_a_value_is_named(command):
    assert_one_line(command("sft", "trainer.seed"), 'override "trainer.seed" is not of the form key.path=value')


def test_required_keys_are_all_listed_at_once(command):
    done = command("eval", "eval.seed=1")
    assert done.code == 2
    for key in ("model.path", "reward.functions"):
        assert f"  {key}: required, but not given" in done.err
    assert "Traceback" not in done.err


# Data


def test_a_missing_data_file_is_named(sft):
    assert_one_line(sft("/nowhere/train.jsonl"), "data file /nowhere/train.jsonl does not exist", "correct the path")


def test_an_empty_data_file_is_named(sft):
    assert_one_line(sft([]), r"train.jsonl is empty", "at least one row")


@pytest.mark.parametrize("command_name", ["sft", "rl"])
@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        ('{"prompt": "1+1=", ', ["train.jsonl line 4", "not valid JSON"]),
        ("[1, 2]", ["train.jsonl line 4", "a list", "one object a line"]),
        ({"question": "1+1="}, ["train.jsonl line 4", "prompt", '"question"', "set data."]),
        (
            {"prompt": 7, "response": "8", "reward_model": {"ground_truth": 8}},
            ["line 4", '"prompt" is a number', ": 7"],
        ),
        ({"prompt": "", "response": "8", "reward_model": {"ground_truth": 8}}, ["line 4", "prompt is empty", "remove"]),
        (
            {"prompt": "1" * 90, "response": "8", "reward_model": {"ground_truth": 8}},
            [
                "train.jsonl line 4: the (sequence|prompt) has 9[0-9] tokens",
                "data.max_(sequence|prompt)_tokens=",
                "raise it, or set data.on_overlong to drop or truncate",
            ],
        ),
    ],
    ids=["broken json", "not an object", "missing column", "not a string", "empty prompt", "too long"],
)
def test_a_bad_row_is_named_by_file_and_line(request, command_name, bad, parts):
    rows = SFT_ROWS if command_name == "sft" else RL_ROWS
    run = request.getfixturevalue(command_name)
    assert_one_line(run([*rows[:3], bad, *rows[3:]]), *parts)


def test_a_response_that_is_no_string_is_named(sft):
    rows = [*SFT_ROWS, {"prompt": "1+1=", "response": ["2"]}]
    assert_one_line(sft(rows), 'train.jsonl line 9: column "response" is a list, expected a string')


def test_a_row_without_ground_truth_is_named(rl):
    rows = [*RL_ROWS, {"prompt": "1+1=", "reward_model": {"style": "rule"}}]
    assert_one_line(rl(rows), "train.jsonl line 9", '"reward_model.ground_truth"', '"reward_model.style"')


# The model


def edited(folder, **values) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.fixture
def model(assets, tmp_path):
    return shutil.copytree(assets.model, tmp_path / "model")


@pytest.mark.parametrize("command_name", ["sft", "rl"])
def test_a_tokenizer_without_a_chat_template_is_named_with_both_ways_out(request, command_name, model):
    (model / "chat_template.jinja").unlink()
    done = request.getfixturevalue(command_name)(model__path=model)
    assert_one_line(
        done, "train.jsonl line 1", "no chat template", "data.apply_chat_template=false", "model.chat_template="
    )


def test_trap_33_a_tokenizer_larger_than_the_embedding_is_named_with_both_numbers(sft, model):
    edited(model, vocab_size=200)
    assert_one_line(sft(model__path=model), "token ids up to 260", "ends at 199", "model.tokenizer_path")


def test_a_model_folder_without_weights_is_named(sft, model):
    (model / "model.safetensors").unlink()
    assert_one_line(sft(model__path=model), f"model.path={model}", "no .*safetensors weights", "save_pretrained")


def test_a_model_folder_that_does_not_exist_is_named(sft):
    assert_one_line(sft(model__path="/nowhere/model"), "/nowhere/model")


@pytest.mark.parametrize("damage", ["truncated", "tensor missing", "other shape"])
@pytest.mark.parametrize("command_name", ["sft", "eval"])
def test_weights_that_do_not_fit_are_named_with_the_tensor(sft, command, assets, model, tmp_path, command_name, damage):
    file = model / "model.safetensors"
    weights = load_file(file)
    match damage:
        case "truncated":
            file.write_bytes(file.read_bytes()[:2000])
        case "tensor missing":
            del weights["model.layers.1.mlp.up_proj.weight"]
            save_file(weights, file, metadata={"format": "pt"})
        case "other shape":
            weights["model.norm.weight"] = torch.zeros(7)
            save_file(weights, file, metadata={"format": "pt"})
    if command_name == "sft":
        done = sft(model__path=model)
    else:
        done = command(
            "eval",
            f"model.path={model}",
            f"data.validation_files={write(tmp_path / 'rows.jsonl', RL_ROWS)}",
            "data.max_prompt_tokens=40",
            "rollout.max_response_tokens=4",
            "reward.functions=shardwise.rewards.math:exact_match",
            f"eval.output_dir={tmp_path / 'eval'}",
        )
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    last = done.err.splitlines()[-1]
    assert last.startswith(f"error: {model}")
    assert damage != "tensor missing" or "model.layers.1.mlp.up_proj.weight" in last


def test_a_context_shorter_than_the_settings_is_named_with_both_numbers(sft):
    assert_one_line(sft(data__max_sequence_tokens=97), "data.max_sequence_tokens=97", "96", "max_position_embeddings")


def test_sequences_that_would_change_the_rotary_frequencies_of_others_are_refused_before_any_step(
    sft, rl, assets, tmp_path
):
    model = shutil.copytree(assets.model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    factors = [1.0] * (config["head_dim"] // 2)
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 2.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 48,
    }
    (model / "config.json").write_text(json.dumps(config))
    parts = ["49", "48", "original_max_position_embeddings, as with rope_type longrope", "lower it"]
    assert_one_line(sft(model__path=model, data__max_sequence_tokens=49), "data.max_sequence_tokens=49", *parts)
    done = rl(model__path=model, data__max_prompt_tokens=40, rollout__max_response_tokens=9)
    assert_one_line(done, r"data.max_prompt_tokens=40 \+ rollout.max_response_tokens=9 = 49", *parts)
    assert not (tmp_path / "run").exists()
    assert sft(model__path=model, data__max_sequence_tokens=48).code == 0


def test_an_fsdp_size_that_does_not_divide_lists_those_that_do(sft):
    done = sft(engine__fsdp_size=3)
    assert_one_line(done, "engine.fsdp_size=3 does not divide the world size 1", "use 1")


def test_a_mistake_in_the_layout_of_another_model_is_told_as_one_of_that_model(rl):
    done = rl(reference="{fsdp_size: 3}", algorithm__kl_coef=0.1)
    assert_one_line(
        done,
        "error: the reference, which has the options of `engine` unless it is given its own: ",
        "engine.fsdp_size=3 does not divide",
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("engine.fsdp_size=4", ["engine.fsdp_size=4 does not divide the world size 2", "use 1 or 2"]),
        (
            "engine.freeze_module_prefix=[model.visual]",
            ["engine.freeze_module_prefix: 'model.visual' names no module or parameter", "names such as model"],
        ),
    ],
    ids=["layout", "model"],
)
def test_a_mistake_found_by_two_ranks_is_printed_once(assets, shell, tmp_path, override, parts):
    """The layout and the model are seen by every rank; whichever notes it first, one line comes out."""
    done = shell(
        "shardwise",
        "sft",
        "--nproc",
        "2",
        f"model.path={assets.model}",
        f"data.train_files={assets.sft}",
        "data.max_train_rows=4",
        "data.max_sequence_tokens=64",
        override,
        f"trainer.output_dir={tmp_path / 'run'}",
    )
    assert_one_line(done, *parts)


def test_a_family_that_nobody_has_proven_is_named_with_the_key_that_tries_it(sft, rl, assets, tmp_path):
    """A value of its own for each of the two engines."""
    unproven = tmp_path / "unproven"
    save_model("persimmon", {"vocab_size": 261, "max_position_embeddings": 96}, unproven)
    AutoTokenizer.from_pretrained(assets.model).save_pretrained(unproven)
    parts = ["not proven for the family persimmon", "of which nothing is proven", "choose another"]
    assert_one_line(sft(model__path=unproven), *parts, "or set engine.allow_unproven=true to try it unproven")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert sft(model__path=unproven, engine__allow_unproven="true").code == 0
    done = rl(model__path=unproven, engine__allow_unproven="true", trainer__resume="never")
    assert_one_line(done, "the embedded rollout engine: not", *parts, "or set rollout.engine.allow_unproven=true")


def test_an_adapter_of_another_base_is_named_with_both_models(sft, assets, model, tmp_path):
    adapter = random_adapter(model, LoraConfig(rank=2), tmp_path / "adapter")
    lora = f"{{rank: 2, adapter_path: {adapter}}}"
    weights = load_file(model / "model.safetensors")
    assert sft(model__path=model, engine__lora=lora).code == 0
    weights["model.embed_tokens.weight"] += 0.5
    other = shutil.copytree(model, tmp_path / "other")
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert_one_line(
        sft(model__path=other, engine__lora=lora, trainer__output_dir=tmp_path / "again"),
        rf"engine.lora.adapter_path={adapter} was trained on {model}, whose weights are not those of",
        rf"model.path={other}",
        "set model.path to the model that it belongs to, or begin a new adapter",
    )
    assert not (tmp_path / "again").exists()


# The reward function


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ('raise ValueError("no such answer")', [r"ValueError: no such answer \(rules.py line 2\)"]),
        ("while True: pass", ["did not return within 0.5 s"]),
        ('return float("nan")', ["returned nan, expected a finite number"]),
        *(
            pytest.param(f"return {value}", [f"returned {named}, expected a finite number"], marks=pytest.mark.full)
            for value, named in (('"good"', "the str 'good'"), ("None", "None"))
        ),
        ('return {"acc": 1.0}', ['returned a dict without "score"']),
        ("import os; os.kill(os.getpid(), 9)", ["ended its process by SIGKILL"]),
    ],
    ids=["raises", "hangs", "nan", "text", "none", "dict", "dies"],
)
def test_a_reward_function_that_fails_is_named_with_the_row(rl, tmp_path, body, parts, metrics_of):
    """It works in the first step: what was written then stays readable."""
    (tmp_path / "rules.py").write_text(
        f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n"
    )
    seconds = 0.5 if "within 0.5 s" in parts[0] else 60
    done = rl(reward__functions=f"{tmp_path / 'rules.py'}:compute_score", reward__timeout_seconds=seconds)
    assert_one_line(
        done, r"rules.py:compute_score failed for row train.jsonl line \d", *parts, "reward.on_failure=value"
    )
    assert (tmp_path / "run" / "config.yaml").is_file()


def test_what_was_written_before_a_failure_stays_readable(rl, tmp_path, metrics_of):
    """The function fails from its fifth call on, which is in the second step."""
    (tmp_path / "rules.py").write_text(
        "calls = []\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 4: raise RuntimeError('tired')\n"
        "    return len(calls)\n"
    )
    done = rl(reward__functions=f"{tmp_path / 'rules.py'}:compute_score", trainer__save_every_steps=1)
    assert_one_line(done, "RuntimeError: tired")
    (row,) = metrics_of(tmp_path / "run")
    assert row["reward/mean"] == 2.5
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [sample["reward"] for sample in samples] == [1.0, 2.0, 3.0, 4.0]
    weights = load_file(tmp_path / "run" / "checkpoints" / "step_1" / "hf" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == ["step_1"]


def test_failures_are_scored_and_counted_where_the_config_says_so(rl, tmp_path, metrics_of):
    (tmp_path / "rules.py").write_text("def compute_score(**_):\n    raise ValueError\n")
    done = rl(
        reward__functions=f"{tmp_path / 'rules.py'}:compute_score",
        reward__on_failure="value",
        reward__failure_value=-0.5,
        reward__max_failure_rate=1,
    )
    assert done.code == 0, done.err
    for row in metrics_of(tmp_path / "run"):
        assert (row["reward/mean"], row["reward/failed"]) == (-0.5, 1.0)


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        ("nowhere/rules.py:compute_score", ["there is no file nowhere/rules.py", "give a path relative"]),
        ("shardwise.rewards.math:exact_macth", ["has no 'exact_macth'", "did you mean exact_match"]),
        ("no_such_package:f", ["importing no_such_package failed"]),
        ("just_a_name", ["not of the form path/to/file.py:name"]),
    ],
)
def test_a_reward_function_that_cannot_be_found_is_named(rl, function, parts):
    assert_one_line(rl(reward__functions=function), *parts)


def test_an_output_folder_that_is_a_file_is_named(sft, tmp_path):
    (tmp_path / "taken").write_text("mine")
    assert_one_line(sft(trainer__output_dir=tmp_path / "taken"), "trainer.output_dir=.*taken cannot be written to")
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.full
@pytest.mark.parametrize("met_by", ["rank 0", "every rank"])
def test_under_torchrun_a_mistake_is_told_by_one_rank_without_a_traceback(assets, model, shell, tmp_path, met_by):
    rows, told = assets.sft, "model.safetensors"
    if met_by == "rank 0":
        rows, told = tmp_path / "bad.jsonl", "bad.jsonl line 1"
        rows.write_text('{"prompt": "1+1="\n')
    else:
        file = model / "model.safetensors"
        file.write_bytes(file.read_bytes()[:2000])
    run = shell(
        *["torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "shardwise", "sft"],
        *[f"model.path={model}", f"data.train_files={rows}", "data.max_sequence_tokens=64"],
        f"trainer.output_dir={tmp_path}",
    )
    assert run.code != 0
    ours = [line for line in run.err.splitlines() if line.startswith(("error:", "rank "))]
    assert sum(told in line for line in ours) == 1, run.err
    assert "shardwise/recipes" not in run.err  # no frame of ours: no traceback


def test_overrides_may_stand_before_and_after_options(sft):
    done = sft(SFT_ROWS, "--dry-run", "trainer.seed=5")
    assert done.code == 0, done.err
    assert "seed: 5" in done.out
    assert sft(SFT_ROWS, "--dry-run", "trainer").code == 2

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import tiny_folder

from shardwise.config import (
    RECIPES,
    ConfigError,
    DataError,
    DistillConfig,
    EvalConfig,
    ModelError,
    PreferenceConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
)
from shardwise.recipes.checkpointing.manifest import hash_share, write_manifest
from shardwise.recipes.checkpointing.resume import write_run
from shardwise.recipes.custom import ARGUMENTS
from shardwise.recipes.preflight import check_inputs, check_layouts

ROW = {"prompt": "2+3=", "response": "5", "chosen": "5", "rejected": "6", "reward_model": {"ground_truth": "5"}}
"""What any command reads."""
MODEL, REWARD = {"path": "m"}, {"functions": "shardwise.rewards.math:exact_match"}


@pytest.fixture
def data(tmp_path):
    paths = {"train_files": str(tmp_path / "train.jsonl"), "validation_files": str(tmp_path / "held out.jsonl")}
    for path in paths.values():
        Path(path).write_text(json.dumps(ROW) + "\n")
    return paths


def configs(data, reward=REWARD):
    held_out = {"validation_files": data["validation_files"]}
    return {
        "sft": lambda: SFTConfig.parse({"model": MODEL, "data": data}, origin="test"),
        "preference": lambda: PreferenceConfig.parse({"model": MODEL, "data": data}, origin="test"),
        "reward-model": lambda: RewardModelConfig.parse({"model": MODEL, "data": data}, origin="test"),
        "distill": lambda: DistillConfig.parse({"model": MODEL, "teacher": {"model": MODEL}, "data": data}, origin="t"),
        "rl": lambda: RLConfig.parse({"model": MODEL, "data": data, "reward": reward}, origin="test"),
        "eval": lambda: EvalConfig.parse({"model": MODEL, "data": held_out, "reward": reward}, origin="test"),
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_files_that_exist_and_a_reward_that_imports_pass(data, recipe):
    assert check_inputs(configs(data)[recipe]()) is None


@pytest.mark.parametrize(
    ("recipe", "missing"),
    [
        *((recipe, files) for recipe in RECIPES if recipe != "eval" for files in ("train_files", "validation_files")),
        ("eval", "validation_files"),
    ],
)
def test_a_missing_file_is_named(data, recipe, missing):
    absent = data[missing] + ".jsonl"
    with pytest.raises(DataError, match=f"data file {absent} does not exist"):
        check_inputs(configs({**data, missing: absent})[recipe]())


@pytest.mark.parametrize(
    ("recipe", "column", "told"),
    [
        ("sft", "response", 'train.jsonl line 1: there is no column "response"'),
        ("sft", "prompt", 'train.jsonl line 1: there is no column "prompt"'),
        ("distill", "response", 'train.jsonl line 1: there is no column "response"'),
        ("preference", "rejected", 'train.jsonl line 1: there is no column "rejected"'),
        ("reward-model", "chosen", 'train.jsonl line 1: there is no column "chosen"'),
        ("rl", "reward_model", 'train.jsonl line 1: there is no column "reward_model.ground_truth"'),
        ("eval", "prompt", 'held out.jsonl line 1: there is no column "prompt"'),
    ],
)
def test_a_column_that_the_command_reads_and_the_first_row_lacks_is_named(data, recipe, column, told):
    rows = {name: cell for name, cell in ROW.items() if name != column}
    for path in data.values():
        Path(path).write_text(json.dumps(rows) + "\n")
    with pytest.raises(DataError) as error:
        check_inputs(configs(data)[recipe]())
    assert str(error.value).startswith(told)


OWN = {"name": "custom", "function": "m:f"}


@pytest.mark.parametrize(
    ("loss", "columns", "told"),
    [
        (
            "dpo",
            ("response", "label"),
            "one labelled answer, and loss=dpo compares two; set loss=kto (a custom loss: loss.is_p",
        ),
        (
            OWN,
            ("response", "label"),
            "one labelled answer, and loss=custom compares two; set loss=kto (a custom loss: loss.is_",
        ),
        (
            "kto",
            ("chosen", "rejected"),
            "two answers, and loss=kto takes one with a label; set loss=dpo (a custom loss: loss.is",
        ),
        (
            {**OWN, "is_paired": False},
            ("chosen", "rejected"),
            "two answers, and loss=custom takes one with a label; set l",
        ),
    ],
)
def test_rows_for_the_other_kind_of_preference_loss_are_told_as_such(data, loss, columns, told):
    row = {"prompt": "2+3=", **dict.fromkeys(columns, "5"), **({"label": True} if "label" in columns else {})}
    Path(data["train_files"]).write_text(json.dumps(row) + "\n")
    tree = {"model": MODEL, "data": {"train_files": data["train_files"]}, "loss": loss}
    with pytest.raises(DataError, match=rf"^train\.jsonl line 1: the row has {re.escape(told)}"):
        check_inputs(PreferenceConfig.parse(tree, origin="test"))


def test_a_later_file_without_the_column_of_the_loss_is_named(data, tmp_path):
    labelled = tmp_path / "labelled.jsonl"
    labelled.write_text(json.dumps({**ROW, "label": True}) + "\n")
    tree = {"model": MODEL, "data": {"train_files": [str(labelled), data["train_files"]]}, "loss": "kto"}
    with pytest.raises(DataError, match=r'^train\.jsonl line 1: there is no column "label"'):
        check_inputs(PreferenceConfig.parse(tree, origin="test"))
    tree["data"]["train_files"] = str(labelled)
    check_inputs(PreferenceConfig.parse(tree, origin="test"))


def test_prompts_that_nothing_judges_need_no_ground_truth(data):
    Path(data["train_files"]).write_text('{"prompt": "2+3="}\n')
    tree = {"model": MODEL, "data": {"train_files": data["train_files"]}, "teachers": [{"model": MODEL}]}
    check_inputs(RLConfig.parse(tree | {"algorithm": {"advantage": "distill"}}, origin="test"))


def test_an_evaluation_into_a_run_s_folder_is_refused(data, tmp_path):
    """It would move the run's samples aside, and a resumed run would cut those of the evaluation."""
    held_out = {"validation_files": data["validation_files"]}

    def check(folder):
        tree = {"model": MODEL, "data": held_out, "reward": REWARD, "eval": {"output_dir": str(folder)}}
        check_inputs(EvalConfig.parse(tree, origin="test"))

    check(tmp_path / "new")
    for name in ("metrics.jsonl", "checkpoints"):
        run = tmp_path / name
        (run / name).mkdir(parents=True)
        with pytest.raises(ConfigError, match=rf"^eval.output_dir={run} is the folder of a training run, .*{run}/eval"):
            check(run)
        check(run / "eval")


@pytest.mark.parametrize("recipe", ["rl", "eval"])
def test_a_reward_that_cannot_be_imported_is_named(data, recipe):
    with pytest.raises(ConfigError, match="has no 'exact_macth'; did you mean exact_match"):
        check_inputs(configs(data, {"functions": "shardwise.rewards.math:exact_macth"})[recipe]())


def test_a_manager_that_cannot_be_imported_is_named(data):
    with pytest.raises(ConfigError, match=r"reward\.manager=nowhere\.py:M: there is no file"):
        check_inputs(configs(data, {"functions": [], "manager": "nowhere.py:M"})["rl"]())


@pytest.fixture
def without_rewards(monkeypatch):
    """Each look at reward functions takes a process; these tests look at other functions."""
    monkeypatch.setattr("shardwise.recipes.preflight.check_rewards", lambda config: None)


def placed(recipe, data, key, chosen):
    """The config of a command with a function at a dotted key."""
    tree = {"model": MODEL, "data": data}
    tree |= {"rl": {"reward": REWARD, "algorithm": {"kl_coef": 0.1}}, "distill": {"teacher": {"model": MODEL}}}.get(
        recipe, {}
    )
    if key.startswith("critic"):
        tree["algorithm"] = {"advantage": "gae"}
    *groups, leaf = key.split(".")
    node = tree
    for group in groups:
        node = node.setdefault(group, {})
    node[leaf] = chosen
    return COMMANDS[recipe].parse(tree, origin="test")


COMMANDS = {"rl": RLConfig, "preference": PreferenceConfig, "reward-model": RewardModelConfig, "distill": DistillConfig}
PLACES = [(recipe, key) for recipe, cls in COMMANDS.items() for key in ARGUMENTS[cls]]


@pytest.mark.parametrize(("recipe", "key"), PLACES)
def test_a_function_of_ones_own_that_cannot_be_imported_or_called_is_named(
    data, tmp_path, without_rewards, recipe, key
):
    arguments = ", ".join(ARGUMENTS[COMMANDS[recipe]][key])
    (tmp_path / "rules.py").write_text(
        f"def fits({arguments}, power=1):\n    pass\n"
        f"def needs_more({arguments}, power):\n    pass\n"
        "def none():\n    pass\n"
    )

    def check(name, **parameters):
        chosen = {"name": "custom", "function": f"{tmp_path / 'rules.py'}:{name}", "parameters": parameters}
        check_inputs(placed(recipe, data, key, chosen))

    check("fits")
    check("needs_more", power=2)
    at = rf"^{key}=.*rules\.py:"
    with pytest.raises(ConfigError, match=rf"{at}fist: .* has no 'fist'; did you mean fits\?"):
        check("fist")
    for name, parameters, problem in (
        ("fits", {"nonsense": 3}, "got an unexpected keyword argument 'nonsense'"),
        ("needs_more", {}, "missing a required argument: 'power'"),
        ("none", {}, "too many positional arguments"),
    ):
        with pytest.raises(ConfigError) as error:
            check(name, **parameters)
        shown = ", ".join([arguments, *parameters])
        assert str(error.value) == f"{key}={tmp_path / 'rules.py'}:{name} cannot be called with ({shown}): {problem}"
    with pytest.raises(ConfigError, match=rf"^{key}=os:sep: sep is a str, expected a function of \({arguments}\)"):
        check_inputs(placed(recipe, data, key, "os:sep"))


def test_an_advantage_of_ones_own_that_asks_for_what_the_run_has_not_is_named(data, tmp_path, without_rewards):
    (tmp_path / "rules.py").write_text(
        "def mine(token_rewards, loss_mask, group_ids, *, values, ref_logprobs):\n    pass\n"
        "def maybe(token_rewards, loss_mask, group_ids, *, values=None):\n    pass\n"
    )
    tree = {"model": MODEL, "data": data, "reward": REWARD}

    def check(name, *, kl_coef=0.0, parameters=None, **beside):
        chosen = {"name": "custom", "function": f"{tmp_path / 'rules.py'}:{name}", "parameters": parameters or {}}
        config = {"algorithm": {"advantage": chosen, "kl_coef": kl_coef}, **beside}
        check_inputs(RLConfig.parse(tree | config, origin="test"))

    check("mine", kl_coef=0.1, critic={})
    check("mine", kl_coef=0.1, parameters={"values": 3})
    check("maybe")
    with pytest.raises(ConfigError, match="asks for values, which this run does not have; it has ref_logprobs, roll"):
        check("mine", kl_coef=0.1)
    with pytest.raises(ConfigError, match="asks for ref_logprobs, which this run does not have; it has values, roll"):
        check("mine", critic={})


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "eval"])
def test_a_run_that_was_trained_with_another_config_is_named(data, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # trainer.output_dir is runs/latest
    before = configs(data)[recipe]()
    folder = tmp_path / before.trainer.output_dir / "checkpoints" / "step_1"
    folder.mkdir(parents=True)
    write_run(folder, before, step=1, parts={}, files={})
    write_manifest(folder, [{}], step=1)
    check_inputs(before)
    changed = before.model_copy(update={"trainer": before.trainer.model_copy(update={"seed": 9})})
    with pytest.raises(ConfigError, match=r"step_1 was trained with another config: trainer.seed was 0 and is 9; "):
        check_inputs(changed)


def test_a_missing_file_is_told_before_a_run_that_was_trained_with_another_config(data, tmp_path, monkeypatch):
    """A mistyped path is another config too."""
    monkeypatch.chdir(tmp_path)
    before = configs(data)["sft"]()
    folder = tmp_path / before.trainer.output_dir / "checkpoints" / "step_1"
    folder.mkdir(parents=True)
    write_run(folder, before, step=1, parts={}, files={})
    write_manifest(folder, [{}], step=1)
    absent = str(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=rf"^data file {absent} does not exist; did you mean {data['train_files']}\?$"):
        check_inputs(configs({**data, "train_files": absent})["sft"]())


@pytest.mark.parametrize("path", ["./m", "~/m", "/nowhere/m", "runs/sft/m", "file"])
@pytest.mark.parametrize("key", ["model", "teacher"])
def test_a_path_that_is_no_folder_is_told_and_a_name_of_the_hub_is_not_looked_up(
    data, tmp_path, monkeypatch, key, path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()

    def check(given):
        tree = {"model": MODEL, "teacher": {"model": {"path": "Some/Teacher-1.5B"}}, "data": data}
        tree |= {"model": {"path": given}} if key == "model" else {"teacher": {"model": {"path": given}}}
        check_inputs(DistillConfig.parse(tree, origin="test"))

    check("org/name")
    expanded = os.path.expanduser(path)
    told = f"{key if key == 'model' else 'teacher.model'}.path={expanded} is not a folder; give a Hugging Face model"
    with pytest.raises(ModelError, match=f"^{re.escape(told)}"):
        check(path)


def test_a_name_of_the_hub_that_begins_like_a_folder_here_is_told(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in ("org/name", "runs/nmae"):
        check_inputs(SFTConfig.parse({"model": {"path": path}, "data": data}, origin="test"))
    told = "model.path=runs/nmae is no folder here, so it is taken for the name of a model on the hub"
    assert [line for line in capsys.readouterr().err.splitlines() if "hub" in line] == [f"warning: {told}"]


def test_a_family_that_transformers_lacks_is_told(data, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of", "auto_map": {"AutoConfig": "own.Config"}}')
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"^model\.path: .* has no model_type=unheard_of, and code beside weights"):
        check_inputs(SFTConfig.parse({"model": {"path": str(tmp_path)}, "data": data}, origin="test"))


def limits(recipe, num_tokens):
    """What allows a recipe sequences of so many tokens, in words and in a config."""
    if recipe in ("rl", "eval"):
        lengths = {"data": {"max_prompt_tokens": 60}, "rollout": {"max_response_tokens": num_tokens - 60}}
        return f"data.max_prompt_tokens=60 + rollout.max_response_tokens={num_tokens - 60} = {num_tokens}", lengths
    return f"data.max_sequence_tokens={num_tokens}", {"data": {"max_sequence_tokens": num_tokens}}


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        *((recipe, "model") for recipe in RECIPES),
        ("distill", "teacher.model"),
        ("rl", "critic.model"),
        ("rl", "teachers"),
    ],
)
def test_sequences_longer_than_the_context_of_a_model_that_is_here_are_refused(data, model_folder, recipe, model):
    """As the run would, which opens the model: with the same words."""
    here = {"path": str(model_folder)}
    placed = {
        "model": {"model": here},
        "teacher.model": {"teacher": {"model": here}},
        "critic.model": {"critic": {"model": here}, "algorithm": {"advantage": "gae"}},
        "teachers": {"teachers": [{"model": here}], "algorithm": {"advantage": "distill"}},
    }[model]
    tree = configs(data)[recipe]().model_dump(exclude_defaults=True) | placed

    def check(num_tokens):
        _, lengths = limits(recipe, num_tokens)
        changed = {group: tree.get(group, {}) | keys for group, keys in lengths.items()}
        check_inputs(RECIPES[recipe].parse(tree | changed, origin="test"))

    check(96)
    said, _ = limits(recipe, 97)
    told = f"{said} tokens, more than the 96 of the model's context (max_position_embeddings in {model_folder}/"
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}"):
        check(97)


def test_a_dense_model_has_no_routing_to_replay(data, model_folder, tmp_path):
    def check(path):
        tree = {"model": {"path": str(path)}, "data": {**data, "max_prompt_tokens": 48}, "reward": REWARD}
        check_inputs(
            RLConfig.parse(tree | {"rollout": {"router_replay": True, "max_response_tokens": 48}}, origin="test")
        )

    with pytest.raises(
        ModelError, match=r"^rollout.router_replay=true: Qwen3ForCausalLM has no routers, .* remove it$"
    ):
        check(model_folder)
    check(tiny_folder("qwen3_moe", tmp_path / "mixture", max_position_embeddings=96))
    check("a/model-on-the-hub")


def test_the_context_of_a_reward_model_limits_no_sequence(data, model_folder):
    """It reads the words with a tokenizer of its own; what is too long for it is a reward that failed."""
    reward = {"functions": [{"type": "model", "name": "judge", "classifier": {"path": str(model_folder)}}]}
    check_inputs(configs(data, reward)["rl"]())


def test_a_model_folder_without_weights_and_a_missing_chat_template_are_told(data, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=rf"^model.path={tmp_path} has a config.json but no \*.safetensors weights; "):
        check_inputs(SFTConfig.parse({"model": {"path": str(tmp_path)}, "data": data}, origin="test"))
    template = {"path": "org/name", "chat_template": str(tmp_path / "chat.jinja")}
    with pytest.raises(
        ModelError, match=r"^model.chat_template=.*chat\.jinja cannot be read .*; give a Jinja file, or "
    ):
        check_inputs(SFTConfig.parse({"model": template, "data": data}, origin="test"))
    (tmp_path / "chat.jinja").touch()
    check_inputs(SFTConfig.parse({"model": template, "data": data}, origin="test"))


def test_an_sglang_that_is_not_there_is_found_before_any_rank_starts(data):
    engine = {"type": "sglang", "python": "/no/python"}
    tree = {"model": MODEL, "data": data, "reward": REWARD, "rollout": {"engine": engine}}
    with pytest.raises(ConfigError, match=r"rollout\.engine\.python=/no/python: there is no such program"):
        check_inputs(RLConfig.parse(tree, origin="test"))


def test_an_adapter_of_a_checkpoint_that_has_changed_is_refused(data, tmp_path, group_of_one):
    adapter = tmp_path / "step_3" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    save_file({"lora_A": torch.ones(4)}, adapter / "adapter_model.safetensors")
    write_manifest(adapter.parent, [hash_share(adapter.parent)], step=3)
    tree = {"model": MODEL, "data": data, "engine": {"lora": {"adapter_path": str(adapter)}}}
    check_inputs(SFTConfig.parse(tree, origin="test"))
    save_file({"lora_A": torch.zeros(4)}, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"adapter_model.safetensors is damaged: lora_A is not what was written"):
        check_inputs(SFTConfig.parse(tree, origin="test"))


def test_restarts_by_torchrun_that_would_begin_anew_are_refused(data, monkeypatch):
    """torchrun gives its ranks the number of restarts, and starts the same command."""
    tree = {"model": MODEL, "data": data, "trainer": {"resume": "never"}}
    config = SFTConfig.parse(tree, origin="test")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    check_inputs(config)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    with pytest.raises(ConfigError, match=r"trainer.resume=never would begin anew at each of torchrun's restarts; set"):
        check_inputs(config)


def test_a_time_limit_is_refused_where_torchrun_would_start_again(data, monkeypatch):
    tree = {"model": MODEL, "data": data, "trainer": {"max_time_seconds": 60}}
    config = SFTConfig.parse(tree, origin="test")
    check_inputs(config)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    with pytest.raises(ConfigError, match=r"trainer.max_time_seconds=60 stops a job that torchrun would start again"):
        check_inputs(config)


@pytest.mark.parametrize(
    ("part", "num_ranks", "expected"),
    [
        ({"engine": {"fsdp_size": 3}}, 4, r"^engine\.fsdp_size=3 does not divide the world size 4; use 1, 2 or 4"),
        ({"engine": {"ulysses_size": 2}}, 3, r"^engine\.ulysses_size=2 does not divide the 3 ranks"),
        (
            {"algorithm": {"kl_coef": 0.1}, "reference": {"fsdp_size": 4}},
            2,
            r"^reference: engine\.fsdp_size=4 does not divide the world size 2",
        ),
        (
            {"engine": {"fsdp_size": 2}, "rollout": {"placement": {"type": "split"}}},
            4,
            r"^engine\.fsdp_size=2 does not divide the world size 3",
        ),
        ({"rollout": {"placement": {"type": "split", "num_ranks": 2}}}, 2, "leaves none of the job's 2 ranks to train"),
    ],
)
def test_engines_that_fit_no_mesh_of_the_ranks_are_named(data, part, num_ranks, expected):
    config = RLConfig.parse({"model": MODEL, "data": data, "reward": REWARD, **part}, origin="test")
    with pytest.raises(ConfigError, match=expected):
        check_layouts(config, num_ranks)
    check_layouts(config, 12 + ("placement" in part.get("rollout", {})))

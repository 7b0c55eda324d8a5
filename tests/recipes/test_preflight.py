import pytest

from shardwise.cli import RECIPES
from shardwise.config import (
    ConfigError,
    DataError,
    DistillConfig,
    EvalConfig,
    PreferenceConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
)
from shardwise.recipes.manifest import write_manifest
from shardwise.recipes.preflight import check_inputs
from shardwise.recipes.resume import write_run

MODEL, REWARD = {"path": "m"}, {"functions": "shardwise.rewards.math:exact_match"}


@pytest.fixture
def data(tmp_path):
    paths = {"train_files": str(tmp_path / "train.jsonl"), "validation_files": str(tmp_path / "held out.jsonl")}
    for path in paths.values():
        with open(path, "w") as file:
            file.write("{}\n")
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


@pytest.mark.parametrize("recipe", ["rl", "eval"])
def test_a_reward_that_cannot_be_imported_is_named(data, recipe):
    with pytest.raises(ConfigError, match="has no 'exact_macth'; did you mean exact_match"):
        check_inputs(configs(data, {"functions": "shardwise.rewards.math:exact_macth"})[recipe]())


OWN = {
    "advantage": "examples/custom_advantage/median.py:above_median",
    "policy_loss": "examples/custom_loss/asymmetric.py:asymmetric",
}


def test_a_manager_that_cannot_be_imported_is_named(data):
    with pytest.raises(ConfigError, match=r"reward\.manager=nowhere\.py:M: there is no file"):
        check_inputs(configs(data, {"functions": [], "manager": "nowhere.py:M"})["rl"]())


@pytest.mark.parametrize("key", ["advantage", "policy_loss"])
def test_a_function_of_ones_own_that_cannot_be_imported_is_named(data, key):
    tree = {"model": MODEL, "data": data, "reward": REWARD}
    good, typo = OWN[key], OWN[key].replace(":", ":x_")

    def check(chosen):
        check_inputs(RLConfig.parse(tree | {"algorithm": {key: chosen}}, origin="test"))

    check(good)
    with pytest.raises(ConfigError, match=rf"algorithm\.{key}=.* has no 'x_.*'; did you mean "):
        check(typo)
    with pytest.raises(ConfigError, match=rf"algorithm\.{key}=.* cannot be called with \(.*, nonsense\): "):
        check({"name": "custom", "function": good, "parameters": {"nonsense": 3}})
    with pytest.raises(ConfigError, match=r"sep is a str, expected a function of \("):
        check("os:sep")


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "eval"])
def test_a_run_that_was_trained_with_another_config_is_named(data, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # trainer.output_dir is runs/latest
    before = configs(data)[recipe]()
    folder = tmp_path / before.trainer.output_dir / "checkpoints" / "step_1"
    folder.mkdir(parents=True)
    write_run(folder, before, step=1, parts={})
    write_manifest(folder, [{}], step=1)
    check_inputs(before)
    changed = before.model_copy(update={"trainer": before.trainer.model_copy(update={"seed": 9})})
    with pytest.raises(ConfigError, match=r"step_1 was trained with another config: trainer.seed was 0 and is 9; "):
        check_inputs(changed)

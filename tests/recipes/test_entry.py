import pytest

from shardwise.config import RECIPES, ConfigError, Split
from shardwise.recipes import entry


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SHARDWISE_JOB_FOLDER", "SHARDWISE_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", RECIPES)
def test_every_config_runs_its_own_recipe(monkeypatch, name):
    called = []
    functions = {
        "sft": "train_sft",
        "preference": "train_preference",
        "reward-model": "train_reward_model",
        "distill": "train_distill",
        "rl": "train_rl",
        "eval": "evaluate",
    }
    for function in functions.values():
        monkeypatch.setattr(entry, function, lambda config, group, function=function: called.append((function, config)))
    monkeypatch.setattr(entry, "run_rank", lambda recipe, timeout_seconds, **_: recipe(None) or timeout_seconds)
    keys = ["model.path=m", "engine.collective_timeout_seconds=9", "data.validation_files=v"]
    keys += ["data.train_files=t"] * (name != "eval") + ["reward.functions=a:b"] * (name in ("rl", "eval"))
    config = RECIPES[name].load(None, keys + ["teacher.model.path=t"] * (name == "distill"))
    assert entry.run_recipe(config) == 9
    assert called == [(functions[name], config)]


def test_the_ranks_that_only_sample_are_no_part_of_the_default_group(monkeypatch):
    seen = {}
    monkeypatch.setattr(entry, "run_rank", lambda recipe, **numbers: seen.update(numbers) or 0)
    keys = ["model.path=m", "data.train_files=t", "reward.functions=a:b", "rollout.placement={num_ranks: 3}"]
    entry.run_recipe(RECIPES["rl"].load(None, [*keys, "trainer.faults=[phase=optim]"]))
    assert seen["split"] == Split(num_ranks=3)
    assert seen["faults"] == ["phase=optim"]


def test_what_takes_one_process_is_refused_in_a_job_of_two(monkeypatch, fake_group):
    monkeypatch.setattr(entry, "run_rank", lambda recipe, **_: recipe(fake_group(size=2)))
    with pytest.raises(ConfigError, match="shardwise replay runs on one process, and this job has 2; start it without"):
        entry.run_question("replay", lambda device: pytest.fail("it was asked"))


def test_a_command_gets_the_group_of_all_ranks(monkeypatch, fake_group):
    group, given = fake_group(size=2), []
    monkeypatch.setattr(entry, "run_rank", lambda recipe, **options: recipe(group) or options["output_dir"])
    assert entry.run_command(given.append, output_dir="runs/a") == "runs/a"
    assert given == [group]


@pytest.mark.parametrize(("answer", "code"), [(True, 0), (False, 1)])
def test_an_answer_is_an_exit_code(answer, code):
    asked = []
    assert entry.run_question("parity", lambda device: asked.append(device) or answer) == code
    assert len(asked) == 1


@pytest.mark.parametrize("note", [None, "model families are proven with transformers 5.23.0, and 5.17.0 is installed"])
def test_another_release_of_transformers_than_the_records_is_a_warning_of_the_leader(capsys, monkeypatch, note):
    monkeypatch.setattr(entry, "other_release", lambda: note)
    monkeypatch.setattr(entry, "train_sft", lambda config, group: None)
    monkeypatch.setattr(entry, "run_rank", lambda recipe, **_: recipe(None) or 0)
    config = RECIPES["sft"].load(None, ["model.path=m", "data.train_files=[t.jsonl]", "trainer.total_steps=1"])
    assert entry.run_recipe(config) == 0
    expected = "" if note is None else f"warning: {note}; make models proves them with that one\n"
    assert capsys.readouterr().err == expected

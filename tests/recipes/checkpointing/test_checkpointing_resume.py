import re
import shutil

import pytest

from shardwise.config import ConfigError, ModelError, RLConfig, SFTConfig
from shardwise.engine.files.verified_files import read_sealed_json, write_sealed_json
from shardwise.recipes.checkpointing.fingerprints import fingerprints
from shardwise.recipes.checkpointing.manifest import Manifest, write_manifest
from shardwise.recipes.checkpointing.resume import Beginning, Start, find_start, write_run


def config(output_dir, **trainer) -> SFTConfig:
    tree = {
        "model": {"path": "m"},
        "data": {"train_files": "t.jsonl"},
        "trainer": {"output_dir": str(output_dir), **trainer},
    }
    return SFTConfig.parse(tree, origin="test")


def leave(run, step, *, begun_from=None, **trainer):
    """A whole checkpoint of a run."""
    folder = run / "checkpoints" / f"step_{step}"
    folder.mkdir(parents=True)
    parts = {"rows": {"num_rows": step}}
    write_run(folder, config(run, **trainer), step=step, parts=parts, files={}, begun_from=begun_from)
    write_manifest(folder, [{}], step=step)
    return folder


def test_auto_takes_the_newest_whole_one_by_number(tmp_path):
    for step in (9, 10, 100):
        leave(tmp_path, step)
    (tmp_path / "checkpoints" / "step_100" / "manifest.json").unlink()
    (tmp_path / "checkpoints" / "step_200" / "hf").mkdir(parents=True)
    assert find_start(config(tmp_path)) == Start(
        tmp_path / "checkpoints" / "step_10", 10, {"rows": {"num_rows": 10}}, True
    )


def test_without_a_checkpoint_or_with_never_a_run_starts_at_its_beginning(tmp_path):
    assert find_start(config(tmp_path / "empty")) is None
    leave(tmp_path, 3)
    assert find_start(config(tmp_path, resume="never")) is None


def test_a_run_or_a_checkpoint_can_be_named(tmp_path):
    run = tmp_path / "run"
    old, new = leave(run, 3), leave(run, 6)
    for path, found in ((run, new), (old, old), (new, new)):
        start = find_start(config(tmp_path / "other", resume=str(path)))
        assert (start.checkpoint, start.in_place) == (found, False)
    assert find_start(config(run, resume=str(old))).in_place


@pytest.mark.parametrize("inside", [True, False], ids=["of this run", "of another run"])
def test_the_command_that_names_a_path_goes_on_when_it_is_given_again(tmp_path, inside):
    """A scheduler starts it again, with the path in it. Checkpoints of what was in the folder before do not count."""
    run = tmp_path / "run"
    named = leave(run if inside else tmp_path / "other", 3)
    leave(run, 9)
    again = config(run, resume=str(named))
    start = find_start(again)
    beginning = Beginning(str(named), Manifest.read(named).save_id)
    assert (start.checkpoint, start.in_place, start.begun_from) == (named, inside, beginning)
    newest = leave(run, 6, begun_from=start.begun_from)
    start = find_start(again)
    assert (start.checkpoint, start.in_place, start.begun_from) == (newest, True, beginning)
    (run / "checkpoints" / "step_9").rename(run / "checkpoints" / "step_9.1")
    assert find_start(config(run)).begun_from == beginning, "a restart by the launcher hands it on"


@pytest.mark.parametrize("how", [shutil.copytree, shutil.move], ids=["copied", "renamed"])
@pytest.mark.parametrize("of_run", [False, True], ids=["checkpoint", "run"])
def test_a_copy_of_what_a_run_began_with_is_the_same_beginning(tmp_path, how, of_run):
    """Each job of a scheduler may bring it into a folder of its own; of a run's folder it may be an earlier one."""
    run, other = tmp_path / "run", tmp_path / "other"
    checkpoint = leave(other, 3)
    named, staged = (other, tmp_path / "staged") if of_run else (checkpoint, tmp_path / "staged" / "step_3")
    start = find_start(config(run, resume=str(named)))
    newest = leave(run, 6, begun_from=start.begun_from)
    if of_run:
        leave(other, 5)
    staged.parent.mkdir(exist_ok=True)
    how(named, staged)
    again = find_start(config(run, resume=str(staged)))
    assert (again.checkpoint, again.begun_from) == (newest, start.begun_from)
    elsewhere = leave(tmp_path / "third", 3)  # of the same step, and another save
    assert find_start(config(run, resume=str(elsewhere))).checkpoint == elsewhere


def test_a_run_of_an_early_version_goes_on_by_the_path_it_began_from_alone(tmp_path):
    run, named = tmp_path / "run", leave(tmp_path / "other", 3)
    newest = leave(run, 6, begun_from=Beginning(str(named), None))
    for folder, left_out in (
        (newest / "state" / "run.json", "begun_from_save_id"),
        (named / "manifest.json", "save_id"),
    ):
        content = read_sealed_json(folder)
        write_sealed_json(folder, {key: value for key, value in content.items() if key != left_out})
    start = find_start(config(run, resume=str(named)))
    assert (start.checkpoint, start.begun_from) == (newest, Beginning(str(named), None))
    copy = shutil.copytree(named, tmp_path / "step_3")
    start = find_start(config(run, resume=str(copy)))
    assert (start.checkpoint, start.begun_from) == (copy, Beginning(str(copy), None))


def test_a_path_without_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer.resume=.*nothing is neither a checkpoint with a training state"):
        find_start(config(tmp_path, resume=str(tmp_path / "nothing")))


def test_f26_another_config_is_named_with_both_values_and_the_ways_out(tmp_path):
    folder = leave(tmp_path, 3)
    anew = "or start a new run with trainer.resume=never, which moves what is in trainer.output_dir aside"
    assert conflict(config(tmp_path, seed=1)) == (
        f"{folder} was trained with another config: trainer.seed was 0 and is 1; give another trainer.output_dir, "
        f"set it back, allow it with trainer.resume_allow=[trainer.seed], {anew}"
    )
    assert conflict(config(tmp_path, seed=1, batch_size=8)) == (
        f"{folder} was trained with another config:\n"
        "  trainer.seed was 0 and is 1\n"
        "  trainer.batch_size was 32 and is 8\n"
        "give another trainer.output_dir, set them back, allow them with "
        f"trainer.resume_allow=[trainer.seed, trainer.batch_size], {anew}"
    )
    named = config(tmp_path / "other", seed=1, resume=str(folder))  # which another folder does not change
    assert "; set it back, allow it with trainer.resume_allow=[trainer.seed], or " in conflict(named)
    assert find_start(config(tmp_path, seed=1, batch_size=8, total_steps=9, resume_allow=["trainer"])).step == 3


def conflict(config) -> str:
    with pytest.raises(ConfigError) as error:
        find_start(config)
    return str(error.value)


def test_values_that_differ_are_told_as_they_are_typed(tmp_path):
    """An override with the value that is told gives that value again."""
    leave_changed(tmp_path, {})
    given = {
        "data": {"train_files": ["a, b.jsonl", "t.jsonl", "12"], "system_prompt": "be: kind\n", "shuffle": False},
        "engine": {"lora": {"rank": 2}},
        "trainer": {"learning_rate": 2.5e-7},
    }
    after = changed(tmp_path, given)
    told = dict(re.findall(r"^  (\S+) was .* and is (.*)$", conflict(after), re.MULTILINE))
    before = dict(re.findall(r"^  (\S+) was (.*) and is .*$", conflict(after), re.MULTILINE))
    assert before["data.system_prompt"] == before["engine.lora.rank"] == "null"
    assert (before["data.shuffle"], before["data.train_files"], told["data.shuffle"]) == ("true", "[t.jsonl]", "false")
    assert (told["data.train_files"], told["trainer.learning_rate"]) == ('["a, b.jsonl", t.jsonl, "12"]', "2.5e-07")
    again = SFTConfig.load(None, ["model.path=m", *(f"{key}={value}" for key, value in told.items())])
    assert again.model_copy(update={"trainer": after.trainer}) == after
    assert again.trainer.learning_rate == after.trainer.learning_rate


STATE_CHANGES = {
    "muon": ({}, {"trainer": {"optimizer": "muon"}}, "trainer.optimizer"),
    "bfloat16 masters": (
        {},
        {"engine": {"param_dtype": "bfloat16", "master_dtype": "bfloat16"}},
        "engine.master_dtype",
    ),
    "float16": ({}, {"engine": {"param_dtype": "float16"}}, "engine.param_dtype"),
    "full to lora": (
        {},
        {"engine": {"lora": {"rank": 2}}},
        "engine.lora.rank, engine.lora.target_modules, engine.lora.target_parameters, engine.lora.modules_to_save, "
        "engine.lora.use_dora",
    ),
    "rank": ({"engine": {"lora": {"rank": 2}}}, {"engine": {"lora": {"rank": 4}}}, "engine.lora.rank"),
    "frozen": ({}, {"engine": {"freeze_module_prefix": "model.layers.0"}}, "engine.freeze_module_prefix"),
}


def changed(output_dir, change) -> SFTConfig:
    tree = config(output_dir).model_dump(mode="json", exclude_defaults=True)
    return SFTConfig.parse({**tree, **change, "trainer": {**tree["trainer"], **change.get("trainer", {})}}, origin="t")


def leave_changed(run, change):
    folder = run / "checkpoints" / "step_3"
    folder.mkdir(parents=True)
    write_run(folder, changed(run, change), step=3, parts={}, files={})
    write_manifest(folder, [{}], step=3)
    return folder


@pytest.mark.parametrize("fallback", ["previous", "weights"])
@pytest.mark.parametrize("name", list(STATE_CHANGES))
def test_f26_a_change_that_no_state_survives_is_refused_without_the_offer_to_allow_it(tmp_path, name, fallback):
    before, after, keys = STATE_CHANGES[name]
    folder = leave_changed(tmp_path, before)
    after = {**after, "trainer": {**after.get("trainer", {}), "resume_fallback": fallback}}
    told = conflict(changed(tmp_path, after))
    them = "it" if "; its training state" in told else "them"
    state = f"its training state does not fit another {keys}: give another trainer.output_dir, set {them} back, "
    assert told.endswith(
        f"{state}or start a new run with trainer.resume=never, which moves what is in trainer.output_dir aside"
    )
    (folder / "hf").mkdir()
    begin = f"begin a run from its weights (model.path={folder / 'hf'} with another trainer.output_dir), or "
    assert f"{state}{begin}" in conflict(changed(tmp_path, after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"trainer": {"optimizer": "adamw_cpu"}}),
        ({}, {"engine": {"param_dtype": "bfloat16"}}),
        ({"engine": {"lora": {"rank": 2}}}, {"engine": {"lora": {"rank": 2, "quantize_base": "nf4"}}}),
        ({"engine": {"lora": {"rank": 2}}}, {"engine": {"lora": {"rank": 2, "alpha": 8.0}}}),
    ],
)
def test_a_change_that_the_state_survives_may_be_allowed(tmp_path, before, after):
    leave_changed(tmp_path, before)
    with pytest.raises(ConfigError, match=r"_dir, set (it|them) back, allow (it|them) with trainer\.resume_allow=\["):
        find_start(changed(tmp_path, after))


def test_f32_other_files_are_named_by_key_with_the_ways_out(tmp_path):
    for path, text in (("base/config.json", "{}"), ("base/model.safetensors", "weights"), ("t.jsonl", "rows")):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)

    def of(**trainer):
        tree = {
            "model": {"path": str(tmp_path / "base")},
            "data": {"train_files": str(tmp_path / "t.jsonl")},
            "trainer": {"output_dir": str(tmp_path / "run"), **trainer},
        }
        return SFTConfig.parse(tree, origin="test")

    folder = tmp_path / "run" / "checkpoints" / "step_3"
    folder.mkdir(parents=True)
    write_run(folder, of(), step=3, parts={}, files=fingerprints(of()))
    write_manifest(folder, [{}], step=3)
    assert find_start(of()).step == 3
    (tmp_path / "base" / "model.safetensors").write_text("Weights")
    (tmp_path / "t.jsonl").write_text("Rows")
    with pytest.raises(ConfigError) as error:
        find_start(of())
    assert str(error.value) == (
        f"{folder} was trained with other files: those of model.path (model.safetensors) and those of data.train_files "
        "(t.jsonl) have changed since; put them back, allow it with trainer.resume_allow=[model.path, "
        "data.train_files], or start a new run with trainer.resume=never, which moves what is in trainer.output_dir "
        "aside"
    )
    with pytest.raises(ConfigError, match=r"other files: those of data\.train_files \(t\.jsonl\) have"):
        find_start(of(resume_allow=["model"]))
    assert find_start(of(resume_allow=["model", "data.train_files"])).step == 3


def test_files_that_have_moved_need_no_permission_and_what_an_error_suggests_is_taken(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_text(name)

    def of(first, second, **trainer):
        teachers = [{"model": {"path": str(path)}, "data_source": path.name} for path in (first, second)]
        tree = {
            "model": {"path": "m"},
            "data": {"train_files": "t.jsonl"},
            "algorithm": {"advantage": "distill"},
            "teachers": teachers,
            "trainer": {"output_dir": str(tmp_path / "run"), **trainer},
        }
        return RLConfig.parse(tree, origin="test")

    before = of(tmp_path / "a", tmp_path / "b")
    folder = tmp_path / "run" / "checkpoints" / "step_3"
    folder.mkdir(parents=True)
    write_run(folder, before, step=3, parts={}, files=fingerprints(before))
    write_manifest(folder, [{}], step=3)
    (tmp_path / "elsewhere").mkdir()
    for name in ("a", "b"):
        (tmp_path / name).rename(tmp_path / "elsewhere" / name)
    moved = [tmp_path / "elsewhere" / name for name in ("a", "b")]
    assert find_start(of(*moved)).step == 3
    (moved[1] / "model.safetensors").write_text("trained")
    with pytest.raises(ConfigError) as error:
        find_start(of(*moved))
    suggestion = re.search(r"trainer\.resume_allow=\[([^]]+)\]", str(error.value))[1]
    assert find_start(of(*moved, resume_allow=suggestion.split(", "))).step == 3


def test_a_model_that_has_moved_is_the_same_to_a_checkpoint_that_recorded_no_image_processor(tmp_path):
    """As those of early versions: its files are compared, not its record of them."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").write_text("weights")

    def of(model):
        tree = config(tmp_path / "run").model_dump(mode="json", exclude_defaults=True)
        return SFTConfig.parse({**tree, "model": {"path": str(model)}}, origin="test")

    folder = tmp_path / "run" / "checkpoints" / "step_3"
    folder.mkdir(parents=True)
    write_run(folder, of(base), step=3, parts={}, files=fingerprints(of(base)))
    write_manifest(folder, [{}], step=3)
    (base / "preprocessor_config.json").write_text("{}")
    base.rename(tmp_path / "moved")
    assert find_start(of(tmp_path / "moved")).step == 3


def test_a_changed_run_file_is_damage(tmp_path):
    path = leave(tmp_path, 3) / "state" / "run.json"
    path.write_text(path.read_text().replace('"step": 3', '"step": 1'))
    with pytest.raises(ModelError, match=r"run.json is damaged: "):
        find_start(config(tmp_path))


class Reader:
    """Of checkpoints in which nothing but these states is damaged."""

    def __init__(self, damage):
        self.damage, self.seen = damage, []

    def verify(self, checkpoint):
        self.seen.append(("verify", checkpoint.name))

    def load(self, checkpoint):
        self.seen.append(("load", checkpoint.name))
        return self.damage.get(checkpoint.name, {})


def test_f19_states_whose_shards_are_lost_are_left_out_or_the_checkpoint_before_is_loaded(tmp_path):
    for step in (2, 3):
        leave(tmp_path, step)
    reader = Reader({"step_3": {"critic": "a shard of the critic is missing"}})
    start = find_start(config(tmp_path, resume_fallback="weights"), reader=reader)
    assert (start.step, start.damage, start.lost_states) == (3, [], reader.damage["step_3"])
    start = find_start(config(tmp_path), reader=reader)
    assert (start.step, start.damage, start.lost_states) == (2, ["a shard of the critic is missing"], {})
    assert reader.seen == [(call, f"step_{step}") for step in (3, 3, 2) for call in ("verify", "load")]
    with pytest.raises(ModelError, match=r"critic is missing; restore it .*\(trainer.resume_fallback=weights\)"):
        find_start(config(tmp_path, resume_fallback="fail"), reader=reader)


def test_no_engine_is_loaded_where_the_config_has_changed(tmp_path):
    leave(tmp_path, 3)
    reader = Reader({})
    with pytest.raises(ConfigError, match=r"trainer.seed was 0 and is 1"):
        find_start(config(tmp_path, seed=1), reader=reader)
    assert reader.seen == []


def test_a_damaged_model_is_not_taken_for_damaged_checkpoints(tmp_path, monkeypatch):
    for step in (2, 3):
        folder = leave(tmp_path, step)
        content = read_sealed_json(folder / "state" / "run.json")
        write_sealed_json(folder / "state" / "run.json", content | {"files": {"model.path": {}}})

    def fails(config):
        raise ModelError("model/model.safetensors cannot be read")

    monkeypatch.setattr("shardwise.recipes.checkpointing.resume.fingerprints", fails)
    with pytest.raises(ModelError, match=r"^model/model.safetensors cannot be read$"):
        find_start(config(tmp_path))


def test_steps_of_another_size_need_a_length_that_is_no_number_of_epochs(tmp_path):
    leave(tmp_path, 3, batch_size=8, num_epochs=1)
    other = {"batch_size": 4, "resume_allow": ["trainer.batch_size", "trainer.total_steps"]}
    with pytest.raises(
        ConfigError,
        match=r"^trainer\.batch_size was 8 in the 3 steps that are done and is 4, .*; set trainer\.total_steps to the "
        r"number of all steps of this one, those 3 included, and trainer\.resume_allow=\[trainer\.batch_size, ",
    ):
        find_start(config(tmp_path, num_epochs=1, **other))
    assert find_start(config(tmp_path, total_steps=9, **other)).step == 3
    assert find_start(config(tmp_path, num_epochs=1, batch_size=8)).step == 3

"""What happens to checkpoints that a disk, a process or a person damages. The numbers are those of the faults that the
project plans for."""

import json
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_run import config_of, run_steps

from shardwise.config import ModelError, UserError
from shardwise.recipes.checkpointing.resume import find_start
from shardwise.recipes.checkpointing.writer_lock import writer_lock
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.rank.worker import Worker

NEWEST = Path("checkpoints", "step_4")


def names(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


def digests(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stop_at_5(step, _worker, _run):
    if step == 5:
        raise UserError("killed")


@pytest.fixture
def disk(tmp_path):
    """A file system of 8 MiB that a test may fill. Skips where mounting one is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="module")
def stopped(run_ranks, model_folder, tmp_path_factory) -> Path:
    """A run of two ranks that ended in step 5, with checkpoints of steps 2 and 4. Nobody may change it."""
    folder = tmp_path_factory.mktemp("faults") / "run"
    ended = run_ranks(run_steps, 2, str(folder), str(model_folder), stop_at_5)
    assert ended == [([1, 2, 3, 4, 5], "UserError: killed", ""), None]
    assert names(folder) == {"step_2", "step_4", "latest"}
    return folder


@pytest.fixture
def run(stopped, tmp_path) -> Path:
    return shutil.copytree(stopped, tmp_path / "run")


class Reader:
    """Brings a new engine to checkpoints, as a run does, on ranks that all call it."""

    def __init__(self, config):
        self._worker = Worker(torch.device("cpu"))
        source = EngineSource(model=config.model, layout=config.engine)
        self._worker.build_engine(
            "policy", source.model_dump_json(), config.trainer.optimizer_config().model_dump_json()
        )

    def verify(self, checkpoint):
        if damage := self._worker.verify_files(str(checkpoint)):
            raise ModelError(damage)

    def load(self, checkpoint):
        damage = self._worker.load_state("policy", str(checkpoint / "state" / "policy"))
        return {"policy": damage} if damage else {}


def start_of(run, model, **trainer):
    """On every rank: the step that is done, or the error; and what was passed over."""
    config = config_of(run, model, **trainer)
    try:
        start = find_start(config, reader=Reader(config))
    except UserError as error:
        return f"{type(error).__name__}: {error}", []
    return (0, []) if start is None else (start.step, start.damage)


def starts_with(run, model, contents):
    """What a start finds with each content of a file in place of the right one; None deletes it."""
    found = []
    for name, content in contents:
        path = Path(run) / NEWEST / name
        whole = path.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            path.unlink() if content is None else path.write_bytes(content)
        dist.barrier()
        found.append(start_of(run, model))
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(whole)
        dist.barrier()
    return found, start_of(run, model)


def assert_each_falls_back(run_ranks, world_size, run, model, contents):
    """To step 2, on every rank, and says which file it was. Returns what it says."""
    first, *others = run_ranks(starts_with, world_size, str(run), str(model), contents)
    found, repaired = first
    assert all(other == first for other in others)
    assert repaired == (4, [])
    for (name, _), (step, damage) in zip(contents, found, strict=True):
        assert step == 2, name
        assert len(damage) == 1
        assert str(run / NEWEST / name) in damage[0]
    return [damage for _, (damage,) in found]


def files_of(run: Path) -> dict[str, bytes]:
    files = digests(run / NEWEST)
    assert files.keys() >= {
        *("manifest.json", "hf/config.json", "hf/model.safetensors", "hf/tokenizer.json", "state/run.json"),
        *("state/policy/index.json", "state/policy/rank_0.safetensors", "state/policy/rank_1.safetensors"),
    }
    return files


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.full), 2])
def test_f17_a_file_that_was_cut_anywhere_is_named_and_the_checkpoint_before_is_taken(
    run_ranks, run, model_folder, world_size
):
    contents = [
        (name, whole[:length])
        for name, whole in files_of(run).items()
        for length in sorted({0, 1, len(whole) // 2, len(whole) - 1})
    ]
    assert_each_falls_back(run_ranks, world_size, run, model_folder, contents)


def flipped(whole: bytes, place: int, bit: int) -> bytes:
    return whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :]


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.full), 2])
def test_f18_a_flipped_bit_in_any_file_is_found(run_ranks, run, model_folder, world_size):
    contents = [
        (name, flipped(whole, place, bit))
        for name, whole in files_of(run).items()
        for place, bit in ((0, 0), (len(whole) // 3, 5), (len(whole) // 2, 7), (len(whole) - 1, 1))
    ]
    assert_each_falls_back(run_ranks, world_size, run, model_folder, contents)


@pytest.mark.parametrize(
    ("file", "groups"),
    [
        ("state/policy/rank_0.safetensors", {"master/model", "exp_avg/model", "exp_avg_sq/model", "step/model"}),
        ("hf/model.safetensors", {"model"}),
    ],
)
def test_f18_a_flipped_bit_in_tensors_is_named_with_the_tensor_or_the_header(
    run_ranks, run, model_folder, file, groups
):
    whole = (run / NEWEST / file).read_bytes()
    data_start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:data_start])
    header.pop("__metadata__", None)
    assert {name.partition(".")[0] for name in header} == groups
    places = []
    for number, (name, entry) in enumerate(header.items()):
        start, end = (data_start + offset for offset in entry["data_offsets"])
        place = (start, (start + end) // 2, end - 1)[number % 3]
        places.append((place, f"{name} is not what was written"))
    places += [(place, "its header") for place in range(0, data_start, max(1, data_start // 20))]
    contents = [(file, flipped(whole, place, place % 8)) for place, _ in places]
    said = assert_each_falls_back(run_ranks, 1, run, model_folder, contents)
    for (place, expected), damage in zip(places, said, strict=True):
        assert f"{file} is damaged: {expected}" in damage, place


@pytest.mark.parametrize("world_size", [1, 2])
def test_f19_a_missing_file_is_named_and_the_checkpoint_before_is_taken(run_ranks, run, model_folder, world_size):
    contents = [(name, None) for name in files_of(run)]
    said = assert_each_falls_back(run_ranks, world_size, run, model_folder, contents)
    assert all(damage.endswith("is missing") for damage in said)


def lost_shard(run, model):
    """What a start finds under every policy; then where the weights are damaged too."""
    found = [
        start_of(run, model),
        start_of(run, model, resume_fallback="fail"),
        start_of(run, model, resume=str(Path(run) / NEWEST)),
        start_of(run, model, resume_fallback="weights"),
        start_of(run, model, resume=str(Path(run) / NEWEST), resume_fallback="weights"),
    ]
    dist.barrier()
    (Path(run) / NEWEST / "hf" / "config.json").unlink(missing_ok=True)
    dist.barrier()
    return [
        *found,
        start_of(run, model, resume_fallback="weights"),
        start_of(run, model, resume=str(Path(run) / NEWEST), resume_fallback="weights"),
    ]


def test_f19_a_missing_shard_is_refused_unless_weights_alone_are_allowed_to_go_on(run_ranks, run, model_folder):
    (run / NEWEST / "state" / "policy" / "rank_1.safetensors").unlink()
    found, other = run_ranks(lost_shard, 2, str(run), str(model_folder))
    assert found == other
    previous, fail, named, weights, named_weights, neither, named_neither = found
    missing = f"{run / NEWEST / 'state' / 'policy' / 'rank_1.safetensors'} is missing"
    assert previous[0] == 2
    for error, _ in (fail, named):
        assert missing in error
        assert error.endswith(
            ", or resume from its weights with optimizer states that begin anew (trainer.resume_fallback=weights)"
        )
    assert weights == named_weights == (4, [])
    assert neither[0] == 2
    assert "hf/config.json is missing; restore it from a copy" in named_neither[0]
    assert "trainer.resume_fallback" not in named_neither[0]


def test_f19_a_run_goes_on_from_weights_alone_and_says_so(run_ranks, run, model_folder, tmp_path):
    """Its next step meets the same weights, rounded as they are computed with anyway, and updates them otherwise."""
    whole = shutil.copytree(run, tmp_path / "whole")
    lost = run / NEWEST / "state" / "policy" / "rank_1.safetensors"
    lost.unlink()
    policy = {"resume_fallback": "weights"}
    (steps, error, said), _ = run_ranks(partial(run_steps, **policy), 2, str(run), str(model_folder))
    assert (steps, error) == ([5, 6], None)
    assert re.fullmatch(
        rf"warning: (rank [01]: )?{lost} is missing; policy resumes from the weights of {run / NEWEST} without the "
        r"optimizer's states, which begin anew \(trainer\.resume_fallback=weights\)\n",
        said,
    )
    assert run_ranks(run_steps, 2, str(whole), str(model_folder))[0] == ([5, 6], None, "")
    rows, others = (
        [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()] for one in (run, whole)
    )
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[4]["train/loss"] == others[4]["train/loss"]
    assert rows[5]["train/loss"] != others[5]["train/loss"]
    assert start_of_alone(run_ranks, run, model_folder) == (6, [])


def start_of_alone(run_ranks, run, model):
    [found] = run_ranks(start_of, 1, str(run), str(model))
    return found


def test_f19_a_run_may_begin_with_the_weights_of_checkpoints_that_lost_their_states(run_ranks, run, model_folder):
    for folder in (run / "checkpoints").glob("step_*"):
        shutil.rmtree(folder / "state")
    [(error, _)] = run_ranks(start_of, 1, str(run), str(model_folder))
    (advised,) = re.findall(r"begin a run without the optimizer's states: model\.path=(\S+), which is whole", error)
    assert advised == str(run / NEWEST / "hf")
    [(steps, failure, _)] = run_ranks(run_steps, 1, str(run.parent / "anew"), advised)
    assert (steps, failure) == ([1, 2, 3, 4, 5, 6], None)


def policies(run, model):
    """A damaged newest checkpoint under every policy, then none that is whole."""
    shutil.rmtree(Path(run) / NEWEST / "state")
    found = [
        start_of(run, model),
        start_of(run, model, resume_fallback="fail"),
        start_of(run, model, resume=str(Path(run) / NEWEST)),
        start_of(run, model, resume=str(run)),
    ]
    (Path(run) / "checkpoints" / "step_2" / "hf" / "config.json").unlink()
    return [*found, start_of(run, model), start_of(run, model, resume="never")]


def test_a_named_checkpoint_and_the_policy_fail_never_fall_back_and_no_run_starts_anew_by_itself(
    run_ranks, run, model_folder
):
    [(previous, fail, path, folder, none_whole, anew)] = run_ranks(policies, 1, str(run), str(model_folder))
    missing = f"{run / NEWEST / 'state' / 'run.json'} is missing"
    assert previous == (2, [missing])
    for error, _ in (fail, path, folder):
        assert error.startswith(f"ModelError: {missing}; restore it from a copy, or resume from another checkpoint")
    assert none_whole[0] == (
        f"ModelError: {missing}; {run / 'checkpoints' / 'step_2' / 'hf' / 'config.json'} is missing. No checkpoint to "
        "resume from is whole: restore one from a copy, or start anew with trainer.resume=never, which moves what is "
        "there aside, or begin a run without the optimizer's states: "
        f"model.path={run / NEWEST / 'hf'}, which is whole, with another trainer.output_dir"
    )
    assert anew == (0, [])


@pytest.mark.parametrize("content", ["", "step_2\n", "step_999\n", "../../../etc\n", "\0\xff", None])
def test_f27_what_latest_says_changes_nothing(run, model_folder, content):
    latest = run / "checkpoints" / "latest"
    assert latest.read_text() == "step_4\n"
    latest.unlink()
    if content is not None:
        latest.write_text(content)
    assert find_start(config_of(run, model_folder)).step == 4
    latest.unlink(missing_ok=True)
    latest.symlink_to("/nonexistent")
    assert find_start(config_of(run, model_folder)).step == 4


def test_a_run_goes_on_from_the_checkpoint_before_and_keeps_the_damaged_one_aside(run_ranks, run, model_folder):
    """Its logs are cut to that step, and `latest` names it until the next save."""
    damaged = run / NEWEST / "state" / "policy" / "rank_0.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(flipped(whole, len(whole) // 2, 0))
    (run / "checkpoints" / "latest").write_text("nonsense")
    (steps, error, said), _ = run_ranks(run_steps, 2, str(run), str(model_folder), note_latest)
    assert (steps, error) == ([3, 4, 5, 6], None)
    assert re.fullmatch(rf"warning: rank [01]: {damaged} is damaged: .*that checkpoint is passed over, and .*\n", said)
    assert names(run) == {"step_2", "step_4", "step_4.1", "step_6", "latest"}
    assert (run / "step 3").read_text() == "step_2\n"
    assert (run / "checkpoints" / "latest").read_text() == "step_6\n"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def note_latest(step, _worker, run):
    if step == 3:
        (run.output_dir / "step 3").write_text((run.output_dir / "checkpoints" / "latest").read_text())


def test_f23_a_second_run_in_the_folder_is_refused_and_touches_nothing(run_ranks, run, model_folder):
    with writer_lock(run):
        before = digests(run)
        [(steps, error, _)] = run_ranks(run_steps, 1, str(run), str(model_folder))
        assert digests(run) == before
    assert steps == []
    assert error.startswith(f"ConfigError: trainer.output_dir={run} is written to by process ")


def poison(step, worker, _run):
    """A moment of the optimizer becomes infinite after step 4."""
    if step == 4:
        tensors = worker.engines["policy"].engine._optimizer.named_tensors()
        tensors["exp_avg/model.norm.weight"].to_local()[0] = torch.inf


@pytest.mark.parametrize("world_size", [1, 2])
def test_f29_what_is_not_finite_is_never_published_and_the_run_stops(run_ranks, model_folder, tmp_path, world_size):
    steps, error, _ = run_ranks(run_steps, world_size, str(tmp_path), str(model_folder), poison)[0]
    assert steps in ([1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]), "told at the next step, or at the next save"
    expected = "exp_avg/model.norm.weight of the policy hold NaN or infinities"
    assert error.startswith(f"NotFiniteError: the checkpoint of step 4 was not saved: {expected}")
    assert names(tmp_path) == {"step_2", "latest"}
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_2\n"


def remount(mounted, options):
    subprocess.run(["mount", "-o", f"remount,{options}", str(mounted)], check=True)


def allow_files(disk, number):
    """Leaves room for so many further files and folders, and for any number of bytes."""
    found = os.statvfs(disk)
    remount(disk, f"nr_inodes={found.f_files - found.f_ffree + number}")


NUM_FILES = 14
"""And folders of a checkpoint, while it is written, at most."""


def small_disk(step, _worker, run):
    """For the checkpoint of step 2 there is room for no file, for each later one for one more."""
    run._saver.wait()
    allow_files(run.output_dir.parent, 1000 if step == 1 or step > NUM_FILES + 1 else step - 2)


@pytest.mark.parametrize(("world_size", "async_save"), [(1, False), (2, False), (2, True)])
def test_f20_trap_17_a_disk_that_is_full_at_any_point_of_a_save_leaves_the_older_checkpoints_and_the_run_goes_on(
    run_ranks, model_folder, disk, world_size, async_save
):
    run = disk / "run"
    policy = {"on_save_error": "continue", "save_every_steps": 1, "async_save": async_save}
    policy["total_steps"] = NUM_FILES + 3
    ended = run_ranks(partial(run_steps, **policy), world_size, str(run), str(model_folder), small_disk)
    steps, error, said = ended[0]
    assert (steps, error) == (list(range(1, NUM_FILES + 4)), None)
    saved = {int(name.removeprefix("step_")) for name in names(run) - {"latest"}}
    failed = sorted(set(steps) - saved)
    assert failed == list(range(2, failed[-1] + 1))
    assert NUM_FILES - 3 <= len(failed) <= NUM_FILES
    for step in failed:
        assert re.search(rf"warning: the checkpoint of step {step} was not saved: .*No space left on device", said)
    assert names(run) == {*(f"step_{step}" for step in saved), "latest"}
    counts = [json.loads(line).get("save/failures") for line in (run / "performance.jsonl").read_text().splitlines()]
    assert counts[:4] == [None, None, 1, 2]
    assert counts[-1] == len(failed)
    assert find_start(config_of(run, model_folder)).step == steps[-1]


def fill(step, _worker, run):
    """Takes all but 50 KB after step 3."""
    if step == 3:
        filler = run.output_dir.parent / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(filler.parent).free - 50_000))


def test_f20_too_little_space_is_found_before_a_byte_is_written(run_ranks, model_folder, disk):
    run = disk / "run"
    [(steps, error, _)] = run_ranks(run_steps, 1, str(run), str(model_folder), fill)
    assert steps == [1, 2, 3, 4]
    size = sum(path.stat().st_size for path in (run / "checkpoints" / "step_2").rglob("*") if path.is_file())
    expected = rf"the checkpoint of step 4 was not saved: a checkpoint in {run} takes about {size} bytes, and (\d+) are"
    assert 0 < int(re.match(f"ExportError: {expected} free there", error)[1]) <= 50_000
    assert names(run) == {"step_2", "latest"}


def read_only(step, _worker, run):
    """After step 3 the disk of the checkpoints takes no more writes."""
    if step == 1:
        (run.output_dir / "checkpoints").mkdir()
        disk = run.output_dir.parent / "disk"
        subprocess.run(["mount", "--bind", str(disk), str(run.output_dir / "checkpoints")], check=True)
    if step == 3:
        remount(run.output_dir / "checkpoints", "bind,ro")


def test_f21_a_read_only_disk_ends_the_run_with_its_name_and_the_checkpoints_stay(run_ranks, model_folder, disk):
    run = disk.parent / "run"
    try:
        policy = {"on_save_error": "continue"}
        [(steps, error, _)] = run_ranks(partial(run_steps, **policy), 1, str(run), str(model_folder), read_only)
        assert steps == [1, 2, 3, 4, 5, 6]
        assert error.startswith("ExportError: all steps are done, but the checkpoint of step 6 was not saved: ")
        assert "Read-only file system" in error
        assert names(run) == {"step_2", "latest"}
        assert find_start(config_of(run, model_folder)).step == 2
    finally:
        subprocess.run(["umount", str(run / "checkpoints")], check=True)

import errno
import json
import os
import resource
from contextlib import contextmanager

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardwise.observability import RunLog, SampleLog, move_aside, sinks


def test_run_log_writes_exactly_these_bytes(tmp_path):
    with RunLog(tmp_path / "a" / "run", tensorboard=False) as log:
        log.log(1, {"train/loss": 1.25, "reward/mean": 0.1}, {"seconds/train": 0.5})
        log.log(2, {"loss": float("nan"), "grad_norm": float("inf")}, {})
    assert (tmp_path / "a/run/metrics.jsonl").read_bytes() == (
        b'{"step": 1, "reward/mean": 0.1, "train/loss": 1.25}\n{"step": 2, "grad_norm": null, "loss": null}\n'
    )
    assert (tmp_path / "a/run/performance.jsonl").read_bytes() == b'{"step": 1, "seconds/train": 0.5}\n'
    assert sorted(os.listdir(tmp_path / "a/run")) == ["metrics.jsonl", "performance.jsonl"]


def test_metrics_do_not_depend_on_timings_or_on_the_order_of_names(tmp_path):
    for name, metrics, seconds in (("a", {"x": 1.0, "y": 2.0}, 0.1), ("b", {"y": 2.0, "x": 1.0}, 0.2)):
        with RunLog(tmp_path / name, tensorboard=False) as log:
            log.log(1, metrics, {"seconds/train": seconds})
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()


def test_lines_are_on_disk_as_soon_as_they_are_logged(tmp_path):
    with RunLog(tmp_path, tensorboard=False) as log, SampleLog(tmp_path) as samples:
        log.log(1, {"x": 1.0}, {"seconds/train": 2.0})
        samples.append([{"prompt": "2+3="}])
        assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "x": 1.0}\n'
        assert (tmp_path / "performance.jsonl").read_text() == '{"step": 1, "seconds/train": 2.0}\n'
        assert (tmp_path / "samples.jsonl").read_text() == '{"prompt": "2+3="}\n'


def test_files_of_earlier_runs_are_moved_aside_and_kept(tmp_path):
    for run in range(3):
        with RunLog(tmp_path, tensorboard=False) as log, SampleLog(tmp_path) as samples:
            log.log(1, {"run": float(run)}, {})
            samples.append([{"run": run}])
    found = {name: (tmp_path / name).read_text() for name in os.listdir(tmp_path) if "performance" not in name}
    assert found == {
        **{f"metrics.jsonl{end}": f'{{"step": 1, "run": {n}}}\n' for n, end in ((0.0, ".1"), (1.0, ".2"), (2.0, ""))},
        **{f"samples.jsonl{end}": f'{{"run": {n}}}\n' for n, end in ((0, ".1"), (1, ".2"), (2, ""))},
    }


def test_what_a_run_leaves_that_ended_before_its_first_step_is_not_kept(tmp_path):
    for _ in range(2):
        with RunLog(tmp_path, tensorboard=False), SampleLog(tmp_path):
            pass
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "performance.jsonl", "samples.jsonl"]


def test_a_link_to_an_empty_folder_stays_and_another_one_is_moved_aside(tmp_path):
    """Checkpoints on another disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    link = tmp_path / "checkpoints"
    link.symlink_to(disk)
    move_aside(link)
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "disk"], "an empty one is as good as a new one"
    (disk / "step_1").mkdir()
    move_aside(link)
    assert not link.exists()
    assert os.listdir(tmp_path / "checkpoints.1") == os.listdir(disk) == ["step_1"]


def test_tensorboard_gets_metrics_and_performance_of_this_run_only(tmp_path):
    for value in (5.0, 0.5):
        with RunLog(tmp_path, tensorboard=True) as log:
            log.log(3, {"train/loss": value}, {"seconds/train": 2 * value})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    read = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert read == {"train/loss": [(3, 0.5)], "seconds/train": [(3, 1.0)]}
    assert (tmp_path / "tensorboard.1").is_dir()


def test_sample_rows_keep_their_keys_in_order_and_their_text_readable(tmp_path):
    row = {"step": 1, "prompt": "wie groß?\n", "reward": 1.0, "parts": {"acc": float("nan")}, "logprobs": [-0.5, -1.0]}
    with SampleLog(tmp_path) as samples:
        samples.append([row, {"step": 2}])
        samples.append([])
        samples.append([{"step": 3, "failure": "bad \ud800"}])
    assert (tmp_path / "samples.jsonl").read_text(encoding="utf-8") == (
        '{"step": 1, "prompt": "wie groß?\\n", "reward": 1.0, "parts": {"acc": null}, "logprobs": [-0.5, -1.0]}\n'
        '{"step": 2}\n'
        '{"step": 3, "failure": "bad ?"}\n'
    )


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("torn", ["", '{"step": 4, "train/lo', '{"step": 4}\nnull\n', "\0\0\0\0\n"])
def test_files_of_a_run_that_goes_on_are_cut_after_its_last_step_and_continued(tmp_path, torn):
    with RunLog(tmp_path, tensorboard=False) as log, SampleLog(tmp_path) as samples:
        for step in (1, 2, 3):
            log.log(step, {"train/loss": float(step)}, {"seconds/train": 1.0})
            samples.append([{"step": step, "reward": 0.0}, {"step": step, "reward": 1.0}])
    names = ("metrics.jsonl", "performance.jsonl", "samples.jsonl")
    for name in names:
        with (tmp_path / name).open("a") as file:
            file.write(torn)
    with RunLog(tmp_path, tensorboard=False, last_step=2) as log, SampleLog(tmp_path, last_step=2) as samples:
        log.log(3, {"train/loss": 30.0}, {"seconds/train": 2.0})
        samples.append([{"step": 3, "reward": 5.0}])
    assert [(row["step"], row["train/loss"]) for row in rows_of(tmp_path / names[0])] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [(row["step"], row["seconds/train"]) for row in rows_of(tmp_path / names[1])] == [(1, 1), (2, 1), (3, 2)]
    assert [row["step"] for row in rows_of(tmp_path / names[2])] == [1, 1, 2, 2, 3]
    assert {path.name for path in tmp_path.iterdir()} == set(names)


def test_a_line_that_cannot_be_read_costs_none_of_those_after_it(tmp_path):
    lines = [b'{"step": 1}\n', b'{"step": 2, "tra\n', b"\0" * 30 + b"\n", b'{"step": 4}\n']
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([*lines, b'{"step": 5}\n', b'{"step": 6, "t']))
    with RunLog(tmp_path, tensorboard=False, last_step=4):
        assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(lines)


ROWS = [(1, "a", 200_000), (1, "b", 9), (2, "c", 9), (2, "d", 300_000), (3, "e", 9), (3, "f", 100_000)]
"""Step, letter and length of a row's text."""


def test_a_run_killed_at_any_byte_goes_on_with_whole_lines_each_of_them_once(tmp_path):
    """Whether the length of the file up to its last step is known or not; some lines are longer than a block."""
    lines = [f'{{"step": {step}, "text": "{letter * size}"}}\n' for step, letter, size in ROWS]
    up_to_2 = sum(len(line) for line, (step, _, _) in zip(lines, ROWS, strict=True) if step <= 2)
    written, path = "".join(lines).encode(), tmp_path / "samples.jsonl"
    ends = [len("".join(lines[:count])) for count in range(len(lines) + 1)]
    for num_bytes in sorted({min(max(0, end + by), ends[-1]) for end in ends for by in (-70_000, -2, -1, 0, 1, 2)}):
        expected = max(end for end in ends if end <= min(num_bytes, up_to_2))
        for lengths in ({}, {path.name: up_to_2}):
            path.write_bytes(written[:num_bytes])
            with SampleLog(tmp_path, last_step=2, lengths=lengths):
                assert path.read_bytes() == written[:expected], (num_bytes, lengths)


def test_of_a_file_that_has_all_of_its_lines_only_what_comes_after_them_is_read(tmp_path, monkeypatch):
    lines = [f'{{"step": {step}}}\n' for step in range(1, 101)]
    (tmp_path / "samples.jsonl").write_text("".join(lines))
    parsed, step_of = [], sinks._step_of
    monkeypatch.setattr(sinks, "_step_of", lambda line: parsed.append(line.decode()) or step_of(line))
    with SampleLog(tmp_path, last_step=98, lengths={"samples.jsonl": len("".join(lines[:98]))}):
        assert (tmp_path / "samples.jsonl").read_text() == "".join(lines[:98])
    assert parsed == lines[97:99]


@pytest.mark.parametrize("second", ['{"step": 9}\n', '{"step":  2\n'])
def test_a_file_of_the_known_length_with_other_lines_is_read_whole(tmp_path, second):
    """Such as those of a run that went on from an earlier step, or a damaged one."""
    first, third = '{"step": 1}\n', '{"step": 9}\n'
    (tmp_path / "samples.jsonl").write_text(first + second + third)
    with SampleLog(tmp_path, last_step=2, lengths={"samples.jsonl": len(first + second)}):
        assert (tmp_path / "samples.jsonl").read_text() == first


def test_files_that_are_gone_begin_anew(tmp_path):
    with RunLog(tmp_path, tensorboard=False, last_step=2) as log:
        log.log(3, {"train/loss": 1.0}, {})
    assert rows_of(tmp_path / "metrics.jsonl") == [{"step": 3, "train/loss": 1.0}]


@pytest.mark.parametrize("damage", ["none", "cut", "gone", "longer"])
def test_rows_that_a_continued_file_has_lost_are_told(tmp_path, capsys, damage):
    """Those of the last step, which is cut off anyway, are not missed."""
    with RunLog(tmp_path, tensorboard=False) as log, SampleLog(tmp_path) as samples:
        for step in (1, 2, 3):
            if step == 3:
                lengths = {file.name: file.num_bytes for file in (*log.files, *samples.files)}
            log.log(step, {"train/loss": float(step)}, {"seconds/train": 1.0})
            samples.append([{"step": step, "reward": 0.0}])
        for file in (*log.files, *samples.files):
            file.sync()
    metrics, samples_file = tmp_path / "metrics.jsonl", tmp_path / "samples.jsonl"
    second = metrics.read_bytes().splitlines(keepends=True)[1]
    if damage == "cut":
        metrics.write_bytes(metrics.read_bytes().replace(second, b""))
    elif damage == "gone":
        samples_file.unlink()
    elif damage == "longer":
        metrics.write_bytes(b'{"step": 0, "mine": 1}\n' + metrics.read_bytes())
    options = {"last_step": 2, "lengths": lengths}
    with RunLog(tmp_path, tensorboard=False, **options), SampleLog(tmp_path, **options):
        pass
    warnings = capsys.readouterr().err.splitlines()
    lost = {"cut": f"{metrics} lacks {len(second)} bytes", "gone": f"{samples_file} lacks {lengths['samples.jsonl']} b"}
    assert len(warnings) == (damage in lost)
    assert lost.get(damage, "") in "".join(warnings)


def test_tensorboard_forgets_what_came_after_the_last_step(tmp_path):
    for last_step, steps in ((None, (1, 2, 3)), (1, (2,))):
        with RunLog(tmp_path, tensorboard=True, last_step=last_step) as log:
            for step in steps:
                log.log(step, {"train/loss": 10.0 * step if last_step else float(step)}, {})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 20.0)]


@contextmanager
def room_for(num_bytes):
    """The disk takes that much of each file: a write ends in the middle of a line, the next one fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_f20_lines_that_a_full_disk_does_not_take_wait_and_none_is_lost_or_doubled(tmp_path, capsys):
    with RunLog(tmp_path, tensorboard=False, keeps_lines=True) as log:
        log.log(1, {"a": 1.0}, {"s": 1.0})
        with room_for(30):
            for step in (2, 3):
                log.log(step, {"a": float(step)}, {"s": 0.5})
            assert len((tmp_path / "metrics.jsonl").read_bytes()) == 30
        log.log(4, {"a": 4.0}, {"s": 0.5})
        assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [1, 2, 3, 4]
    assert [json.loads(line)["step"] for line in (tmp_path / "performance.jsonl").open()] == [1, 2, 3, 4]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert f"warning: {tmp_path}/metrics.jsonl cannot be written ([Errno 27] File too large); what comes is" in lines[0]


def test_events_that_a_full_disk_does_not_take_wait_like_lines(tmp_path, capsys):
    with RunLog(tmp_path, tensorboard=True, keeps_lines=True) as log:
        log.log(1, {"train/loss": 1.0}, {"seconds/train": 0.5})
        with room_for(100):
            for step in range(2, 40):
                log.log(step, {"train/loss": float(step)}, {"seconds/train": 0.5})
        log.log(40, {"train/loss": 40.0}, {"seconds/train": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(n, n) for n in range(1, 41)]
    told = capsys.readouterr().err
    assert told.count("File too large") == told.count("warning: ") == 3, told
    (events_file,) = (tmp_path / "tensorboard").iterdir()
    assert f"warning: {events_file} cannot be written" in told


def test_events_that_cannot_be_written_are_an_error_where_lines_are_not_kept(tmp_path):
    with RunLog(tmp_path, tensorboard=True) as log:
        log.log(1, {}, {"seconds/train": 0.5})
        (events_file,) = (tmp_path / "tensorboard").iterdir()
        with room_for(events_file.stat().st_size), pytest.raises(OSError, match="File too large"):
            log.log(2, {}, {"s": 0.5})


def test_lines_of_a_file_that_is_not_there_any_more_are_not_lost_in_silence(tmp_path, capsys):
    """What is written to a file that was removed or moved, as by a log rotator, nobody reads again."""
    with RunLog(tmp_path / "a", tensorboard=False) as log:
        log.log(1, {"train/loss": 1.0}, {})
        (tmp_path / "a" / "metrics.jsonl").rename(tmp_path / "moved")
        with pytest.raises(FileNotFoundError, match=r"was removed or moved while the run wrote it: .*metrics\.jsonl"):
            log.log(2, {"train/loss": 2.0}, {})
        (tmp_path / "moved").rename(tmp_path / "a" / "metrics.jsonl")
    with RunLog(tmp_path / "b", tensorboard=False, keeps_lines=True) as log:
        log.log(1, {"train/loss": 1.0}, {})
        (tmp_path / "b" / "metrics.jsonl").rename(tmp_path / "moved")
        log.log(2, {"train/loss": 2.0}, {})
        assert "metrics.jsonl cannot be written ([Errno 2] it was removed or moved" in capsys.readouterr().err
        (tmp_path / "moved").rename(tmp_path / "b" / "metrics.jsonl")
    for name in "ab":
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == [1, 2]


def test_a_log_that_does_not_get_to_the_disk_is_named(tmp_path, monkeypatch):
    def fail(_descriptor):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with RunLog(tmp_path, tensorboard=False) as log:
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match=rf"Disk quota exceeded: '{tmp_path}/metrics.jsonl'"):
            log.files[0].sync()


def test_lines_that_wait_count_as_bytes_of_a_log(tmp_path, capsys):
    with RunLog(tmp_path, tensorboard=False, keeps_lines=True) as log, room_for(20):
        log.log(1, {"a": 1.0}, {})
        log.log(2, {"a": 2.0}, {})
        assert (tmp_path / "metrics.jsonl").stat().st_size == 20
        num_bytes = log.files[0].num_bytes
    assert (tmp_path / "metrics.jsonl").stat().st_size == num_bytes > 20


def test_f20_a_full_disk_is_an_error_where_lines_are_not_kept_or_never_written(tmp_path, capsys):
    with room_for(30), pytest.raises(OSError, match="File too large"), RunLog(tmp_path, tensorboard=False) as log:
        log.log(1, {"a": 1.0, "b": 1.0}, {})
    samples = SampleLog(tmp_path, keeps_lines=True)
    with room_for(5):
        samples.append([{"step": 1}])
        with pytest.raises(OSError, match="File too large"):
            samples.close()

import time

import pytest

from shardwise.config import ExportError, NotFiniteError, TrainerConfig
from shardwise.recipes.checkpointing.save_retries import SaveRetries


class Disk:
    """Fails as often as it is told to."""

    def __init__(self, *failures):
        self._failures, self.num_attempts = list(failures), 0

    def save(self):
        self.num_attempts += 1
        if self._failures:
            raise self._failures.pop(0)


FULL = ExportError("/disk cannot be written: No space left on device")
NOT_FINITE = NotFiniteError("w holds NaN")


def retries(**keys) -> SaveRetries:
    return SaveRetries(TrainerConfig.parse(keys, origin="test"))


def save(saving, disk):
    with saving.tolerate():
        saving.retry(4, disk.save)
        saving.note_saved()


@pytest.fixture
def pauses(monkeypatch):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


def test_a_save_is_tried_again_and_each_pause_is_longer(pauses, capsys):
    disk, saving = Disk(FULL, FULL, FULL), retries(save_retries=3)
    save(saving, disk)
    assert (disk.num_attempts, pauses, saving.num_failures) == (4, [1.0, 2.0, 4.0], 0)
    assert capsys.readouterr().err.count("No space left on device. Trying again") == 3
    saving.require_last_saved()


@pytest.mark.parametrize(("failure", "num_attempts"), [(FULL, 2), (NOT_FINITE, 1)])
def test_stop_raises_what_the_last_attempt_did_and_tries_no_nan_twice(pauses, failure, num_attempts):
    disk = Disk(*[failure] * 9)
    with pytest.raises(type(failure), match=f"^the checkpoint of step 4 was not saved: {failure}$"):
        save(retries(), disk)
    assert disk.num_attempts == num_attempts


def test_continue_counts_the_failure_and_a_later_save_makes_up_for_it(capsys):
    disk, saving = Disk(FULL, NOT_FINITE), retries(on_save_error="continue", save_retries=0)
    for number, expected in ((1, "No space left"), (2, "w holds NaN")):
        save(saving, disk)
        assert saving.num_failures == number
        error = capsys.readouterr().err
        assert expected in error
        assert "Training continues" in error
        with pytest.raises(
            ExportError if number == 1 else NotFiniteError,
            match=f"all steps are done, but the checkpoint of step 4 .*{expected}",
        ):
            saving.require_last_saved()
    save(saving, disk)
    assert saving.num_failures == 2
    saving.require_last_saved()


def test_other_errors_are_no_matter_of_a_disk():
    disk = Disk(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        save(retries(on_save_error="continue"), disk)
    assert disk.num_attempts == 1

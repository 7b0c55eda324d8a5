import pytest
import torch

from benchmarks.cells import attempted, exit_if_any_failed, state_of


def failing(error):
    def measure():
        raise error

    return measure


def test_a_cell_that_fails_says_why_and_the_program_fails_when_all_have_run(capsys):
    figures = {
        "fine": attempted(lambda: {"step_ms": 3.0}),
        "large": attempted(failing(torch.OutOfMemoryError("CUDA out of memory"))),
        "late": {"skipped": "no time left"},
    }
    assert {name: state_of(each) for name, each in figures.items()} == {
        "fine": "",
        "large": "out of memory",
        "late": "no time left",
    }
    exit_if_any_failed(figures)
    figures["broken"] = attempted(failing(RuntimeError("no compiler\nin a second line")))
    assert state_of(figures["broken"]) == "RuntimeError: no compiler"
    assert "no compiler" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^failed: broken$"):
        exit_if_any_failed(figures)


def test_who_stops_a_benchmark_stops_it():
    with pytest.raises(KeyboardInterrupt):
        attempted(failing(KeyboardInterrupt()))

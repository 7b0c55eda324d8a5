import signal
from pathlib import Path

from shardwise.controller import exit_codes

ROOT = Path(__file__).parents[2]


def test_codes_of_signals_are_those_of_shells():
    assert (exit_codes.HUNG_UP, exit_codes.INTERRUPTED, exit_codes.TERMINATED) == (129, 130, 143)
    assert exit_codes.code_of_signal(signal.SIGTERM) == exit_codes.TERMINATED


def test_every_exit_code_is_documented():
    table = (ROOT / "docs" / "faults.md").read_text()
    codes = [value for value in vars(exit_codes).values() if type(value) is not tuple and isinstance(value, int)]
    assert sorted(codes) == [1, 2, 75, 129, 130, 143]
    for code in (0, *codes):
        assert f"\n| {int(code)} |" in table

import io

from shardwise.console import tell, warn


def test_what_is_told_is_on_standard_error_at_once(monkeypatch):
    told = io.BytesIO()
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(told, write_through=False))
    tell("restart 1 of 2")
    assert told.getvalue() == b"restart 1 of 2\n"
    warn("no locks")
    assert told.getvalue() == b"restart 1 of 2\nwarning: no locks\n"

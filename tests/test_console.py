import io
import socket

from shardwise.console import counted, listed, on_host, tell, warn


def test_what_is_told_is_on_standard_error_at_once(monkeypatch):
    told = io.BytesIO()
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(told, write_through=False))
    tell("restart 1 of 2")
    assert told.getvalue() == b"restart 1 of 2\n"
    warn("no locks")
    assert told.getvalue() == b"restart 1 of 2\nwarning: no locks\n"


def test_things_are_counted_in_words():
    assert [counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert counted(3, "micro-batch") == "3 micro-batches"


def test_the_first_of_many_are_listed():
    assert [listed(["a", "b", "c", "d", "e"][:n]) for n in (1, 3, 5)] == ["a", "a, b, c", "a, b, c and 2 more"]
    assert listed(["a", "b", "c"], most=2) == "a, b and 1 more"


def test_the_host_is_said_where_there_are_several(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    for local, said in (("8", f" on {socket.gethostname()}"), ("16", "")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        assert on_host() == said
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert on_host() == ""

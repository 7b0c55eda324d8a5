from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from stand_in_streams import Streams

from shardwise.ops import on_current_stream

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def streams(monkeypatch):
    found = Streams()
    monkeypatch.setattr(torch.accelerator, "current_stream", found.of_device)
    return found


def test_a_thread_works_on_the_stream_that_was_current_where_it_was_given_the_work(streams):
    def work(number, *, power):
        return streams.current, number**power

    with ThreadPoolExecutor(1) as thread:
        for name in ("first", "second"):
            streams.use(name)
            given = on_current_stream(work, DEVICE)
            streams.use("later")
            assert thread.submit(given, 3, power=2).result() == (name, 9)
            assert thread.submit(work, 3, power=2).result() == ("default", 9)


def test_a_thread_that_fails_leaves_the_stream_too(streams):
    streams.use("own")
    with ThreadPoolExecutor(1) as thread:
        failed = thread.submit(on_current_stream(lambda: 1 / 0, DEVICE))
        assert isinstance(failed.exception(), ZeroDivisionError)
        assert thread.submit(lambda: streams.current).result() == "default"


def test_the_host_has_no_streams(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: pytest.fail("there is none"))
    assert on_current_stream(print, torch.device("cpu")) is print

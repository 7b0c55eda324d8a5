import threading

import pytest

from shardwise.recipes.background import Background


def test_a_call_goes_on_beside_its_caller_and_gives_its_result():
    may_end = threading.Event()
    call = Background(lambda: may_end.wait(10))
    assert not call.is_done
    may_end.set()
    assert call.result() is True
    assert call.is_done


def test_a_call_that_is_late_is_not_waited_for():
    may_end = threading.Event()
    call = Background(lambda: may_end.wait(10))
    with pytest.raises(TimeoutError):
        call.result(within_seconds=0.05)
    assert call.seconds >= 0.05
    with pytest.raises(TimeoutError):
        call.result(within_seconds=0.01)  # it is over
    may_end.set()
    assert call.result(within_seconds=10) is True


def test_what_a_call_raised_is_raised_where_its_result_is_asked_for():
    call = Background(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        call.result()

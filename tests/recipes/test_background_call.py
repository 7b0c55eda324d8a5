import threading

import pytest

from shardwise.recipes.background_call import BackgroundCall


def test_a_call_goes_on_beside_its_caller_and_gives_its_result():
    may_end = threading.Event()
    call = BackgroundCall(lambda: may_end.wait(10))
    assert not call.is_done
    may_end.set()
    assert call.result() is True
    assert call.is_done


def test_a_call_that_is_late_is_not_waited_for():
    may_end = threading.Event()
    call = BackgroundCall(lambda: may_end.wait(10))
    assert not call.wait(0.05)
    assert call.seconds >= 0.05
    assert not call.wait(0.01)  # it is over
    may_end.set()
    assert call.wait(10)
    assert call.result() is True


def test_a_call_that_ran_into_a_deadline_of_its_own_is_done_all_the_same():
    def give_up():
        raise TimeoutError("no answer")

    call = BackgroundCall(give_up)
    assert call.wait(10)
    with pytest.raises(TimeoutError, match="no answer"):
        call.result()


def test_what_a_call_raised_is_raised_where_its_result_is_asked_for():
    call = BackgroundCall(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        call.result()

import threading

import pytest

from shardwise.recipes.engine_turns import EngineTurns

DEADLINE_SECONDS = 20


def test_weights_interrupt_a_call_and_come_before_the_next_one():
    interrupted, events = threading.Event(), []
    turns = EngineTurns(interrupted.set)

    def sample():
        for call in range(2):
            with turns.sampling():
                events.append(f"call {call}")
                began.set()
                assert interrupted.wait(DEADLINE_SECONDS)
            events.append(f"after call {call}")

    began = threading.Event()
    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    assert began.wait(DEADLINE_SECONDS)
    with turns.weights():
        events.append("weights")
    thread.join(DEADLINE_SECONDS)
    assert events.index("call 0") < events.index("weights") < events.index("call 1")


def test_nothing_is_interrupted_where_nothing_is_sampled():
    turns = EngineTurns(lambda: pytest.fail("nothing was sampled"))
    with turns.sampling():
        pass
    with turns.weights():
        pass
    with turns.sampling():
        pass


def test_a_failure_on_either_side_leaves_the_turn_to_the_other():
    def fail():
        raise ValueError("the moon is full")

    turns = EngineTurns(fail)
    with pytest.raises(KeyError), turns.sampling():
        raise KeyError
    with pytest.raises(KeyError), turns.weights():
        raise KeyError
    with turns.sampling(), pytest.raises(ValueError, match="the moon is full"), turns.weights():
        pytest.fail("the engines were not interrupted")
    with turns.sampling():
        pass

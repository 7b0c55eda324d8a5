import threading

import pytest

from shardwise.controller.base import RankSilentError
from shardwise.recipes.sampling.sync_gate import SyncGate

DEADLINE_SECONDS = 20


def test_weights_interrupt_a_call_and_come_before_the_next_one():
    interrupted, events = threading.Event(), []
    sync_gate = SyncGate(interrupted.set, timeout_seconds=DEADLINE_SECONDS)

    def sample():
        for call in range(2):
            with sync_gate.sampling():
                events.append(f"call {call}")
                began.set()
                assert interrupted.wait(DEADLINE_SECONDS)
            events.append(f"after call {call}")

    began = threading.Event()
    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    assert began.wait(DEADLINE_SECONDS)
    with sync_gate.weights():
        events.append("weights")
    thread.join(DEADLINE_SECONDS)
    assert events.index("call 0") < events.index("weights") < events.index("call 1")


def test_nothing_is_interrupted_where_nothing_is_sampled():
    sync_gate = SyncGate(lambda: pytest.fail("nothing was sampled"), timeout_seconds=DEADLINE_SECONDS)
    with sync_gate.sampling():
        pass
    with sync_gate.weights():
        pass
    with sync_gate.sampling():
        pass


def test_a_failure_on_either_side_leaves_the_turn_to_the_other():
    def fail():
        raise ValueError("the moon is full")

    sync_gate = SyncGate(fail, timeout_seconds=DEADLINE_SECONDS)
    with pytest.raises(KeyError), sync_gate.sampling():
        raise KeyError
    with pytest.raises(KeyError), sync_gate.weights():
        raise KeyError
    with sync_gate.sampling(), pytest.raises(ValueError, match="the moon is full"), sync_gate.weights():
        pytest.fail("the engines were not interrupted")
    with sync_gate.sampling():
        pass


def test_a_call_that_an_interruption_does_not_end_is_named_and_sampling_goes_on_without_weights():
    sync_gate, sampled, ends = SyncGate(lambda: None, timeout_seconds=0.05), threading.Event(), threading.Event()

    def sample():
        with sync_gate.sampling():
            sampled.set()
            assert ends.wait(DEADLINE_SECONDS)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    assert sampled.wait(DEADLINE_SECONDS)
    named = r"did not return from `generate` within 0\.05 s .* \(rollout\.placement\.timeout_seconds\)"
    with pytest.raises(RankSilentError, match=named), sync_gate.weights():
        pytest.fail("weights came under a call")
    ends.set()
    thread.join(DEADLINE_SECONDS)
    with sync_gate.sampling():
        pass

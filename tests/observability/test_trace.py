import time

import pytest

from shardwise.observability import Spans


def test_spans_add_up_by_name_and_take_starts_from_zero():
    spans = Spans()
    for _ in range(2):
        with spans("rollout"):
            time.sleep(0.02)
    with spans("train"):
        pass
    taken = spans.take()
    assert taken.keys() == {"seconds/rollout", "seconds/train"}
    assert 0.04 <= taken["seconds/rollout"] < 5
    assert 0 <= taken["seconds/train"] < taken["seconds/rollout"]
    assert spans.take() == {}


def test_spans_nest_and_count_a_body_that_raises():
    spans = Spans()

    def fail():
        with spans("outer"), spans("inner"):
            time.sleep(0.01)
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    taken = spans.take()
    assert taken["seconds/outer"] >= taken["seconds/inner"] >= 0.01


def test_spans_tell_which_of_them_is_under_way():
    seen = []
    spans = Spans(seen.append)
    with spans("outer"):
        with spans("inner"):
            assert spans.current == "inner"
        assert spans.current == "outer"
        with pytest.raises(ValueError, match="inside"), spans("failing"):
            raise ValueError("inside")
    assert seen == ["outer", "inner", "outer", "failing", "outer", ""]

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config import DataError
from shardwise.data.loader import BatchLoader, RowOrder, RowRecord, compare_rows, steps_of


def walk(loader, num_steps):
    return [index for step in range(num_steps) for index in loader.indices(step * loader.batch_size)]


def test_unshuffled_batches_run_over_the_epoch_border():
    loader = BatchLoader(5, 2, seed=0, shuffle=False)
    assert [loader.indices(taken) for taken in range(0, 10, 2)] == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]


def test_batch_larger_than_the_data_spans_epochs():
    loader = BatchLoader(2, 5, seed=0, shuffle=False)
    assert loader.indices(0) == [0, 1, 0, 1, 0]
    assert loader.indices(5) == [1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("num_epochs", "num_rows", "batch_size", "steps"),
    [(1, 10, 5, 2), (1, 11, 5, 3), (1, 3, 5, 1), (10, 33, 32, 11), (3, 5, 4, 4), (3, 32, 100, 1)],
)
def test_epochs_are_so_many_passes_over_the_rows_and_one_batch_is_filled_up(num_epochs, num_rows, batch_size, steps):
    assert steps_of(num_epochs, num_rows=num_rows, batch_size=batch_size) == steps


def test_an_order_is_drawn_once_for_an_epoch_however_many_there_are(monkeypatch):
    drawn = []
    monkeypatch.setattr("shardwise.data.loader.torch.randperm", lambda n, generator: drawn.append(n) or torch.arange(n))
    orders = [RowOrder(num_rows=3 + n, seed=0, shuffle=True) for n in range(40)]
    for position in range(7):
        for order in orders:
            order.row(position)
    assert len(drawn) == sum(-(-7 // order.num_rows) for order in orders)


@given(num_rows=st.integers(1, 40), batch_size=st.integers(1, 60), seed=st.integers(0, 2**40))
def test_every_epoch_is_a_permutation(num_rows, batch_size, seed):
    loader = BatchLoader(num_rows, batch_size, seed=seed, shuffle=True)
    order = walk(loader, -(-3 * num_rows // batch_size))
    for epoch in range(3):
        assert sorted(order[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


@given(num_taken=st.integers(0, 10**6))
def test_a_batch_does_not_depend_on_what_was_asked_for_before(num_taken):
    fresh = BatchLoader(7, 3, seed=1, shuffle=True)
    used = BatchLoader(7, 3, seed=1, shuffle=True)
    walk(used, 5)
    assert used.indices(num_taken) == fresh.indices(num_taken)


def test_orders_differ_between_epochs_and_seeds():
    def epoch(seed, number):
        return BatchLoader(100, 100, seed=seed, shuffle=True).indices(100 * number)

    orders = [epoch(seed, number) for seed in range(3) for number in range(3)]
    assert len(set(map(tuple, orders))) == 9


def test_other_rows_than_the_resumed_run_had_are_an_error_or_a_warning_with_both_numbers(capsys):
    for may_differ in (False, True):
        compare_rows(RowRecord(20, None), RowRecord(20, "a"), may_differ=may_differ)
    assert capsys.readouterr().err == ""
    with pytest.raises(
        DataError, match=r"had 20 training rows, now there are 30, .* allow others with trainer\.resume"
    ):
        compare_rows(RowRecord(20, None), RowRecord(30, None), may_differ=False)
    compare_rows(RowRecord({"a": 1}, None), RowRecord(30, None), may_differ=True)
    told = capsys.readouterr().err
    assert told.startswith("warning: the run that is resumed had {'a': 1} training rows, now there are 30: it goes on")
    assert told.count("\n") == 1


def test_as_many_rows_with_other_tokens_are_a_warning_unless_other_rows_are_allowed(capsys):
    for now, may_differ in (("a", False), ("b", True)):
        compare_rows(RowRecord(20, "a"), RowRecord(20, now), may_differ=may_differ)
    assert capsys.readouterr().err == ""
    compare_rows(RowRecord(20, "a"), RowRecord(20, "b"), may_differ=False)
    told = capsys.readouterr().err
    assert told.startswith("warning: the training rows have other tokens than in the run that is resumed, of the same")

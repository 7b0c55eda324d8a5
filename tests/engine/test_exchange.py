import pytest
import torch
import torch.distributed as dist

from shardwise.engine.exchange import all_gather_json, gather_json, send_rows


def all_gather(values):
    return all_gather_json(values[dist.get_rank()])


def gather(values):
    return gather_json(values[dist.get_rank()])


def test_every_rank_receives_what_every_rank_gave(run_ranks):
    """Values of different lengths, the shortest of them on the first rank."""
    values = [None, {"name": "gewichte ü", "sizes": [1, 2.5, -3]}]
    assert run_ranks(all_gather, 2, values) == [values] * 2


@pytest.mark.parametrize("values", [[None, {"name": "gewichte ü"}], [[1, 2], ""]])
def test_rank_0_alone_receives_what_every_rank_gave(run_ranks, values):
    assert run_ranks(gather, 2, values) == [values, []]


@pytest.mark.parametrize("exchange", [all_gather, gather])
def test_one_rank_alone_receives_its_own(run_ranks, exchange):
    assert run_ranks(exchange, 1, [[]]) == [[[]]]


def send(counts):
    """Of rows that say (rank, number) those that arrive here, and the gradients of those that leave: where one arrives,
    it counts rank + 1 times."""
    rank = dist.get_rank()
    sent, received = counts[rank], [row[rank] for row in counts]
    rows = torch.tensor([[float(rank), float(n)] for n in range(sum(sent))]).view(-1, 2).requires_grad_()
    arrived = send_rows(rows, sent, received, dist.group.WORLD)
    (arrived * (rank + 1)).sum().backward()
    return arrived.tolist(), rows.grad.tolist()


def test_rows_go_to_their_ranks_in_their_order_and_gradients_come_back(run_ranks):
    """Rank 0 sends both of its rows to rank 1, which keeps its own."""
    (first, first_grad), (second, second_grad) = run_ranks(send, 2, [[0, 2], [0, 1]])
    assert (first, second) == ([], [[0, 0], [0, 1], [1, 0]])
    assert (first_grad, second_grad) == ([[2, 2], [2, 2]], [[2, 2]])


def test_ranks_without_rows_send_and_receive_none(run_ranks):
    assert run_ranks(send, 2, [[0, 0], [0, 0]]) == [([], [])] * 2

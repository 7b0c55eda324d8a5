import torch.distributed as dist

from shardwise.engine.exchange import all_gather_json


def gather(values):
    return all_gather_json(values[dist.get_rank()])


def test_every_rank_receives_what_every_rank_gave(run_ranks):
    """Values of different lengths, the shortest of them on the first rank."""
    values = [None, {"name": "gewichte ü", "sizes": [1, 2.5, -3]}]
    assert run_ranks(gather, 2, values) == [values] * 2


def test_one_rank_alone_receives_its_own(run_ranks):
    assert run_ranks(gather, 1, [[]]) == [[[]]]

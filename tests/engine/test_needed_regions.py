from unittest.mock import patch

import torch.distributed as dist

from shardwise.engine import needed_regions
from shardwise.engine.needed_regions import NeededRegions
from shardwise.region import Region


def exchange():
    """What each rank hears, and how often something was sent, when nothing was known, the same is said again, and one
    rank says another thing."""
    rank, sent = dist.get_rank(), []

    def noted(value):
        sent.append(value)
        return gather(value)

    gather, needed = needed_regions.all_gather_json, NeededRegions()
    with patch.object(needed_regions, "all_gather_json", noted):
        own = {"a": Region.box([(rank, 2 + rank), (0, 4)])}
        heard = [needed.by_rank(own), needed.by_rank(dict(own))]
        if rank == 1:
            own = {"a": Region.box([(0, 1), (0, 4)]) | Region.box([(3, 4), (0, 4)]), "b": Region(((),))}
        heard.append(needed.by_rank(own))
    return heard, len(sent)


def test_ranks_hear_what_the_others_need_once_and_again_when_one_needs_something_else(run_ranks):
    first = {"a": Region.box([(0, 2), (0, 4)])}
    second = {"a": Region.box([(1, 3), (0, 4)])}
    changed = {"a": Region((((0, 1), (3, 4)), ((0, 4),))), "b": Region(((),))}
    for heard, num_sent in run_ranks(exchange, 2):
        assert heard == [[first, second], [first, second], [first, changed]]
        assert num_sent == 2 + 1 + 2


def told():
    """How many objects there are by rank, and of what is needed of each tensor."""
    by_rank = NeededRegions().by_rank({"a": Region.box([(0, 2)]), "b": Region.box([(0, 1 + dist.get_rank() // 3)])})
    return len({*map(id, by_rank)}), [len({id(regions[name]) for regions in by_rank}) for name in ("a", "b")]


def test_what_ranks_need_alike_is_one_object(run_ranks):
    assert run_ranks(told, 4) == [(2, [1, 2])] * 4

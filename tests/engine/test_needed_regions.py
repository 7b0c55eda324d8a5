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
    own = {"a": Region.box([(0, 2)]), "b": Region.box([(0, dist.get_rank() // 3)])}
    return [id(regions) for regions in NeededRegions().by_rank(own)]


def test_ranks_that_need_the_same_share_what_is_known_of_them(run_ranks):
    for first, second, third, fourth in run_ranks(told, 4):
        assert first == second == third != fourth

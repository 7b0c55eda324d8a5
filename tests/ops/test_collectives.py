import torch
import torch.distributed as dist

from shardwise.ops import all_gather_flat


def gather():
    own = torch.arange(3) + 10 * dist.get_rank()
    whole = torch.empty(3 * dist.get_world_size(), dtype=own.dtype)
    all_gather_flat(whole, own)
    return whole.tolist()


def test_every_rank_has_the_parts_of_all_in_order(run_ranks):
    assert run_ranks(gather, 2) == [[0, 1, 2, 10, 11, 12]] * 2

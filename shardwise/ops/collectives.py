"""Collectives of torch under one name in every release."""

import torch.distributed as dist

all_gather_flat = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""(whole [ranks * N], own [N], group=None): under its name from torch 2.13 on, or the one before."""

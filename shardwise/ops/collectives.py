"""Collectives of torch under one name in every release."""

import torch.distributed as dist

all_gather_flat = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""All-gathers flat tensors: (whole [ranks * N], own [N], group=None). The first name is torch's from 2.13 on."""

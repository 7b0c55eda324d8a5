"""What is of the process group alone; what every medium does is in test_medium.py."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from ends import run_ends, stop_self

from shardwise.transfer import MediumError, ProcessGroupMedium


def absent(join):
    stop_self()


def join_alone(join):
    """What it says when an end never comes."""
    with pytest.raises(MediumError) as caught:
        join(ProcessGroupMedium, timeout=timedelta(seconds=1))
    return str(caught.value)


def test_an_end_that_never_joins_is_named(tmp_path):
    said, *_ = run_ends([join_alone, absent], tmp_path)
    assert said == "joining the process group: waited 1 s for receiver 1"


def test_backend_and_device_have_to_fit():
    with pytest.raises(ValueError, match="backend=nccl and device=cpu; gloo carries buckets on the host"):
        ProcessGroupMedium.join(dist.HashStore(), 0, 2, backend="nccl")
    with pytest.raises(ValueError, match="size=1; give 2 or more"):
        ProcessGroupMedium.join(dist.HashStore(), 0, 1)

"""What is of the process group alone; what every medium does is in test_medium.py."""

from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from ends import run_ends, stop_self

from shardwise.transfer import MediumError, ProcessGroupMedium
from shardwise.transfer.medium import Rendezvous


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


def test_closing_aborts_what_nccl_has_in_flight():
    group, timeout = Mock(spec=["abort"]), timedelta(seconds=1)  # no GPU: only what close asks of the group
    rendezvous = Rendezvous(dist.HashStore(), 0, 2, timeout=timeout)
    medium = ProcessGroupMedium(group, rendezvous, is_gloo=False, timeout=timeout, device=torch.device("cpu"))
    medium.close()
    medium.close()  # after `break_off` it is closed
    group.abort.assert_called_once_with()

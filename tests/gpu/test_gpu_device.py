"""take_device on a machine with accelerators."""

import pytest
import torch

from shardwise.config import ConfigError
from shardwise.engine import take_device


def test_a_rank_takes_the_device_of_its_number(device):
    assert device == torch.device("cuda", 0)
    assert torch.cuda.current_device() == 0


def test_more_ranks_than_devices_is_an_error_with_both_numbers(device):
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=rf"local rank {count} has no accelerator: this machine has {count}"):
        take_device(count)

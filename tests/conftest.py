"""Fixtures of every test folder."""

import hypothesis
import pytest
from ranks import RankPool

hypothesis.settings.register_profile("shared machine", deadline=None)  # where cores are shared, time says nothing
hypothesis.settings.load_profile("shared machine")


@pytest.fixture(scope="session")
def run_ranks():
    """`run_ranks(function, world_size, *args, timeout_seconds=60)`: results by rank. See ranks.py."""
    pool = RankPool()
    yield pool.run
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """On tensors this small a second thread only waits, and where cores are shared it waits long."""
    import torch

    torch.set_num_threads(1)

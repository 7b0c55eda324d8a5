"""Fixtures of every test folder."""

import contextlib
import gc

import pytest
from ranks import RankPool

with contextlib.suppress(ImportError):  # tests/gpu does without
    import hypothesis

    # Where cores are shared, time says nothing.
    hypothesis.settings.register_profile("shared machine", deadline=None, max_examples=40)
    hypothesis.settings.load_profile("shared machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests go first: where several run at a time, none of them begins when the others have ended."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """What is there by now stays, and there is much of it: no collection has to look through it again."""
    gc.collect()
    gc.freeze()


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

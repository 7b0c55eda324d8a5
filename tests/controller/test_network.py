import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardwise.config import ConfigError
from shardwise.controller.network import End, require_reachable
from shardwise.controller.process_group import Rank, process_group


def test_the_address_is_the_one_that_gloo_gives_other_ranks(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = dist.HashStore()
    ranks = [
        threading.Thread(target=dist.ProcessGroupGloo, args=[store, rank, 2, timedelta(seconds=10)])
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    own = End.own().address
    packed = socket.inet_pton(socket.AF_INET6 if ":" in own else socket.AF_INET, own.partition("%")[0])
    assert packed in store.get("0/0")  # where gloo's rank 0 listens


def test_the_interface_that_the_user_has_chosen_is_trusted(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert End.own().address == ""


def end(number, address):
    return End(f"node{number}", f"network {number}", address)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1"])
def test_a_rank_at_a_loopback_address_is_named_where_others_are_on_another_host(address):
    alone = [End("node0", "network", address)] * 2
    require_reachable(alone)
    with pytest.raises(ConfigError, match=rf"^rank 1 on node1 cannot be reached .* stands for {address} there") as told:
        require_reachable([end(0, "10.0.0.1"), end(1, address)])
    assert told.value.is_shared


@pytest.mark.parametrize("address", ["10.0.0.2", "fe80::1%eth0", ""])
def test_ranks_at_other_addresses_are_left_to_gloo(address):
    require_reachable([end(0, "10.0.0.1"), end(1, address)])


def test_ranks_say_so_before_they_connect(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = dist.HashStore()
    store.set("present/1", '{"host": "node1", "network": "another", "address": "127.0.1.1"}')
    with (
        pytest.raises(ConfigError, match=r"cannot be reached from other hosts"),
        process_group(Rank(0, 2, 0), device_type="cpu", timeout_seconds=5, store=store),
    ):
        pytest.fail("joined a rank that cannot be reached")

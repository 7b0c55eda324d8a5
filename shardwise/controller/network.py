"""Whether ranks of several hosts reach each other at the addresses that gloo gives them."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Self

from shardwise.config import ConfigError

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/net")


@dataclass(frozen=True, slots=True)
class End:
    """Where the other ranks look for a rank."""

    host: str
    network: str
    """The same for processes that reach each other at loopback addresses."""
    address: str
    """The IP address that gloo gives the others; "" for that of the interface which the user has chosen."""

    @classmethod
    def own(cls) -> Self:
        """Returns that of this process."""
        network = f"{_BOOT_ID.read_text().strip()} {_NAMESPACE.readlink()}"
        return cls(socket.gethostname(), network, "" if _INTERFACE_VARIABLE in os.environ else _address_of_hostname())


def require_reachable(ends: Sequence[End]) -> None:
    """Raises ConfigError: the ranks are on several hosts, and the others would look for one of them, of `ends` in order
    of rank, on their own. All ranks that compare the same ends raise it."""
    if len({end.network for end in ends}) == 1:
        return
    for rank, end in enumerate(ends):
        if end.address and ip_address(end.address).is_loopback:
            error = ConfigError(
                f"rank {rank} on {end.host} cannot be reached from other hosts: its hostname stands for {end.address} "
                f"there, or for no address of that host; set {_INTERFACE_VARIABLE} on every host to the network "
                f"interface that leads to the others, such as {_INTERFACE_VARIABLE}=eth0 (`ip address` lists them), or "
                "give the hostname the host's own address in /etc/hosts"
            )
            error.is_shared = True
            raise error


def _address_of_hostname() -> str:
    """Returns the first address of the hostname that this host has, or else a loopback address, as gloo does."""
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return str(address[0])
    return "127.0.0.1"

from types import SimpleNamespace

import pytest
import torch

from shardwise.rollout.free_memory import free_bytes

CPU = torch.device("cpu")
MEMINFO = "MemTotal: 4000 kB\nMemFree: 100 kB\nMemAvailable: {available} kB\nSwapFree: {swap} kB\nHugePages_Total: 0\n"


def machine(root, *, available, swap=0, groups=(), own="/job/step"):
    """groups: (folder, memory.max, memory.current, bytes of files in it)."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO.format(available=available, swap=swap))
    (root / "proc/self/cgroup").write_text(f"0::{own}\n")
    for folder, limit, used, files in groups:
        group = root / "sys/fs/cgroup" / folder
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 7\ninactive_file {files - 1}\nactive_file 1\n")
    return root


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        ({"available": 1000}, 1000 * 1024),
        ({"available": 1000, "swap": 50}, 1050 * 1024),
        ({"available": 1000, "groups": [("job/step", "max", 10, 1)]}, 1000 * 1024),
        ({"available": 1000, "groups": [("job/step", 9000, 5000, 300)]}, 4300),
        ({"available": 1, "groups": [("job/step", 9000, 5000, 300)]}, 1024),
        ({"available": 1000, "groups": [("job/step", "max", 10, 1), ("job", 700, 500, 1)]}, 201),
        ({"available": 1000, "own": "/", "groups": [("", 800, 500, 1)]}, 301),
        ({"available": 1000, "groups": [("another", 1, 1, 1)]}, 1000 * 1024),
    ],
    ids=["machine", "swap", "no limit", "limit", "less than the limit", "around", "container", "of others"],
)
def test_the_host_has_what_the_machine_and_every_group_around_the_process_leave(tmp_path, setup, expected):
    assert free_bytes(CPU, root=machine(tmp_path, **setup)) == expected


def test_where_nobody_tells_nothing_is_known(tmp_path, monkeypatch):
    assert free_bytes(CPU, root=tmp_path) is None

    def refuse(device):
        raise NotImplementedError("this backend does not tell")

    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(get_memory_info=refuse))
    assert free_bytes(torch.device("mps")) is None


def test_a_device_has_what_is_free_and_what_this_process_holds_without_using_it(monkeypatch):
    told = {"get_memory_info": (1000, 9000), "memory_reserved": 700, "memory_allocated": 600}
    asked = SimpleNamespace(**{name: lambda device, value=value: value for name, value in told.items()})
    monkeypatch.setattr(torch, "accelerator", asked)
    assert free_bytes(torch.device("cuda", 1)) == 1000 + 700 - 600


def test_this_machine_tells_about_what_it_has():
    free = free_bytes(CPU)
    assert free is None or 2**20 < free < 2**50

"""How much memory a device has left."""

from contextlib import suppress
from pathlib import Path

import torch

_GROUPS = "sys/fs/cgroup"


def free_bytes(device: torch.device, *, root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process could still allocate, droppable caches included; None if unknown.

    Args:
        root: root of the file system, for tests.
    """
    if device.type == "cpu":
        return _free_on_host(root)
    with suppress(RuntimeError):  # some backends do not tell
        free, _ = torch.accelerator.get_memory_info(device)
        return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return None


def _free_on_host(root: Path) -> int | None:
    """The least free memory of the machine and of each control group the process is in; free swap is added to it."""
    machine = _numbers(root / "proc/meminfo")
    if "MemAvailable:" not in machine:
        return None
    swap = 1024 * machine.get("SwapFree:", 0)
    return swap + min([1024 * machine["MemAvailable:"], *(_free_of_group(folder) for folder in _groups(root))])


def _groups(root: Path) -> list[Path]:
    """Folders of the control groups (version 2) that limit memory: the process's own and those that enclose it."""
    listed = root / "proc/self/cgroup"
    lines = listed.read_text().splitlines() if listed.is_file() else []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    folder = root / _GROUPS / own
    around = [folder, *folder.parents]
    return [group for group in around if (group / "memory.max").is_file() and _limit(group) is not None]


def _limit(group: Path) -> int | None:
    text = (group / "memory.max").read_text().strip()
    return None if text == "max" else int(text)


def _free_of_group(group: Path) -> int:
    limit = _limit(group)
    assert limit is not None
    used, parts = int((group / "memory.current").read_text()), _numbers(group / "memory.stat")
    return limit - used + parts.get("active_file", 0) + parts.get("inactive_file", 0)


def _numbers(path: Path) -> dict[str, int]:
    """Maps the first word of each line to the number after it; empty if there is no such file."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {words[0]: int(words[1]) for line in lines if len(words := line.split()) > 1 and words[1].isdigit()}

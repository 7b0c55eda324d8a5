import json
import sys
from pathlib import Path

import pytest

from shardwise.controller.launch import launch

ROOT = Path(__file__).parents[2]
RANK = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from shardwise.config import ExportError
from shardwise.controller.failures import note_failure
from shardwise.controller.launch import die_with_launcher
from shardwise.controller.local import RankGroup, serve
from shardwise.controller.process_group import Rank, process_group
from shardwise.controller.watchdog import enter_step
from shardwise.fault_plan import plan
from shardwise.types import Denominators, MetricValue


class Worker:
    def __init__(self, rank):
        self.rank, self.log = rank, []

    def add(self, number, other):
        self.log.append(["add", number, other])
        return self.rank * 1000 + number + other

    def scale(self, tensor, factor):
        self.log.append(["scale", tensor.tolist(), factor])
        return tensor * factor

    def count(self, denominators):
        return MetricValue.mean(denominators.num_tokens * (self.rank + 1), 2)

    def swap(self, value):
        "A collective inside a command: every rank must be in it at the same time."
        peer = 1 - self.rank
        received = torch.zeros(1)
        sent = torch.tensor([float(value)])
        import torch.distributed as dist
        ops = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return float(received)

    def history(self):
        return self.log

    def save(self, path):
        "What every rank raises together."
        raise ExportError(f"{path} cannot be written on rank {self.rank}")

    def step(self):
        return plan().step

    def nothing(self):
        return None


rank = Rank.from_environment()
die_with_launcher()
with process_group(rank, device_type="cpu", timeout_seconds=20) as control:
    worker = Worker(rank.rank)
    if rank.rank != 0:
        serve(worker, control)
        open(sys.argv[2] + ".served", "w").write("left the loop")
    else:
        group = RankGroup(worker, control, timeout_seconds=20)
        shards = [torch.tensor([1.5, 2.5]), torch.tensor([-3.0])]
        large = [torch.ones(1_000_000), torch.ones(2_000_000)]
        def failed_save():
            try:
                group.call("save", "/full")
            except ExportError as error:
                return str(error)

        def steps():
            found = [group.call("step")]
            for step in (6, 7):
                enter_step(step)
                found.append(group.call("step"))
            return found

        found = {
            "save": failed_save(),
            "size": group.size,
            "call": group.call("add", 3, 4),
            "scatter": [t.tolist() for t in group.scatter("scale", shards, 10)],
            "noun": [value.result() for value in group.call("count", Denominators(num_tokens=7, num_sequences=1))],
            "swap": group.scatter("swap", [11, 22]),
            "steps": steps(),
            "none": group.call("nothing"),
            "history": [list(log) for log in group.call("history")],
            "large": [t.sum().item() for t in group.scatter("scale", large, 2)],
        }
        group.shutdown()
        with open(sys.argv[2], "w") as file:
            json.dump(found, file)
"""


@pytest.fixture(scope="session")
def two_rank_results(tmp_path_factory):
    """What a RankGroup over two real ranks returned for a series of commands."""
    folder = tmp_path_factory.mktemp("two ranks")
    script, output = folder / "rank.py", folder / "results.json"
    script.write_text(RANK)
    assert launch([sys.executable, str(script), str(ROOT), str(output)], nproc=2) == 0
    return {**json.loads(output.read_text()), "served": Path(f"{output}.served").read_text()}

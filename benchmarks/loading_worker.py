"""One process of the loading benchmark: loads a model folder and writes it again, and says what that took.

Peaks are of the resident set (VmHWM of /proc, Linux only) above what the process held before the step, so the peak of
loading includes the weights that stay, and the peak of exporting is what comes on top of them.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from shardwise.config import FrozenEngineConfig
from shardwise.controller.process_group import Rank, process_group
from shardwise.engine import ParallelDims, TrainEngine
from shardwise.engine.model import ShardedModel, build_sharded


def resident_kib(field: str) -> int:
    """VmRSS, what is resident now, or VmHWM, the most since the last reset."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1])


def measured(step: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Runs the step. Returns its result, seconds, and the peak of the resident set above its start in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, start = resident_kib("VmRSS"), time.perf_counter()
    result = step()
    seconds = time.perf_counter() - start
    return result, {"seconds": seconds, "peak_bytes": (resident_kib("VmHWM") - before) * 1024}


def touched(model: torch.nn.Module) -> torch.nn.Module:
    """`from_pretrained` maps files into memory; their pages are read when they are first used."""
    for parameter in model.parameters():
        parameter.detach().view(-1)[:: 4096 // parameter.itemsize].sum()
    return model


def save_durably(model: PreTrainedModel, target: Path) -> None:
    """Ours is on the disk when it returns, so theirs must be."""
    model.save_pretrained(target)
    for file in target.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def run_ours(folder: Path, target: Path) -> dict[str, Any]:
    """This rank's figures; a frozen engine in the dtype of the files, so that its weights are as large as they are.

    Put together by hand, because `TrainEngine.build` also runs two tokens through the model, which is not loading."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with process_group(Rank.from_environment(), device_type="cpu", timeout_seconds=600):
        config, device = FrozenEngineConfig(param_dtype="bfloat16"), torch.device("cpu")
        dims = ParallelDims.from_sizes(world_size=dist.get_world_size(), fsdp_size=None, ulysses_size=1)
        mesh = dims.build(device.type)

        def build_and_load() -> tuple[ShardedModel, int]:
            sharded, initial = build_sharded(folder, config, mesh, device=device)
            return sharded, initial.load()

        (sharded, num_bytes), load = measured(build_and_load)
        engine = TrainEngine(sharded, None, config=config, device=device, seed=0)
        _, export = measured(lambda: engine.export_hf(target, tokenizer))
    return {"load": load | {"bytes_read": num_bytes}, "export": export}


def run_theirs(folder: Path, target: Path) -> dict[str, Any]:
    """transformers alone in one process."""
    model, load = measured(lambda: touched(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)))
    _, export = measured(lambda: save_durably(model, target))
    return {"load": load, "export": export}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=["ours", "theirs"], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    print(json.dumps({"ours": run_ours, "theirs": run_theirs}[args.side](args.folder, args.target)))


if __name__ == "__main__":
    main()

"""Saving a training state and its model: how long training waits, and at which rate bytes reach the disk.

A Qwen3 with AdamW states and float32 masters is saved by the product's own Saver, over real ranks. In every round, each
on the same bytes and the same disk:

sync        trainer.async_save=false, until the checkpoint is published: weights, state, hashes, fsync, rename
async       trainer.async_save=true, with scoring beside it: how long training waits (`pause`: in the save, and before
            weights may change), and until it is published
raw_write   as many bytes as the checkpoint has, each rank its share, in blocks of 16 MiB, with fsync: the faster of one
            file for each rank and one for each of its threads
torch_save  `torch.save` of each rank's shards and, on rank 0, of the model in its dtype, with fsync
dcp         `torch.distributed.checkpoint.save` of the state and the same file of the model, with fsync
load        reading the state into an engine that was just built, as a run does that resumes, verified; its files are in
            the page cache; twice in a round
unverified  the same without hashes
load_cold, unverified_cold
            likewise, with the files on the disk alone

Beside that:

recovery    seconds from `kill -9` of a rank of a GRPO run on two ranks, saved every second step, to the next trained
            step: noticed, started again, resumed from the newest checkpoint
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import yaml
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.harness import paired_ratios, report
from shardwise.config import EngineConfig, ModelConfig, OptimizerConfig, SFTConfig
from shardwise.controller.launch import launch
from shardwise.controller.local import RankGroup, serve, serve_in_background
from shardwise.controller.process_group import Rank, connect, open_store, process_group
from shardwise.data.synthetic import arithmetic_problems, build_model_folder, train_tokenizer
from shardwise.engine.files.checkpoint import load_state
from shardwise.engine.shards import local_shard
from shardwise.recipes.checkpointing.checkpoint_writer import CheckpointWriter
from shardwise.recipes.checkpointing.checkpoints import step_folder
from shardwise.recipes.checkpointing.retention import Reported
from shardwise.recipes.checkpointing.saver import Saver
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.engines import RemoteEngine, build_engine
from shardwise.recipes.quickstart import rl_config
from shardwise.recipes.rank.worker import Worker
from shardwise.types import Sample

T = TypeVar("T")
BLOCK_BYTES = 1 << 24
TIMEOUT_SECONDS = 300
RECOVERIES = 3
NUM_SCORED = 256
"""Tokens of each rank: less than a step has."""


def build_folder(folder: Path, *, hidden_size: int, num_layers: int) -> None:
    """A random model of the family that the other benchmarks train, with a tokenizer."""
    config = Qwen3Config(
        vocab_size=32768,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    train_tokenizer(["2+3=5"], vocab_size=261).save_pretrained(folder)


class Bench(Worker):
    """A rank that also writes by other means what its engine would save."""

    def write_raw(self, folder: str, num_bytes: int, num_files: int) -> None:
        """This rank's share of so many bytes, in so many files at a time."""
        share = num_bytes // dist.get_world_size() // num_files
        paths = [Path(folder) / f"raw_{dist.get_rank()}_{number}" for number in range(num_files)]
        with ThreadPoolExecutor(num_files) as threads:
            list(threads.map(_write_and_sync, paths, [share] * num_files))

    def write_torch(self, folder: str) -> None:
        """One file of each rank's shards."""
        shards = {name: local_shard(tensor) for name, tensor in self._tensors().items()}
        _save_and_sync(shards, Path(folder) / f"torch_{dist.get_rank()}.pt")
        self._write_model(Path(folder))

    def write_dcp(self, folder: str) -> None:
        """torch's distributed checkpoint of the state."""
        import torch.distributed.checkpoint as dcp

        dcp.save(self._tensors(), storage_writer=dcp.FileSystemWriter(Path(folder) / "dcp", sync_files=True))
        self._write_model(Path(folder))

    def wait_for_copies(self) -> None:
        """What an optimizer step would wait for."""
        self.engines["policy"].engine._copies.wait()

    def load_unverified(self, role: str, folder: str) -> None:
        """As `load_state`, without hashes."""
        optimizer = self.engines[role].engine._optimizer
        assert optimizer is not None
        load_state(optimizer, Path(folder), into_empty=True, verify=False)

    def _tensors(self) -> dict[str, torch.Tensor]:
        optimizer = self.engines["policy"].engine._optimizer
        assert optimizer is not None
        return optimizer.named_tensors()

    def _write_model(self, folder: Path) -> None:
        weights = dict(self.engines["policy"].engine.named_weights(torch.bfloat16))
        if dist.get_rank() == 0:
            _save_and_sync(weights, folder / "model.pt")


def _write_and_sync(path: Path, num_bytes: int) -> None:
    block, left = memoryview(bytearray(os.urandom(BLOCK_BYTES))), num_bytes
    with path.open("wb", buffering=0) as file:
        while left:
            left -= file.write(block[: min(left, BLOCK_BYTES)])
        os.fsync(file.fileno())


def _save_and_sync(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def _drop_from_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(policy: RemoteEngine, scratch: Path, samples: list[Sample], *, rounds: int) -> dict[str, Any]:
    """Seconds of every round, and the bytes of a checkpoint. `samples` are scored beside the save."""
    group = policy.group
    config = {"model": {"path": "m"}, "data": {"train_files": "t"}}
    savers = {
        kind: Saver(
            scratch / kind,
            SFTConfig.parse({**config, "trainer": {"async_save": kind == "async"}}, origin="benchmark"),
            {"": policy},
            Reported(),
            files={},
        )
        for kind in ("sync", "async")
    }
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[..., object], *arguments: Any) -> None:
        start = time.perf_counter()
        work(*arguments)
        seconds.setdefault(name, []).append(time.perf_counter() - start)

    def save_async(step: int) -> None:
        timed("begin", savers["async"].save, step, {})
        timed("score_beside", policy.score, samples)
        timed("copies", group.call, "wait_for_copies")
        savers["async"].wait()
        seconds.setdefault("pause", []).append(seconds["begin"][-1] + seconds["copies"][-1])

    num_bytes = 0
    for number in range(rounds + 1):  # the first warms up: page cache, staging buffers
        for kind in savers:
            (scratch / kind).mkdir(parents=True)
        timed("sync", savers["sync"].save, number, {})
        num_bytes = sum(file.stat().st_size for file in (scratch / "sync").rglob("*") if file.is_file())
        state = str(step_folder(scratch / "sync", number) / "state" / "policy")
        loads = {"load": "load_state", "unverified": "load_unverified"}
        names = sorted(loads, reverse=bool(number % 2))
        for kind in ("", "_cold"):
            for name in (*names, *reversed(names)):  # each is as often the first as the second
                fresh = build_engine(
                    group, "fresh", policy.source, optimizer=OptimizerConfig(), total_steps=10
                )  # as in a run that resumes: without weights and states
                if kind:
                    _drop_from_page_cache(Path(state))
                timed(name + kind, group.call, loads[name], fresh.role, state)
        timed("score", policy.score, samples)
        timed("async", save_async, number)
        for kind, method, *arguments in (
            ("raw", "write_raw", num_bytes, 1),
            ("raw_threads", "write_raw", num_bytes, torch.get_num_threads()),
            ("torch", "write_torch"),
            ("dcp", "write_dcp"),
        ):
            folder = scratch / kind
            folder.mkdir()
            timed(kind, group.call, method, str(folder), *arguments)
        for folder in scratch.iterdir():
            shutil.rmtree(folder)
    return {"num_bytes": num_bytes, "seconds": {name: times[1:] for name, times in seconds.items()}}


def run_rank(folder: Path, scratch: Path, *, rounds: int, threads: int) -> None:
    """One rank; rank 0 writes what it measured to `scratch`/result.json."""
    torch.set_num_threads(threads)
    rank = Rank.from_environment()
    store = open_store(rank, timeout_seconds=TIMEOUT_SECONDS)
    with process_group(rank, device_type="cpu", timeout_seconds=TIMEOUT_SECONDS, store=store) as control:
        links = connect("background", rank, store, timeout=timedelta(seconds=TIMEOUT_SECONDS))
        writer = CheckpointWriter(rank.rank, links)
        worker = Bench(torch.device("cpu"), writer=writer)
        if rank.rank > 0:
            writing = serve_in_background(writer, links, print)
            serve(worker, control)
            writing.join()
            return
        background = RankGroup(writer, links, timeout_seconds=TIMEOUT_SECONDS)
        group = RankGroup(worker, control, timeout_seconds=TIMEOUT_SECONDS, background=background)
        layout = EngineConfig(param_dtype="bfloat16", max_tokens_per_micro_batch=NUM_SCORED)
        source = EngineSource(model=ModelConfig(path=str(folder)), layout=layout)
        policy = build_engine(group, "policy", source, optimizer=OptimizerConfig(), total_steps=10)
        policy.load_initial_weights()
        tokens = torch.arange(NUM_SCORED) % 250 + 5
        samples = [
            Sample(uid=str(n), token_ids=tokens, loss_mask=torch.arange(NUM_SCORED) > 0) for n in range(group.size)
        ]
        policy.train(samples)
        (scratch / "result.json").write_text(json.dumps(measure(policy, scratch / "files", samples, rounds=rounds)))
        group.shutdown()


def recovery_seconds(folder: Path) -> float:
    """From `kill -9` of rank 1 to the next trained step; `folder` gets the run."""
    problems = arithmetic_problems(folder / "data", seed=0, num_held_out=16)
    tokenizer = train_tokenizer(problems.sft_train.read_text(encoding="utf-8").splitlines(), vocab_size=320)
    build_model_folder(folder / "model", tokenizer=tokenizer, seed=0)
    tree = rl_config(folder / "model", problems, folder / "run", seed=0).model_dump(mode="json")
    tree["trainer"] |= {"resume": "auto", "total_steps": 1000, "save_every_steps": 2, "validate_every_steps": 0}
    config = folder / "rl.yaml"
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    metrics, said = folder / "run" / "metrics.jsonl", folder / "said"
    with said.open("wb") as output:
        command = [sys.executable, "-m", "shardwise", "rl", "--nproc", "2", "--max-restarts", "1", "-c", str(config)]
        launcher = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_for(launcher, lambda: _steps(metrics) >= 5)
        ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        began = time.perf_counter()
        os.kill(int(ranks[1]), signal.SIGKILL)
        resumed = re.compile(r"^rl: resumes from .*/step_(\d+)$", re.MULTILINE)
        found = _wait_for(launcher, lambda: resumed.search(said.read_text()))
        _wait_for(launcher, lambda: _steps(metrics) > int(found[1]))
        return time.perf_counter() - began
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait()


def _steps(metrics: Path) -> int:
    """The last step in it."""
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def _wait_for(launcher: "subprocess.Popen[bytes]", find: Callable[[], T | None]) -> T:
    """Until it finds something."""
    while not (found := find()):
        if launcher.poll() is not None:
            raise SystemExit(f"the run ended with exit code {launcher.returncode}")
        time.sleep(0.02)
    return found


def ratios_of(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Rates ours / peer; `pause` is a time / that of a synchronous save, `verified` ones / loading without hashes."""
    seconds = result["seconds"]

    def rates(name: str) -> list[float]:
        return [1 / value for value in seconds[name]]

    return {
        "raw_write": paired_ratios(
            rates("sync"), [max(pair) for pair in zip(rates("raw"), rates("raw_threads"), strict=True)]
        ),
        "torch_save": paired_ratios(rates("sync"), rates("torch")),
        "dcp": paired_ratios(rates("sync"), rates("dcp")),
        "pause": paired_ratios(seconds["pause"], seconds["sync"]),
        "verified_load": paired_ratios(seconds["load"], seconds["unverified"]),
        "verified_cold_load": paired_ratios(seconds["load_cold"], seconds["unverified_cold"]),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="checkpoints against raw writes, torch.save and DCP")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    parser.add_argument("--rank", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank:
        model, scratch = options.rank
        threads = max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"]))
        run_rank(model, scratch, rounds=options.rounds, threads=threads)
        return
    values: dict[str, Any] = {"settings": {"hidden_size": options.hidden_size, "layers": options.layers}}
    ratios: dict[str, float] = {}
    for nproc in (1, 2):
        with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
            model = Path(scratch) / "model"
            build_folder(model, hidden_size=options.hidden_size, num_layers=options.layers)
            (Path(scratch) / "files").mkdir()
            command = [sys.executable, "-m", "benchmarks.checkpoint", "--rank", str(model), scratch]
            if launch([*command, "--rounds", str(options.rounds)], nproc=nproc):
                raise SystemExit(1)
            result = json.loads((Path(scratch) / "result.json").read_text())
        spread = ratios_of(result)
        ratios |= {f"{name}_{nproc}": figures["median"] for name, figures in spread.items()}
        medians = {name: round(statistics.median(times), 3) for name, times in result["seconds"].items()}
        values[f"ranks_{nproc}"] = {"num_bytes": result["num_bytes"], "seconds": medians, "ratios": spread}
    recovered = []
    for _ in range(RECOVERIES):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            recovered.append(round(recovery_seconds(Path(folder)), 2))
    values["recovery_seconds"] = {"median": statistics.median(recovered), "rounds": recovered}
    report("checkpoint", ratios=ratios, memory_ratios={}, values=values, write=not options.no_write)


if __name__ == "__main__":
    main()

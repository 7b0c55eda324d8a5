"""What is staged and written beside training is, byte for byte, what a save at that moment writes."""

import socket
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_models import random_samples, tiny_folder

from shardwise.config import EngineConfig, ModelConfig, OptimizerConfig
from shardwise.controller.process_group import Rank, connect
from shardwise.data import pack
from shardwise.data.synthetic import train_tokenizer
from shardwise.engine.exchange import all_gather_json
from shardwise.engine.files.state_files import ShardFile
from shardwise.recipes.background_call import BackgroundCall
from shardwise.recipes.checkpointing.checkpoint_writer import CheckpointWriter
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.rank.worker import Worker

LENGTHS = [9, 13, 6, 11]
STATE = "state/policy"


class Job:
    """One rank with an engine and what writes its checkpoints."""

    def __init__(self, folder, store, layout):
        rank, size = dist.get_rank(), dist.get_world_size()
        links = connect("test", Rank(rank, size, rank), dist.FileStore(store, size), timeout=timedelta(seconds=20))
        self.writer = CheckpointWriter(rank, links)
        self.worker = Worker(torch.device("cpu"), writer=self.writer)
        self.model = ModelConfig(path=folder).model_dump_json()
        self._num_shards = size // layout.get("ulysses_size", 1)
        optimizer = OptimizerConfig(learning_rate=0.02).model_dump_json()
        source = EngineSource(model=ModelConfig(path=folder), layout=EngineConfig(**layout))
        self.worker.build_engine("policy", source.model_dump_json(), optimizer, 10)

    def train(self, step):
        packed = pack(random_samples(LENGTHS, seed=step), num_shards=self._num_shards, max_tokens=40)
        shard = dist.get_rank() * self._num_shards // dist.get_world_size()
        self.worker.train(packed.shards[shard], packed.denominators, "policy")

    def save(self, folder):
        self.worker.save("policy", self.model, folder, f"{folder}/{STATE}")

    def stage(self):
        """The copies begin late, as they would behind many others: what comes next has to wait for them."""
        self.worker.engines["policy"].engine._copies._thread.submit(time.sleep, 0.2)
        self.worker.stage_weights("policy", self.model, "")
        self.worker.stage_state("policy", STATE)

    def finish(self, folder, outcome):
        """What rank 0 makes of the ranks' outcomes; the ranks' errors."""
        outcomes = all_gather_json(outcome)
        errors = [outcome["error"] for outcome in outcomes]
        if not any(errors):
            written = [outcome["result"] for outcome in outcomes] if dist.get_rank() == 0 else None
            errors = [self.writer.finish(written, folder)["error"]]
        return errors


def saved_twice(folder, out, store, layout):
    """Saves, stages, trains on before and while the staged is written; and again, into the same buffers."""
    job = Job(folder, store, layout)
    for number in range(2):
        job.train(number)
        job.save(f"{out}/live_{number}")
        Path(f"{out}/staged_{number}").mkdir(exist_ok=True)
        job.stage()
        job.train(10 + number)
        writing = BackgroundCall(lambda number=number: job.writer.write(f"{out}/staged_{number}"))
        job.train(20 + number)
        assert job.finish(f"{out}/staged_{number}", writing.result()) in ([""], [])


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def make_folder(tmp_path):
    def make(family):
        folder = tiny_folder(family, tmp_path / "model")
        train_tokenizer(["2+3=5"], vocab_size=261).save_pretrained(folder)
        return str(folder)

    return make


LORA = {"rank": 3, "target_modules": ["q_proj", "down_proj"]}


@pytest.mark.parametrize(
    ("world_size", "family", "layout"),
    [
        pytest.param(1, "qwen3", {}, marks=pytest.mark.full),
        (2, "llama", {"param_dtype": "bfloat16"}),
        (2, "qwen3_moe", {}),
        (2, "llama", {"lora": LORA}),
        pytest.param(4, "llama", {"fsdp_size": 2}, marks=pytest.mark.full),
        (4, "qwen3", {"ulysses_size": 2, "offload_policy": True}),
    ],
)
def test_what_is_written_beside_training_is_what_a_save_at_that_moment_writes(
    run_ranks, tmp_path, make_folder, world_size, family, layout
):
    out = tmp_path / "out"
    run_ranks(saved_twice, world_size, make_folder(family), str(out), str(tmp_path / "store"), layout)
    for number in range(2):
        live, staged = files_of(out / f"live_{number}"), files_of(out / f"staged_{number}")
        assert staged == live
        assert f"{STATE}/index.json" in live
        assert ("adapter/adapter_model.safetensors" in live) == ("lora" in layout)
    assert files_of(out / "staged_0")["hf/model.safetensors"] != files_of(out / "staged_1")["hf/model.safetensors"]


def failed_once(folder, out, store):
    """A folder where a file should be: rank 0 cannot write the weights, and rank 1 does not wait for it."""
    job = Job(folder, store, {})
    job.train(0)
    Path(f"{out}/full/hf/model.safetensors").mkdir(parents=True, exist_ok=True)
    job.stage()
    errors = job.finish(f"{out}/full", job.writer.write(f"{out}/full"))
    Path(f"{out}/good").mkdir(exist_ok=True)
    job.stage()
    later = job.finish(f"{out}/good", job.writer.write(f"{out}/good"))
    job.writer.clear()
    return errors, later, job.writer.write(f"{out}/empty")


def test_a_rank_that_cannot_write_says_so_and_the_next_checkpoint_is_whole(run_ranks, tmp_path, make_folder):
    out = tmp_path / "out"
    for errors, later, cleared in run_ranks(failed_once, 2, make_folder("llama"), str(out), str(tmp_path / "store")):
        assert f"{out}/full/hf cannot be written" in errors[0]
        assert "Is a directory" in errors[0]
        assert errors[1] == ""
        assert later == [""]
        assert cleared == {"result": {}, "error": "", "host": ""}
    assert (out / "good/hf/model.safetensors").is_file()
    assert (out / "good" / STATE / "index.json").is_file()
    assert not (out / "empty").exists()


class WaitingExport:
    """A model whose parts come late: not before the rank has written its state."""

    def write(self, folder, tokenizer, links):
        deadline = time.monotonic() + 30
        while not (folder.parent / STATE / "written").is_file():
            assert time.monotonic() < deadline, "the state is written afterwards"
            time.sleep(0.01)


class MarkedState:
    def write(self, folder):
        (folder / "written").touch()
        return ShardFile(0, "", {})


def test_a_state_is_written_while_parts_of_the_model_are_awaited(tmp_path):
    writer = CheckpointWriter(0, links=None)
    writer.add_export("policy", "hf", WaitingExport(), ModelConfig(path="m"))
    writer.add_state("policy", STATE, MarkedState())
    outcome = writer.write(str(tmp_path))
    assert outcome == {"result": {STATE: asdict(ShardFile(0, "", {}))}, "error": "", "host": ""}


def test_a_rank_that_does_not_see_the_checkpoint_makes_none_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    writer = CheckpointWriter(1, links=None)
    writer.add_state("policy", STATE, MarkedState())
    outcome = writer.write(str(tmp_path / ".step_6.tmp"))
    assert outcome["host"] == f" on {socket.gethostname()}"
    assert outcome["error"] == (
        f"{tmp_path}/.step_6.tmp is not there: trainer.output_dir has to be on a file system that all ranks share"
    )
    assert list(tmp_path.iterdir()) == []


def test_files_are_hashed_for_the_manifest(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b.safetensors").write_bytes(b"cut")
    writer = CheckpointWriter(0, links=None)
    outcome = writer.hash_files(["a"], str(tmp_path))
    assert outcome["error"] == ""
    assert {name: record["num_bytes"] for name, record in outcome["result"].items()} == {"a": 3}
    outcome = writer.hash_files(["a", "b.safetensors"], str(tmp_path))
    assert f"{tmp_path}/b.safetensors cannot be read" in outcome["error"]


def test_a_rank_that_does_not_see_a_file_of_its_share_says_so(tmp_path):
    outcome = CheckpointWriter(1, links=None).hash_files(["hf/config.json"], str(tmp_path))
    assert f"No such file or directory: '{tmp_path}/hf/config.json'" in outcome["error"]

"""Our side of sft_throughput: a TrainEngine at world size 1 (fully_shard and all), in lockstep."""

import argparse
import json
from pathlib import Path

import torch

from benchmarks.peers.lockstep import Pacer
from shardwise.config import EngineConfig, OptimizerConfig
from shardwise.controller.process_group import Rank, process_group
from shardwise.data import pack
from shardwise.engine import TrainEngine
from shardwise.recipes.losses import sft_loss
from shardwise.types import Sample


def sample_of(index: int, row: list[int]) -> Sample:
    """Every token but the first is trained."""
    loss_mask = torch.ones(len(row), dtype=torch.bool)
    loss_mask[0] = False
    return Sample(uid=str(index), token_ids=torch.tensor(row), loss_mask=loss_mask)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True, help="sequences of one optimizer step")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pacer = Pacer()
    rows = json.loads((args.folder / "rows.json").read_text())
    config = EngineConfig()
    with process_group(Rank.from_environment(), device_type="cpu", timeout_seconds=600):
        engine = TrainEngine.build(
            args.folder, config, device=torch.device("cpu"), optimizer=OptimizerConfig(learning_rate=2e-5)
        )
        going, step = pacer.ready(), 0
        while going:
            first = step * args.batch
            samples = [sample_of(index, rows[index]) for index in range(first, first + args.batch)]
            packed = pack(samples, num_shards=1, max_tokens=config.max_tokens_per_micro_batch)
            metrics = engine.forward_backward(packed.shards[0], sft_loss, packed.denominators)
            engine.optim_step()
            step += 1
            num_tokens = sum(len(sample.token_ids) for sample in samples)
            going = pacer.step_done(num_tokens, metrics["train/loss"].result())


if __name__ == "__main__":
    main()

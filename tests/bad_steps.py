"""Optimizer steps of a worker, with something in them that is not finite."""

import math
from dataclasses import replace

import torch
import torch.distributed as dist

from shardwise.config import EngineConfig, FrozenEngineConfig, ModelConfig, OptimizerConfig
from shardwise.data import pack
from shardwise.ops import plain_name
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.rank.worker import Worker
from shardwise.types import Sample

DOWN = "model.layers.1.mlp.down_proj"


def poisoned(worker: Worker, name: str = f"{DOWN}.weight", role: str = "policy") -> Worker:
    """With a NaN in one weight."""
    parameters_of(worker, role)[name].data.to_local()[0, 0] = math.nan
    return worker


def samples(rewards=(0.0, 0.0, 0.0, 0.0)) -> list[Sample]:
    tokens = [[50 + k, *range(10, 15 + k)] for k in range(len(rewards))]
    return [
        Sample(uid=f"rows.jsonl:{k}", token_ids=torch.tensor(ids), loss_mask=torch.arange(len(ids)) > 1, reward=reward)
        for k, (ids, reward) in enumerate(zip(tokens, rewards, strict=True))
    ]


def build(folder, *, role="policy", engine=None, optimizer=None, head="logprobs", worker=None) -> Worker:
    worker = Worker(torch.device("cpu")) if worker is None else worker
    source = EngineSource(model=ModelConfig(path=str(folder)), layout=engine or EngineConfig(), head=head)
    given = "" if isinstance(engine, FrozenEngineConfig) else OptimizerConfig(**optimizer or {}).model_dump_json()
    worker.build_engine(role, source.model_dump_json(), given, 9)
    return worker


def parameters_of(worker, role="policy"):
    model = worker.engines[role].engine._model.hf_model
    return {plain_name(name): one for name, one in model.named_parameters()}


def bits_of(worker):
    """Of this rank's shards; NaN equals itself as bits."""
    return {name: one.data.to_local().view(torch.int32).clone() for name, one in parameters_of(worker).items()}


def train(
    worker, bundle="", *, rewards=(0.0, 0.0, 0.0, 0.0), keep_together=1, teacher="", ulysses_size=1, values=False
):
    """This rank's metrics of one step on micro-batches of 20 tokens at most."""
    given = samples(rewards)
    if values:
        given = [replace(one, values=torch.zeros(len(one.token_ids)), returns=one.loss_mask.float()) for one in given]
    step = pack(given, num_shards=dist.get_world_size() // ulysses_size, max_tokens=20, keep_together=keep_together)
    batches = step.shards[dist.get_rank() // ulysses_size]
    metrics = worker.train(batches, step.denominators, "policy", teacher, str(bundle))
    return {name: value.result() for name, value in metrics.items()}

"""Workers on tiny models, and what they sample, score and train."""

from dataclasses import replace

import torch
from family_table import FAMILIES, save_model
from tiny_models import tiny_folder

from shardwise.config import AlgorithmConfig, CriticConfig, EngineConfig, ModelConfig, OptimizerConfig, SamplingConfig
from shardwise.data import pack, unpack
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.losses import LossSource
from shardwise.recipes.rank.worker import Worker
from shardwise.types import GenerateRequest, Sample

REQUESTS = [
    GenerateRequest(
        uid=f"{i}", prompt_ids=[3 + i, 9, 40][: 1 + i % 3], num_completions=3, max_tokens=10, temperature=0.8
    )
    for i in range(4)
]


OPTIMIZER = OptimizerConfig(learning_rate=0.02)


ROLES = {"policy": "logprobs", "reference": "logprobs", "critic": "token_values", "reward": "sequence_scores"}


def build_one(
    worker, role, folder, layout, *, optimizer=None, head="logprobs", temperature=1.0, total_steps=4, with_trained=True
):
    source = EngineSource(model=ModelConfig(path=str(folder)), layout=layout, head=head, temperature=temperature)
    given = "" if optimizer is None else optimizer.model_dump_json()
    return worker.build_engine(role, source.model_dump_json(), given, total_steps, with_trained)


def build(family, folder, *, param_dtype="float32", temperature=0.8, lora=None, engine="embedded") -> Worker:
    path = folder / family
    if family == "deepseek_v3":  # has a router that is kept in float32
        save_model(family, FAMILIES[family], path)
    else:
        tiny_folder(family, path)
    layout = EngineConfig(param_dtype=param_dtype, lora=lora)
    worker = Worker(torch.device("cpu"))
    build_one(worker, "policy", path, layout, optimizer=OPTIMIZER, temperature=temperature)
    build_one(worker, "reference", path, layout.frozen(), temperature=temperature)
    worker.build_rollout(
        ModelConfig(path=str(path)).model_dump_json(),
        SamplingConfig(max_concurrent_sequences=5, engine=engine).model_dump_json(),
        param_dtype,
        "" if layout.lora is None else layout.lora.model_dump_json(),
    )
    algorithm = AlgorithmConfig(policy_loss={"clip_low": 0.5}, num_epochs=2)
    worker.use_loss("policy", LossSource.of("policy", algorithm, kl_coef=0).model_dump_json())
    return worker


def build_everyone(folder, offload: dict[str, str]) -> Worker:
    """The reference and the reward model are frozen."""
    worker = Worker(torch.device("cpu"))
    for role, head in ROLES.items():
        kind = offload.get(role, "none")
        layout = EngineConfig(param_offload=kind in ("params", "both"), optimizer_offload=kind in ("optimizer", "both"))
        is_trained = role in ("policy", "critic")
        build_one(
            worker,
            role,
            folder.parent / "scorer" if role == "reward" else folder,
            layout if is_trained else layout.frozen(),
            optimizer=OPTIMIZER if is_trained else None,
            head=head,
        )
    worker.build_rollout(
        ModelConfig(path=str(folder)).model_dump_json(),
        SamplingConfig(max_concurrent_sequences=5).model_dump_json(),
        "float32",
    )
    algorithm = AlgorithmConfig(policy_loss={"clip_low": 0.5}, num_epochs=2)
    worker.use_loss("policy", LossSource.of("policy", algorithm, kl_coef=0).model_dump_json())
    worker.use_loss("critic", LossSource.of("value", CriticConfig()).model_dump_json())
    worker.sync_weights(0)
    return worker


def engine_of(worker, role="policy"):
    return worker.engines[role].engine


def bytes_on_device(engine) -> tuple[int, int]:
    """Of the weights, and of the optimizer's states."""
    return tuple(
        sum(storage.nbytes() for storage in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())
        for tensors in (
            [parameter.to_local() for parameter in engine._model.parameters()],
            list(engine._optimizer.state_tensors()) if engine._optimizer else [],
        )
    )


def roll_out(worker: Worker) -> list[Sample]:
    samples = []
    for request, group in zip(REQUESTS, worker.generate(REQUESTS), strict=True):
        for completion in group:
            token_ids = torch.tensor(request.prompt_ids + completion.token_ids)
            place = torch.arange(len(token_ids)) - len(request.prompt_ids)
            logprobs = torch.zeros(len(token_ids))
            logprobs[place >= 0] = torch.tensor(completion.logprobs)
            samples.append(
                Sample(
                    uid=request.uid,
                    token_ids=token_ids,
                    loss_mask=place >= 0,
                    rollout_logprobs=logprobs,
                    advantages=torch.where(place >= 0, 1.0 - 2.0 * (len(samples) % 2), 0.0),
                )
            )
    return samples


def trainer_logprobs(worker: Worker, samples: list[Sample], role="policy") -> list[torch.Tensor]:
    packed = pack(samples, num_shards=1, max_tokens=40)
    assert len(packed.shards[0]) > 2  # several micro-batches, so packing is part of the comparison
    return unpack(packed, [worker.score(packed.shards[0], role, True)])


def train(worker: Worker, samples: list[Sample], role="policy"):
    packed = pack(samples, num_shards=1, max_tokens=40)
    return worker.train(packed.shards[0], packed.denominators, role, "")


def score(worker, samples, role="policy", *, max_tokens=10):
    packed = pack(samples, num_shards=1, max_tokens=max_tokens)
    return unpack(packed, [worker.score(packed.shards[0], role, True)])


def largest_difference(worker: Worker, samples: list[Sample]) -> float:
    pairs = zip(trainer_logprobs(worker, samples), samples, strict=True)
    return max(float((values - sample.rollout_logprobs).abs().max()) for values, sample in pairs)


def with_values(worker, samples):
    """What a critic learns from."""
    values = score(worker, samples, "critic", max_tokens=40)
    return [replace(sample, values=v, returns=torch.where(sample.loss_mask, v + 1.0, 0.0)) for sample, v in
            zip(samples, values, strict=True)]  # fmt: skip


def supervised_samples():
    return [
        Sample(uid="a", token_ids=torch.tensor([4, 9, 30, 2]), loss_mask=torch.tensor([False, False, True, True])),
        Sample(uid="b", token_ids=torch.tensor([50, 9]), loss_mask=torch.tensor([False, True])),
    ]

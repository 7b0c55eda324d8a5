"""push_weights and pull_weights: from the shards of two trainer ranks into an engine of a third process."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ends import DictReceiver, DictSender, random_weights, run_ends
from live_bytes import UNITS, LiveBytes, ModelSender, unit_bytes
from tiny_models import empty_model, families, random_samples, tiny_folder

from shardwise.config import EngineConfig, LoraConfig, OptimizerConfig
from shardwise.data import pack, unpack
from shardwise.engine import TrainEngine
from shardwise.engine.files.loading import load_weights
from shardwise.recipes.losses import SFT_LOSS
from shardwise.rollout import EmbeddedEngine
from shardwise.transfer import (
    ProcessGroupMedium,
    SharedMemoryMedium,
    WeightSyncError,
    pull_weights,
    push_weights,
)

SEQUENCES = [9, 13, 6, 11]
CPU = torch.device("cpu")


def train_and_push(folder, lora, store, rank, _join):
    """One step on two ranks with a default group of their own; only rank 0 has an end of the medium. Returns what the
    trainer gives the tokens, and the receipt."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{store}-trainers", 2), rank=rank, world_size=2)
    config = EngineConfig(param_dtype="float32", lora=lora)
    optimizer = OptimizerConfig(learning_rate=0.02)
    engine = TrainEngine.build(folder, config, device=CPU, optimizer=optimizer, total_steps=4, seed=0)
    samples = random_samples(SEQUENCES)
    packed = pack(samples, num_shards=2, max_tokens=64)
    engine.forward_backward(packed.shards[rank], SFT_LOSS.function, packed.denominators)
    engine.optim_step()
    medium = ProcessGroupMedium.join(dist.FileStore(store, -1), 0, 2) if rank == 0 else None
    receipt = push_weights(engine.named_weights(torch.float32), medium, version=1, bucket_bytes=1 << 14)
    whole = [replace(sample, loss_mask=torch.arange(len(sample.token_ids)) > 0) for sample in samples]
    packed = pack(whole, num_shards=2, max_tokens=64)
    outputs = engine.forward(packed.shards[rank], temperature=1.0)
    parts = [None, None]
    dist.all_gather_object(parts, [out.logprobs for out in outputs])
    return [values[1:].tolist() for values in unpack(packed, parts)], receipt


def pull_and_score(folder, store, _join):
    """No default group at all."""
    engine = EmbeddedEngine.from_folder(folder, dtype=torch.float32, max_rows=2, device=CPU)
    sequences = [sample.token_ids.tolist() for sample in random_samples(SEQUENCES)]
    before = engine.logprobs(sequences)
    receipt = pull_weights(engine, ProcessGroupMedium.join(dist.FileStore(store, -1), 1, 2))
    return before, engine.logprobs(sequences), receipt


LORA = LoraConfig(rank=3, alpha=12)


@pytest.mark.parametrize(
    ("family", "lora"),
    [("qwen3", None), ("llama", None), ("qwen3_moe", None), ("llama", LORA), ("gpt2", LORA)],
    ids=["tied", "untied", "mixture of experts", "adapters merged", "adapters merged into [in, out]"],
)
def test_the_engine_at_the_other_end_computes_what_the_trainer_does(tmp_path, family, lora):
    """1e-4 nats in float32; the step before the sync made a hundred times as much."""
    folder = tiny_folder(family, tmp_path / family)
    store = str(tmp_path / "store")
    trainers = [partial(train_and_push, folder, lora, store, rank) for rank in range(2)]
    (trainer, sent), (_, without_end), (before, after, received) = run_ends(
        [*trainers, partial(pull_and_score, folder, store)], tmp_path, timeout_seconds=120
    )
    assert sent == received
    assert received.num_proven == received.num_tensors
    assert without_end is None
    largest = [
        max(abs(a - b) for ours, theirs in zip(trainer, rows, strict=True) for a, b in zip(ours, theirs, strict=True))
        for rows in (before, after)
    ]
    assert largest[1] < 1e-4
    assert largest[0] > 1e-2


BUCKET_BYTES = 1 << 20


def peak_of_pushing(folder, store, kind, rank, _join):
    """The most bytes beside the shards of two trainer ranks."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{store}-trainers", 2), rank=rank, world_size=2)
    trainer = empty_model(folder, dim=0)
    load_weights(trainer, folder)
    medium = kind.join(dist.FileStore(store, -1), 0, 2) if rank == 0 else None
    with LiveBytes(trainer) as live:
        push_weights(ModelSender(trainer).named_weights(torch.float32), medium, version=1, bucket_bytes=BUCKET_BYTES)
    return live.peak


def peak_of_pulling(folder, store, kind, _join):
    """The most bytes beside the rollout weights; those of a unit, and of its largest tensor."""
    engine = EmbeddedEngine.from_folder(folder, dtype=torch.float32, max_rows=2, device=CPU)
    medium = kind.join(dist.FileStore(store, -1), 1, 2)
    with LiveBytes(engine._model) as live:
        pull_weights(engine, medium)
    return live.peak, unit_bytes(engine._model), max(weight.nbytes for _, weight in engine.served_weights())


@pytest.mark.parametrize("kind", [SharedMemoryMedium, ProcessGroupMedium])
@pytest.mark.parametrize("family", families("qwen3_moe", of=UNITS))
def test_a_weight_switch_takes_one_unit_beside_the_rollout_weights(tmp_path, family, kind):
    """And two buckets. The rank that sends holds a tensor more, which is hashed while the next one is gathered: 1.4
    units are enough for both. The rank that receives holds none: what is larger than a bucket is put together where it
    is served."""
    folder, store = tiny_folder(family, tmp_path / family, **UNITS[family]), str(tmp_path / "store")
    pushing = [partial(peak_of_pushing, folder, store, kind, rank) for rank in range(2)]
    sending, gathering, (receiving, unit, largest) = run_ends(
        [*pushing, partial(peak_of_pulling, folder, store, kind)], tmp_path, timeout_seconds=120
    )
    assert gathering <= unit
    assert sending <= 1.4 * unit + 2 * BUCKET_BYTES
    assert receiving <= 2.1 * BUCKET_BYTES < largest


def test_a_rank_without_an_end_takes_part_in_gathering():
    gathered = []
    sender = DictSender(random_weights(1), gathered.append)
    assert push_weights(sender.named_weights(torch.bfloat16), None, version=1) is None
    assert gathered == list(random_weights(1))


def push(join):
    gathered = []
    sender = DictSender(random_weights(1), gathered.append)
    try:
        result = push_weights(
            sender.named_weights(torch.bfloat16), join(ProcessGroupMedium), version=1, bucket_bytes=4096
        )
    except WeightSyncError as error:
        result = error
    return result, gathered


class StoppingReceiver(DictReceiver):
    """Takes two tensors and says nothing of the rest."""

    def load_weights(self, weights) -> None:
        super().load_weights(pair for pair, _ in zip(weights, range(2), strict=False))


class AlteringReceiver(DictReceiver):
    """Holds another value than arrived."""

    def load_weights(self, weights) -> None:
        super().load_weights(weights)
        self.weights["experts"][1, 2, 3] += 1


def pull(make, join):
    receiver = make(random_weights(0))
    try:
        return pull_weights(receiver, join(ProcessGroupMedium)), receiver.version
    except WeightSyncError as error:
        return error, receiver.version


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (StoppingReceiver, "the engine stopped taking weights before the last"),
        (AlteringReceiver, "the engine serves other values of experts than were sent"),
    ],
)
def test_f40_an_engine_that_does_other_than_it_was_told_is_found_out(tmp_path, make, message):
    (at_sender, gathered), (at_receiver, version) = run_ends([push, partial(pull, make)], tmp_path)
    assert str(at_receiver) == f"weight sync 1: {message}"
    assert str(at_sender) == f"weight sync 1 failed at receiver 1: {at_receiver}"
    assert version is None
    assert gathered == list(random_weights(1))  # to the end: other trainer ranks wait in the same collectives


class FlippingMedium:
    """One bit of the second bucket arrives otherwise than it was sent."""

    def __init__(self, medium):
        self._medium, self._num_received = medium, 0

    def __getattr__(self, name):
        return getattr(self._medium, name)

    def receive(self, *place):
        header, blocks = self._medium.receive(*place)
        self._num_received += 1
        if self._num_received == 2:
            blocks[0][3] ^= 1
        return header, blocks


def pull_flipped(readable, join):
    receiver = DictReceiver(random_weights(0), readable=readable)
    try:
        return pull_weights(receiver, FlippingMedium(join(ProcessGroupMedium))), receiver.version
    except WeightSyncError as error:
        return error, receiver.version


@pytest.mark.parametrize(
    ("readable", "message"),
    [
        (True, r"the engine serves other values of \w+ than were sent"),
        (False, r"other values of \w+ arrived than were sent"),
    ],
)
def test_what_was_altered_on_its_way_is_named_and_not_committed(tmp_path, readable, message):
    (at_sender, _), (at_receiver, version) = run_ends([push, partial(pull_flipped, readable)], tmp_path)
    assert re.fullmatch(f"weight sync 1: {message}", str(at_receiver))
    assert str(at_sender) == f"weight sync 1 failed at receiver 1: {at_receiver}"
    assert version is None


def test_of_an_engine_that_cannot_read_back_only_the_arrival_is_proven(tmp_path):
    (sent, _), (received, version) = run_ends([push, partial(pull, partial(DictReceiver, readable=False))], tmp_path)
    assert sent == received
    assert (received.num_proven, version) == (0, 1)

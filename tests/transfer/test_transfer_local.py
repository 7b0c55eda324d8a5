"""sync_local into the engine that recipes use, from senders that do right and wrong."""

from functools import partial
from pathlib import Path

import pytest
import torch
from live_bytes import UNITS, LiveBytes, ModelSender, unit_bytes
from tiny_models import empty_model, tiny_folder
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.engine.files.loading import load_weights
from shardwise.rollout import EmbeddedEngine
from shardwise.rollout.kv_cache import CACHED_ATTENTION, register_cached_attention
from shardwise.transfer import WeightSyncError, sync_local
from shardwise.transfer.receipt import NotFiniteWeightsError
from shardwise.types import GenerateRequest

NORM, PROJECTION = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"


def build_engine(seed: int, dtype=torch.float32) -> EmbeddedEngine:
    register_cached_attention()
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=1,
        attn_implementation=CACHED_ATTENTION,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return EmbeddedEngine(model.to(dtype).eval(), max_rows=2, device=torch.device("cpu"))


class Sender:
    """Sends the weights of an engine; `tamper` may change the dict before they go, one bit or a whole tensor."""

    def __init__(self, seed: int, tamper=lambda weights: None) -> None:
        self._weights = {name: tensor.clone() for name, tensor in build_engine(seed).served_weights()}
        tamper(self._weights)

    def named_weights(self, dtype):
        return ((name, tensor.to(dtype)) for name, tensor in self._weights.items())


class LosingEngine:
    """Passes everything to an engine, except that what arrives is changed on the way."""

    def __init__(self, engine: EmbeddedEngine, tamper) -> None:
        self._engine, self._tamper = engine, tamper

    def load_weights(self, weights) -> None:
        arrived = {name: tensor.clone() for name, tensor in weights}
        self._tamper(arrived)
        self._engine.load_weights(arrived.items())

    def served_weights(self):
        return self._engine.served_weights()

    def served_checksums(self):
        return self._engine.served_checksums()

    def commit_weights(self, version) -> None:
        self._engine.commit_weights(version)


def version_of(engine: EmbeddedEngine) -> int:
    request = GenerateRequest(uid="a", prompt_ids=[4, 5], max_tokens=3, temperature=0.0)
    return engine.generate([request])[0][0].policy_version


def assert_refuses_until_a_whole_sync(engine: EmbeddedEngine) -> None:
    with pytest.raises(RuntimeError, match="sync them whole before it generates"):
        version_of(engine)
    sync_local(Sender(1).named_weights(torch.float32), engine, version=3)
    assert version_of(engine) == 3
    assert tokens_of(engine) == tokens_of(build_engine(1))


def tokens_of(engine: EmbeddedEngine) -> list[list[int]]:
    wanted = [
        GenerateRequest(uid=f"{i}", prompt_ids=[2 + i, 5], max_tokens=8, temperature=1.0, num_completions=2)
        for i in range(4)
    ]
    return [completion.token_ids for group in engine.generate(wanted) for completion in group]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_a_sync_the_engine_serves_what_was_sent_and_says_how_much(dtype):
    engine = build_engine(0, dtype)
    before = tokens_of(engine)
    receipt = sync_local(Sender(1).named_weights(dtype), engine, version=5)
    expected = build_engine(1, dtype)
    assert tokens_of(engine) == tokens_of(expected)
    assert tokens_of(engine) != before
    assert version_of(engine) == 5
    # Embedding and head 2 x 32 x 16; four projections 16 x 16; three of the MLP 24 x 16; three norms of 16.
    numbers = 2 * 32 * 16 + 4 * 16 * 16 + 3 * 24 * 16 + 3 * 16
    assert (receipt.version, receipt.num_bytes, receipt.num_tensors) == (5, numbers * dtype.itemsize, 12)
    assert receipt.num_proven == 12


def test_tensors_that_may_be_infinite_are_synced_unless_they_hold_nan():
    def bound(value):
        return lambda weights: weights[NORM].fill_(value)

    engine = build_engine(0)
    sync = partial(sync_local, receiver=engine, version=1)
    for value, may_be_infinite in ((torch.inf, []), (torch.inf, [PROJECTION]), (torch.nan, [NORM])):
        with pytest.raises(NotFiniteWeightsError, match=f"{NORM} holds values that are not finite"):
            sync(Sender(1, bound(value)).named_weights(torch.float32), may_be_infinite=may_be_infinite)
    assert sync(Sender(1, bound(-torch.inf)).named_weights(torch.float32), may_be_infinite={NORM}).num_proven == 12


def flip_one_bit(weights):
    weights[PROJECTION].view(torch.int32)[3, 5] ^= 1


def transpose(weights):
    weights[PROJECTION] = weights[PROJECTION].t().contiguous()


def drop(weights):
    del weights[NORM]


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (drop, f"the engine serves {NORM}, which was not sent"),
        (lambda weights: weights.update(extra=torch.zeros(2)), "extra was sent, which the engine does not serve"),
        (lambda weights: weights.update({NORM: torch.zeros(1, 16)}), rf"{NORM} was sent as torch.float32 \[1, 16\]"),
        (lambda weights: weights.update({NORM: torch.zeros(1)}), rf"{NORM} was sent as torch.float32 \[1\]"),
    ],
    ids=["dropped", "added", "another shape", "broadcastable"],
)
def test_a_sender_that_differs_from_the_engine_is_named_and_nothing_committed(tamper, named):
    engine = build_engine(0)
    sync_local(Sender(0).named_weights(torch.float32), engine, version=1)
    with pytest.raises(WeightSyncError, match=f"weight sync 2: {named}"):
        sync_local(Sender(1, tamper).named_weights(torch.float32), engine, version=2)
    assert_refuses_until_a_whole_sync(engine)


@pytest.mark.parametrize(
    ("tamper", "named"),
    [(flip_one_bit, PROJECTION), (transpose, PROJECTION), (lambda weights: weights.pop(PROJECTION), PROJECTION)],
    ids=["one bit", "transposed", "lost"],
)
def test_f40_a_tensor_damaged_or_lost_on_the_way_is_named_and_nothing_committed(tamper, named):
    engine = build_engine(0)
    with pytest.raises(WeightSyncError, match=f"the engine serves other values of {named} than were sent"):
        sync_local(Sender(1).named_weights(torch.float32), LosingEngine(engine, tamper), version=2)
    assert_refuses_until_a_whole_sync(engine)


def test_a_rank_whose_engine_fails_takes_part_in_gathering_to_the_end():
    """Else the other trainer ranks would wait for it in the next tensor's collective."""
    gathered = []

    class CountingSender(Sender):
        def named_weights(self, dtype):
            for name, tensor in super().named_weights(dtype):
                gathered.append(name)
                yield name, tensor

    sender = CountingSender(1, lambda weights: weights.update({"model.embed_tokens.weight": torch.zeros(1)}))
    with pytest.raises(WeightSyncError, match="embed_tokens"):
        sync_local(sender.named_weights(torch.float32), build_engine(0), version=2)
    assert len(gathered) == 12


def peak_of_two_syncs(folder):
    """The most bytes beside the shards and the rollout weights; those of a unit and of all rollout weights."""
    trainer = empty_model(Path(folder), dim=0)
    load_weights(trainer, Path(folder))
    engine = EmbeddedEngine.from_folder(Path(folder), dtype=torch.float32, max_rows=2, device=torch.device("cpu"))
    with LiveBytes(trainer, engine._model) as live:
        for version in (1, 2):
            sync_local(ModelSender(trainer).named_weights(torch.float32), engine, version=version)
    return live.peak, unit_bytes(engine._model), sum(weight.nbytes for _, weight in engine.served_weights())


@pytest.mark.parametrize("family", UNITS)
def test_a_weight_switch_takes_one_unit_beside_the_rollout_weights(run_ranks, tmp_path, family):
    """A tensor, and this rank's share of it as it is sent: of fused experts two thirds and one third of a layer."""
    folder = tiny_folder(family, tmp_path, **UNITS[family])
    for peak, unit, whole in run_ranks(peak_of_two_syncs, 2, str(folder)):
        assert peak <= unit
        assert whole > 2 * unit

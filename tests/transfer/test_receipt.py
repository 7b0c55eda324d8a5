from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from stand_in_streams import OnAccelerator, Streams

from shardwise.checksum import checksums
from shardwise.transfer import Manifest, WeightSyncError, receipt

SERVED = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.arange(4.0).view(2, 2))]


def test_receipt_counts_tensors_and_bytes():
    weights = {"a": torch.ones(3, 5, dtype=torch.bfloat16), "b": torch.ones(7), "c": torch.tensor(2.0)}
    manifest = Manifest(12, weights.items())
    assert dict(manifest.record(weights.items())).keys() == weights.keys()
    assert manifest.verify(checksums(weights.items())) == 3
    receipt = manifest.receipt()
    assert (receipt.version, receipt.num_tensors, receipt.num_bytes) == (12, 3, 3 * 5 * 2 + 7 * 4 + 4)


def receipt_of(weights):
    manifest = Manifest(1)
    list(manifest.record(weights))
    return manifest.receipt()


def test_receipts_are_equal_when_names_order_and_values_are():
    receipts = [receipt_of(weights) for weights in (SERVED, SERVED[::-1], [("c", SERVED[0][1]), SERVED[1]])]
    assert receipts[0] == receipt_of([(name, tensor.clone()) for name, tensor in SERVED])
    assert len({receipt.digest for receipt in receipts}) == 3
    assert replace(receipts[0], seconds=3.0, num_bytes_moved=5, num_proven=1) == receipts[0]  # differ between the sides


def test_weights_that_cannot_be_read_back_are_counted_apart_and_still_have_a_form():
    served = [SERVED[0], ("b", SERVED[1][1].to("meta"))]
    manifest = Manifest(1, served)
    list(manifest.record(SERVED))
    assert manifest.verify(checksums(served)) == 1
    with pytest.raises(WeightSyncError, match=r"b was sent as torch\.float64"):
        Manifest(1, served).begin("b", torch.float64, (2, 2))


def sync_to_nowhere(served, sent):
    manifest = Manifest(3, served)
    list(manifest.record(sent))
    return manifest.verify(checksums(served))


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([("a", SERVED[0][1])], "the engine serves b, which was not sent"),
        ([*SERVED, ("c", torch.zeros(1))], "c was sent, which the engine does not serve"),
        ([SERVED[0], ("b", SERVED[1][1].t())], "the engine serves other values of b than were sent"),
        ([SERVED[0], ("b", -SERVED[1][1])], "the engine serves other values of b than were sent"),
        # The same bytes under another shape, and values that an engine would round without a word.
        (
            [("a", SERVED[0][1].view(3, 2)), SERVED[1]],
            r"a was sent as torch.float32 \[3, 2\], the engine serves .*\[2, 3\]",
        ),
        ([SERVED[0], ("b", SERVED[1][1].double())], "b was sent as torch.float64"),
        ([SERVED[0], SERVED[0], SERVED[1]], "a was sent twice"),
    ],
)
def test_f40_any_difference_is_an_error_that_names_the_tensor(sent, message):
    with pytest.raises(WeightSyncError, match=f"weight sync 3: {message}"):
        sync_to_nowhere(SERVED, sent)


def test_a_tensor_that_the_engine_stopped_serving_is_named():
    manifest = Manifest(3, SERVED)
    list(manifest.record(SERVED))
    with pytest.raises(WeightSyncError, match="the engine does not serve b"):
        manifest.verify(checksums(SERVED[:1]))


def test_a_tensor_without_a_place_is_not_passed_on():
    received = []
    with pytest.raises(WeightSyncError):
        received.extend(Manifest(1, SERVED).record([("x", torch.zeros(1)), *SERVED]))
    assert received == []


def test_a_tensor_that_is_being_hashed_is_known_to_be_sent_already():
    manifest = Manifest(3)
    with ThreadPoolExecutor(1) as pool:
        noted = manifest.hashed(*SERVED[0], pool)
        with pytest.raises(WeightSyncError, match="a was sent twice"):
            manifest.hashed(*SERVED[0], pool)
        assert noted() == dict(checksums(SERVED))["a"]


def test_what_is_sent_is_hashed_behind_what_gathered_it(monkeypatch):
    streams, seen = Streams(), []
    monkeypatch.setattr(torch.accelerator, "current_stream", streams.of_device)
    original = receipt._checksum_if_finite

    def watched(tensor, **options):
        seen.append(streams.current)
        return original(tensor, **options)

    monkeypatch.setattr(receipt, "_checksum_if_finite", watched)

    def gathered():
        for number, (name, tensor) in enumerate(SERVED):
            streams.use(f"gather {number}")
            yield name, tensor.as_subclass(OnAccelerator)

    manifest = Manifest(1)
    for _ in manifest.record(gathered()):
        streams.use("engine")
    assert seen == ["gather 0", "gather 1"]
    assert manifest.checksums == dict(checksums(SERVED))

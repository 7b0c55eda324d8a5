"""Weight sync over a medium: from the shards of all trainer ranks into the rollout engines at its other ends.

It is a transaction: every end says what it has, and only when all say the same do the receivers commit the version.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import NoReturn

from torch import Tensor

from shardwise.checksum import checksum
from shardwise.config import ExportError
from shardwise.memfd import SharedTensors
from shardwise.transfer.buckets import (
    DEFAULT_BUCKET_BYTES,
    Assembly,
    BucketReader,
    BucketWriter,
    Entry,
    as_bytes,
    encode_whole,
)
from shardwise.transfer.delta import DeltaDecoder, DeltaEncoder
from shardwise.transfer.medium import SENDER, Medium, MediumError, name_of
from shardwise.transfer.receipt import (
    Manifest,
    NotFiniteWeightsError,
    SyncReceipt,
    WeightSyncError,
    gathered_to_the_end,
)
from shardwise.types import WeightReceiver

_TOLD = {kind.__name__: kind for kind in (ExportError, NotFiniteWeightsError)}
"""Errors of the sender that every end raises: they say what to do, and errors elsewhere are due to them."""
_MAX_MESSAGE = 2000
"""Characters of an error that the other ends are told."""


def push_weights(
    weights: Iterator[tuple[str, Tensor]],
    medium: Medium | None,
    *,
    version: int,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    delta: DeltaEncoder | None = None,
    may_be_infinite: Collection[str] = (),
) -> SyncReceipt | None:
    """Collective over the ranks that `weights` are gathered from. Streams them to all receivers and waits for their
    receipts.

    Args:
        weights: Hugging Face names and tensors, in the same order on every rank, as TrainEngine.named_weights yields
            them. A tensor keeps its values as long as somebody holds it: it is sent while others are gathered.
        medium: the sending end; None on the ranks that have none and only take part in gathering.
        bucket_bytes: size of the pieces that travel, a multiple of 16. Two of them are held at a time, over a process
            group the tensors of a third, and as many bytes of tensors that may still be hashed.
        delta: sends only what changed since the last sync with the same encoder, if all receivers still hold that.
        may_be_infinite: names of tensors that may hold infinities: buffers.
    Returns:
        The receipt that all receivers agree with; None on ranks without an end of the medium.
    Raises:
        MediumError: a receiver was silent for too long or is gone; the medium can carry nothing any more.
        WeightSyncError: a receiver does not hold what was sent. No receiver has committed the version.
        NotFiniteWeightsError: at every end: a weight is not finite. ExportError: at every end: the medium could not
            write the weights, and can once the user has fixed the cause.
    """
    with gathered_to_the_end(weights):
        if medium is None:
            return None
        started = time.perf_counter()
        bases = _meet(medium, f"weight sync {version}: beginning", "null")[SENDER + 1 :]
        if delta is not None:
            delta.begin([json.loads(base) for base in bases])
        manifest = Manifest(version, may_be_infinite=may_be_infinite)
        writer = BucketWriter(medium, version=version, bucket_bytes=bucket_bytes)
        encode = encode_whole if delta is None else delta.encode

        def send() -> SyncReceipt:
            hashing: deque[tuple[int, Callable[[], int]]] = deque()
            num_earlier_bytes = 0  # of all in it but the last
            there = ((name, tensor.detach().to(medium.device).contiguous()) for name, tensor in weights)
            with ThreadPoolExecutor(1) as pool:
                for name, tensor in there:
                    num_earlier_bytes += hashing[-1][0] if hashing else 0
                    hashing.append((tensor.nbytes, manifest.hashed(name, tensor, pool)))
                    encoding, payload = encode(name, tensor)
                    if encoding == "whole" and writer.place(name, payload):
                        encoding = "placed"
                    writer.write(Entry.of(name, tensor, encoding, payload.numel()), payload)
                    del tensor, payload  # else they would stay while the next ones are gathered
                    # Tensors are hashed while they and later ones travel, and are held until then.
                    while num_earlier_bytes > bucket_bytes:
                        num_earlier_bytes -= hashing[0][0]
                        writer.prove(hashing.popleft()[1]())
                for _, noted in hashing:
                    writer.prove(noted())
            writer.finish()
            return manifest.receipt(num_bytes_moved=writer.num_bytes)

        receipt = _concluded(medium, version, send, on_failure=lambda error: writer.give_up(_described(error)))
        if delta is not None:
            delta.commit(version)
        return replace(receipt, seconds=time.perf_counter() - started)


def pull_weights(
    receiver: WeightReceiver,
    medium: Medium,
    *,
    version: int | None = None,
    delta: DeltaDecoder | None = None,
    assembly: Assembly | None = None,
    memory: SharedTensors | None = None,
) -> SyncReceipt:
    """Receives one sync into an engine, verifies what arrived and what is served, and commits the version.

    From the first tensor until the commit the engine holds weights of two versions and refuses to generate, also after
    an error, until a whole sync has succeeded.

    Args:
        version: the version that is due; None takes whatever comes.
        delta: lets the sender send only what changed; the same decoder at every sync of an engine.
        assembly: for tensors larger than a bucket; passing the same one at every sync avoids new memory.
        memory: what the engine serves from, or part of it: the sender may write there itself.
    Raises:
        MediumError: the sender was silent for too long or is gone; the medium can carry nothing any more.
        WeightSyncError: names what was lost, altered, has no place in the engine or is not served; or another receiver
            failed. The version is not committed.
        NotFiniteWeightsError, ExportError: as `push_weights`.
    """
    started = time.perf_counter()
    if memory is not None:
        receiver.load_weights(())  # from here on nothing is generated
        try:
            medium.expose(memory, memory.places(dict(receiver.served_weights())))
        except MediumError as error:
            _break_off(medium, error)
    due = "" if version is None else f" {version}"
    _meet(medium, f"weight sync{due}: beginning", json.dumps(None if delta is None else delta.begin()))
    reader = BucketReader(medium.receive, assembly)
    load = partial(load_verified, reader, receiver, version=version, delta=delta)
    receipt = _concluded(medium, version, load, on_failure=lambda _: reader.drain())
    receiver.commit_weights(receipt.version)
    if delta is not None:
        delta.commit(receipt.version)
    return replace(receipt, seconds=time.perf_counter() - started)


def load_verified(
    reader: BucketReader, receiver: WeightReceiver, *, version: int | None, delta: DeltaDecoder | None = None
) -> SyncReceipt:
    """Loads all that arrives into an engine and verifies it; commits nothing. Raises as `pull_weights`."""
    served = dict(receiver.served_weights())
    is_loading = False

    def place(entry: Entry) -> Tensor | None:
        nonlocal is_loading
        found = _place(served, entry)
        if found is not None and not is_loading:
            receiver.load_weights(())  # from here on nothing is generated
            is_loading = True
        return found

    manifest = Manifest(reader.begin(version, place), served.items())
    is_loading = True
    unreadable: dict[str, int] = {}
    receiver.load_weights(_arrived(reader, manifest, served, delta, unreadable))
    if not reader.is_exhausted:
        raise WeightSyncError(f"weight sync {reader.version}: the engine stopped taking weights before the last")
    for name, sent in reader.checksums.items():
        if unreadable.get(name, sent) != sent:
            raise WeightSyncError(f"weight sync {reader.version}: other values of {name} arrived than were sent")
        manifest.note(name, sent, served[name].nbytes)
    num_proven = manifest.verify(receiver.served_checksums())
    return manifest.receipt(num_bytes_moved=reader.num_bytes, num_proven=num_proven)


def _arrived(
    reader: BucketReader,
    manifest: Manifest,
    served: Mapping[str, Tensor],
    delta: DeltaDecoder | None,
    unreadable: dict[str, int],
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors as they come, without those that have not changed or were placed. Of those that the engine
    cannot read back, the checksum of what arrived is put into `unreadable`."""
    for entry, payload in reader.entries():
        manifest.begin(entry.name, entry.torch_dtype, entry.shape)
        before = served[entry.name]
        is_unchanged = entry.encoding == "delta" and not entry.num_bytes and not before.is_meta
        if is_unchanged or entry.encoding == "placed":
            continue
        tensor = _decoded(entry, payload, before, delta)
        if before.is_meta:
            unreadable[entry.name] = checksum(tensor)
        yield entry.name, tensor


def _place(served: Mapping[str, Tensor], entry: Entry) -> Tensor | None:
    """The memory that the engine serves a tensor from; None if the entry cannot be received there. Raises nothing: a
    medium that asks has taken the header of a bucket whose data is on its way."""
    tensor = served.get(entry.name)
    if tensor is None or tensor.is_meta or entry.encoding != "whole":
        return None
    of_served = Entry.of(entry.name, tensor, entry.encoding, tensor.nbytes)
    return as_bytes(tensor) if of_served == entry and tensor.is_contiguous() else None


def _decoded(entry: Entry, payload: Tensor, served: Tensor, delta: DeltaDecoder | None) -> Tensor:
    if delta is not None:
        return delta.decode(entry, payload, served)
    if entry.encoding == "delta":
        raise WeightSyncError(
            f"{entry.name} was sent as what changed since an earlier version, which this end does not have; send whole "
            "weights (rollout.placement.delta=false), or let this end take part from the first version on"
        )
    return entry.tensor(payload)


def _concluded(
    medium: Medium,
    version: int | None,
    transfer: Callable[[], SyncReceipt],
    *,
    on_failure: Callable[[Exception], None],
) -> SyncReceipt:
    """Does one end's part, tells the others how it went, and learns how theirs went.

    Args:
        on_failure: keeps the other ends going until all meet again.
    Returns:
        The receipt, which all ends agree on; its `seconds_of_proof` are those of the end that spent most.
    Raises:
        WeightSyncError: some end failed, this one or another. This end's own error is raised as it is.
        ExportError, NotFiniteWeightsError: the sender's, at every end.
    """
    phase = f"weight sync{'' if version is None else f' {version}'}: comparing receipts"
    try:
        receipt = transfer()
    except MediumError as error:
        _break_off(medium, error)
    except Exception as error:
        if (cause := _report(medium, phase, error, on_failure)) is not None:
            raise cause from None
        raise
    answers = _meet(medium, phase, json.dumps({"receipt": asdict(receipt)}))
    seconds_of_proof = receipt.seconds_of_proof
    for rank, answer in enumerate(map(json.loads, answers)):
        if "failure" in answer:
            raise WeightSyncError(f"weight sync {receipt.version} failed at {name_of(rank)}: {answer['failure']}")
        other = SyncReceipt(**answer["receipt"])
        if other != receipt:
            raise WeightSyncError(
                f"weight sync {receipt.version}: {name_of(rank)} has {other}, this end has {receipt}; both should be "
                "of the same weights"
            )
        seconds_of_proof = max(seconds_of_proof, other.seconds_of_proof)
    return replace(receipt, seconds_of_proof=seconds_of_proof)


def _report(medium: Medium, phase: str, error: Exception, on_failure: Callable[[Exception], None]) -> Exception | None:
    """Tells the other ends about an error; they wait for it whatever else goes wrong here. Returns the sender's error
    if it is one of _TOLD."""
    try:
        try:
            on_failure(error)
        except MediumError:
            raise
        except Exception as second:
            error.add_note(f"then, on going on for the other ends: {_described(second)}")
        told = {"kind": type(error).__name__, "message": str(error)[:_MAX_MESSAGE]}
        answers = medium.meet(phase, json.dumps({"failure": _described(error), **told}))
        match json.loads(answers[SENDER]):
            case {"kind": kind, "message": message} if kind in _TOLD:
                return _TOLD[kind](message)
    except MediumError as second:
        medium.break_off(_described(second))
    return None


def _meet(medium: Medium, phase: str, message: str) -> list[str]:
    try:
        return medium.meet(phase, message)
    except MediumError as error:
        _break_off(medium, error)


def _break_off(medium: Medium, error: MediumError) -> NoReturn:
    """Raises the error together with the names of the ends that said nothing after it."""
    answers = medium.break_off(_described(error))
    silent = [name_of(rank) for rank, answer in enumerate(answers) if answer is None]
    message = f"{error}; nothing was heard from {' and '.join(silent)}" if silent else str(error)
    raise type(error)(message) from error


def _described(error: Exception) -> str:
    message = str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
    return message[:_MAX_MESSAGE]

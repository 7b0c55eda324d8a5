"""Replays a skipped optimizer step on one process, and compares what happens with what was recorded."""

import bisect
import json
import math
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from shardwise.config import ConfigError, ModelError, OptimizerConfig
from shardwise.console import counted
from shardwise.data import load_tokenizer
from shardwise.engine import Diagnosis, Fault
from shardwise.recipes.bundles import Bundle, MicroBatch, by_time
from shardwise.types import TokenBatch

MAX_SHOWN = 8
"""Most micro-batches, and most rows of a micro-batch, that are printed."""
TAIL_TOKENS = 48
"""Tokens at the end of a row that are printed."""

Met = tuple[MicroBatch, Fault]
"""A fault, and the micro-batch it is in."""


def replay(path: str, device: torch.device, *, micro_batch: int | None = None) -> bool:
    """Replays the step and prints what was found. Runs on one rank, whatever layout wrote the bundle.

    Args:
        path: a bundle, `nonfinite/step_N` of a run.
        micro_batch: only the one at this place of every rank; None: all.
    Returns:
        Whether all that was recorded happened again.
    Raises:
        ConfigError: no bundle, no such micro-batch, or the base of its adapter or the teacher is gone or has changed.
        ModelError: the bundle, the base or the teacher is damaged.
    """
    bundle = Bundle.read(path)
    bundle.require_models_outside()
    batches = _chosen(bundle, micro_batch)
    found = run_again(bundle, batches, device)
    met = sorted(
        ((batches[fault.micro_batch], fault) for fault in found.faults),
        key=lambda one: by_time(one[0].rank, one[0].index, one[1]),
    )
    is_whole = micro_batch is None
    differences = list(_differences(bundle, batches, found, met, is_whole=is_whole))
    for line in _report(bundle, batches, found, met, is_whole=is_whole):
        print(line)
    print(f"not reproduced ({'; '.join(differences)})" if differences else "reproduced", flush=True)
    return not differences


def _chosen(bundle: Bundle, micro_batch: int | None) -> list[MicroBatch]:
    batches = bundle.micro_batches()
    if micro_batch is None:
        return batches
    last = max(batch.index for batch in batches)
    if not 0 <= micro_batch <= last:
        raise ConfigError(
            f"--micro-batch {micro_batch}: {bundle.folder} has the micro-batches 0 to {last} of each rank"
        )
    return [batch for batch in batches if batch.index == micro_batch]


def run_again(bundle: Bundle, batches: Sequence[MicroBatch], device: torch.device) -> Diagnosis:
    """Runs the micro-batches as their ranks did, but one after the other."""
    source, loss = bundle.source(), bundle.step.loss.make()
    engine = source.build(device, optimizer=OptimizerConfig(), require_finite=False)  # no update is made
    engine.state.load_numbers(bundle.step.numbers)
    tokens = [batch.tokens for batch in batches]
    teacher, teacher_outputs = bundle.teacher_source(), None
    if teacher is not None and loss.divergence is not None:
        teacher_outputs = teacher.build(device, require_finite=False).teacher_outputs(tokens, loss.divergence)
    return engine.diagnose(
        tokens,
        loss.function,
        bundle.step.denominators,
        temperature=source.temperature,
        with_logprobs=loss.with_logprobs,
        with_entropy=loss.with_entropy,
        teacher_outputs=teacher_outputs,
        origins=[(batch.rank, batch.index) for batch in batches],
    )


def _differences(
    bundle: Bundle, batches: Sequence[MicroBatch], found: Diagnosis, met: Sequence[Met], *, is_whole: bool
) -> Iterator[str]:
    """Yields, in words, what was recorded and did not happen again, or not in the same place."""
    step = bundle.step
    for batch, loss in zip(batches, found.losses, strict=True):
        if math.isfinite(loss) != math.isfinite(batch.loss):
            yield f"the loss of {batch} was {batch.loss:.4g}, here {loss:.4g}"
    if is_whole and math.isfinite(found.grad_norm):
        yield f"the gradient norm was {step.grad_norm:.4g}, here {found.grad_norm:.4g}"
    run = {(batch.rank, batch.index) for batch in batches}
    recorded = [fault for rank, fault in step.faults if is_whole or (rank, fault.micro_batch) in run]
    if recorded:
        was, here = recorded[0], met[0][1] if met else None
        if here is None or (here.phase, here.module) != (was.phase, was.module):
            yield f"the first fault was {was}, here {here or 'none'}"


def _report(
    bundle: Bundle, batches: Sequence[MicroBatch], found: Diagnosis, met: Sequence[Met], *, is_whole: bool
) -> Iterator[str]:
    step = bundle.step
    num_tokens = sum(len(batch.tokens.input_ids) for batch in batches)
    yield (
        f"{bundle.folder}: optimizer step {step.number} of {step.role} on {counted(len(step.ranks), 'rank')}; "
        f"{counted(len(batches), 'micro-batch')} of {num_tokens:,} tokens, loss {step.loss.kind}"
    )
    if is_whole:
        yield f"gradient norm {found.grad_norm:.4g} (recorded {step.grad_norm:.4g})"
    bad = [
        f"{batch}: loss {loss:.4g} (recorded {batch.loss:.4g})"
        for batch, loss in zip(batches, found.losses, strict=True)
        if not (math.isfinite(loss) and math.isfinite(batch.loss))
    ]
    yield from bad[:MAX_SHOWN]
    if len(bad) > MAX_SHOWN:
        yield f"and {len(bad) - MAX_SHOWN} more losses that are not finite"
    if met:
        batch, fault = met[0]
        yield f"first in {batch}: {fault}"
        yield from _rows(bundle, batch.tokens, fault)
    else:
        yield "no tensor that is not finite"


def _rows(bundle: Bundle, tokens: TokenBatch, fault: Fault) -> Iterator[str]:
    """Describes the row that the fault is in; the rows of the whole micro-batch if it is in none."""
    starts, rows = tokens.cu_seqlens.tolist(), range(len(tokens.uids))
    if fault.token is not None:
        rows = range(bisect.bisect_right(starts, fault.token) - 1, len(rows))[:1]
    tokenizer = _tokenizer(bundle)
    for row in rows[:MAX_SHOWN]:
        start, stop = starts[row], starts[row + 1]
        place = "" if fault.token is None else f", from token {fault.token - start} of {stop - start} on"
        tail = tokens.input_ids[start:stop][-TAIL_TOKENS:].tolist()
        text = tail if tokenizer is None else json.dumps(tokenizer.decode(tail), ensure_ascii=False)
        yield f"  row {tokens.uids[row]}{place}, ends in {text}"


def _tokenizer(bundle: Bundle) -> PreTrainedTokenizerBase | None:
    try:
        return load_tokenizer(bundle.source().model)
    except ModelError:
        return None

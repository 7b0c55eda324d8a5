"""From a process to a rank at work: joins the group, then commands (rank 0) or serves (the others)."""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.config import ConfigError, RecipeConfig, Split, in_one_line
from shardwise.controller.attempts import restarts_done
from shardwise.controller.failures import is_lost_peer, note_failure
from shardwise.controller.launch import is_launched
from shardwise.controller.local import RankGroup, serve, serve_in_background
from shardwise.controller.neighbours import watching_neighbour
from shardwise.controller.peers import watched_by_peers
from shardwise.controller.process_group import Rank, allow_open_files, connect, open_store, process_group
from shardwise.controller.signals import pass_on, stop_signals
from shardwise.controller.stall import RankStalledError, StallLimit, watching_itself, with_own_stacks
from shardwise.controller.watchdog import REPORTS, be_watched
from shardwise.engine import take_device
from shardwise.fault_plan import VARIABLE as FAULT_PLAN_VARIABLE
from shardwise.fault_plan import begin_plan
from shardwise.recipes.checkpointing.checkpoint_writer import CheckpointWriter
from shardwise.recipes.placement import num_training_ranks
from shardwise.recipes.rank.background_worker import BackgroundWorker
from shardwise.recipes.rank.identity import identity_of, require_same_identity
from shardwise.recipes.rank.library_logging import quiet_libraries
from shardwise.recipes.rank.worker import Worker
from shardwise.recipes.stopping import Stopped
from shardwise.transfer import DiskMedium, Medium, ProcessGroupMedium, SharedMemoryMedium
from shardwise.types import Connections

_NOTICE_SECONDS = 20.0
"""What the main thread gets to notice that another rank is gone: what it does may take that long. torchrun, which may
notice at once, ends this process after 30 s, and stacks have to be collected before."""


def run_rank(
    recipe: Callable[[RankGroup], None],
    *,
    timeout_seconds: int,
    split: Split | None = None,
    faults: Sequence[str] = (),
    output_dir: str | None = None,
    stall: StallLimit | None = None,
    save_timeout_seconds: float | None = None,
    config: RecipeConfig | None = None,
) -> int:
    """Runs `recipe` on rank 0 of this job and a serving loop on every other rank.

    Args:
        split: the last ranks, which only sample and are no part of the default process group; None: all ranks are.
        faults: to rehearse, beside those of the environment variable.
        output_dir: where a job without our launcher leaves what every rank did when one of them hung.
        stall: how long rank 0 may take to go on; None: as long as it wants.
        save_timeout_seconds: how long ranks may wait for each other's files; None: as in collectives.
        config: that every rank has to have been started with; None: of a command without one.
    Returns:
        The exit code of this process.
    """
    quiet_libraries()
    allow_open_files()
    rank = Rank.from_environment()
    be_watched(rank.rank)
    reactions = _Reactions(partial(note_failure, rank=rank.rank), pass_on)
    code = 0
    with ExitStack() as stack:
        try:
            _begin_plan(faults)
            num_trainers = num_training_ranks(rank.world_size, split)
            device = take_device(rank.local_rank)
            store = open_store(rank, timeout_seconds=timeout_seconds)
            if restarts_done(store):  # what is planned happens once
                _begin_plan(None)
            reports = None if output_dir is None else Path(output_dir) / REPORTS
            is_unwatched = rank.world_size > 1 and not is_launched()
            if is_unwatched:
                peers = stack.enter_context(watched_by_peers(rank, store, reports, timeout_seconds=timeout_seconds))
                reactions = _Reactions(peers.note_failure, peers.pass_on)
                require_same_identity(rank, store, identity_of(config, rank))
            if rank.rank == 0 and not is_launched():
                end = partial(_end_stalled, reactions.note, reports, is_alone=rank.world_size == 1)
                stack.enter_context(watching_itself(stall, end))
            control = stack.enter_context(
                process_group(
                    rank,
                    device_type=device.type,
                    timeout_seconds=timeout_seconds,
                    num_together=num_trainers,
                    store=store,
                )
            )
            save_seconds = timeout_seconds if save_timeout_seconds is None else save_timeout_seconds
            links = connect("background", rank, store, timeout=timedelta(seconds=save_seconds))
            if is_unwatched:
                stack.enter_context(watching_neighbour(rank, links, store, timeout_seconds=timeout_seconds))
            writer, interruption = CheckpointWriter(rank.rank, links), threading.Event()
            join_medium = _medium_of(rank, split, store, device, run=output_dir, timeout_seconds=timeout_seconds)
            worker = Worker(device, join_medium=join_medium, writer=writer, interruption=interruption)
            beside = BackgroundWorker(writer, interruption)
            if rank.rank > 0:
                _serve(worker, control, beside, links, reactions)
                return 0
            background = RankGroup(
                beside, links, timeout_seconds=save_seconds, timeout_key="trainer.save_timeout_seconds"
            )
            return _lead(recipe, RankGroup(worker, control, timeout_seconds=timeout_seconds, background=background))
        except (Exception, SystemExit) as error:  # the one place where a rank's failure becomes an exit code
            # Noted before the group is left: that closes the connections, whereupon the other ranks fail too.
            code = reactions.note(error)
            if rank.rank > 0:
                os._exit(code)  # the thread that serves in the background may be in a library, which would abort
    if code and rank.world_size > 1:  # so may one of rank 0 that asks another rank
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


@dataclass(frozen=True, slots=True)
class _Reactions:
    """What this rank does about a failure of its own and about signals to it."""

    note: Callable[[BaseException], int]
    """Notes a failure where the job looks for it, and returns this process's exit code."""
    pass_on: Callable[[int], None]
    """Passes a signal on to rank 0."""


def _serve(
    worker: Worker, control: Connections, beside: BackgroundWorker, links: Connections, reactions: _Reactions
) -> None:
    """Serves the calls of rank 0 until it shuts its groups down: those to the worker, and in a thread those to what
    works beside it."""
    working = serve_in_background(beside, links, partial(_end, reactions.note))
    with stop_signals(reactions.pass_on):
        serve(worker, control)
        working.join()


def _lead(recipe: Callable[[RankGroup], None], group: RankGroup) -> int:
    """Returns the exit code of a recipe that did all it should, or was asked to stop."""
    code = 0
    try:
        recipe(group)
    except Stopped as stopped:
        print(stopped, flush=True)
        code = stopped.code
    group.shutdown()
    return code


def _end(note: Callable[[BaseException], int], error: Exception) -> None:
    """Ends this process for a failure in the background. That another rank is gone the main thread finds out too, where
    it does not hang."""
    if is_lost_peer(error):
        timer = threading.Timer(_NOTICE_SECONDS, _end_hanging, [note, error])
        timer.daemon = True
        timer.start()
    else:
        os._exit(note(error))


def _end_hanging(note: Callable[[BaseException], int], error: Exception) -> None:
    """Ends this process, whose main thread is where nothing tells it that another rank is gone."""
    reason = in_one_line(error)
    os._exit(
        note(RankStalledError(f"another rank is gone ({reason}), and it has not noticed for {_NOTICE_SECONDS:.0f} s"))
    )


def _end_stalled(
    note: Callable[[BaseException], int], reports: Path | None, error: RankStalledError, *, is_alone: bool
) -> None:
    """Ends this process, of which a thread found that it does not go on."""
    os._exit(note(with_own_stacks(error, reports) if is_alone else error))


def _begin_plan(faults: Sequence[str] | None) -> None:
    """Plans these faults and those of the environment variable; None: neither."""
    try:
        if faults is None:
            os.environ.pop(FAULT_PLAN_VARIABLE, None)
        begin_plan(faults or ())
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _medium_of(
    rank: Rank, split: Split | None, store: dist.Store, device: torch.device, *, run: str | None, timeout_seconds: int
) -> Callable[[], Medium] | None:
    """Joins what carries weights from rank 0 to the ranks that only sample; None for a rank that is neither."""
    num_trainers = num_training_ranks(rank.world_size, split)
    if split is None or 0 < rank.rank < num_trainers:
        return None
    assert run is not None  # of training, as `split` is
    join: Callable[..., Medium]
    match split.medium:
        case "process_group":
            join = partial(ProcessGroupMedium.join, backend="gloo" if device.type == "cpu" else "nccl", device=device)
        case "shared_memory":
            join = SharedMemoryMedium.join
        case "disk":
            assert split.folder is not None  # as the config says
            join = partial(DiskMedium.join, folder=split.folder, run=os.path.realpath(run))
    return partial(
        join,
        dist.PrefixStore("weights", store),
        0 if rank.rank == 0 else rank.rank - num_trainers + 1,
        1 + split.num_ranks,
        # Shorter than a collective: the trainers that wait for rank 0 must not be the first to give up.
        timeout=timedelta(seconds=timeout_seconds / 2),
    )

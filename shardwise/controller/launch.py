"""Starts the ranks of a job on this machine and watches them: one that fails ends the others, and is named."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.console import tell, warn
from shardwise.controller.exit_codes import STOPPED, code_of_signal
from shardwise.controller.failures import Failure, Note, explain, num_killed_for_memory, read_notes
from shardwise.controller.memory import MemoryHistory
from shardwise.controller.restarts import Restarts
from shardwise.controller.signals import RANK_0_VARIABLE, stop_signals
from shardwise.controller.stall import StallLimit
from shardwise.controller.watchdog import JOB_FOLDER_VARIABLE, Activity, collect, write_reports
from shardwise.fault_plan import VARIABLE as FAULT_PLAN_VARIABLE
from shardwise.processes import die_with
from shardwise.scratch import scratch_folder

STORE_VARIABLE = "SHARDWISE_STORE"
"""Environment variable: the file through which ranks of `launch` find each other, without a port that might clash."""
LAUNCHER_VARIABLE = "SHARDWISE_LAUNCHER"
"""Environment variable: id of the process that started the ranks, which end when it is gone."""
_TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Environment variable of every rank that torchrun started."""
STARTED_VARIABLE = "SHARDWISE_STARTED"
"""Environment variable: when the job started, as time.monotonic()."""
PROCESS_STARTED = time.monotonic()
"""When this process started: the command imports this module before anything that takes time."""
_POLL_SECONDS = 0.05
SETTLE_SECONDS = 1.0
"""Time for the other ranks of a collective to report that they gave up, after the first of them did."""
_LEAVE_SECONDS = 5.0
"""Time for ranks to end by themselves."""
_CRASHES = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL}
"""Exit codes of a rank that has written its stacks. NCCL ends a process by SIGABRT when a collective takes too long."""
_STOPS: dict[int, str] = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "stopped, for its terminal closed",
}


def launch(
    command: Sequence[str],
    *,
    nproc: int,
    stop_grace_seconds: float = 0.0,
    faults: Path | None = None,
    stall: StallLimit | None = None,
    restarts: Restarts | None = None,
    without_saving: Callable[[], str] | None = None,
    started: float | None = None,
) -> int:
    """Runs `command` as `nproc` ranks and waits for them.

    SIGTERM, SIGINT and SIGHUP go to rank 0, which ends the job; a second one ends all ranks at once.

    Args:
        stop_grace_seconds: how long rank 0 may take to end it.
        faults: the folder for reports of what every rank did when one hung or crashed.
        stall: how long rank 0 may go without progress; None: no limit.
        restarts: decides whether a job that failed starts again.
        without_saving: returns words on how a job ended that was kept from saving, as by a second signal.
        started: when the job began, as time.monotonic(); None: now.
    Returns:
        The job's exit code. Prints why it failed.
    """
    asked: list[int] = []
    variables = {STARTED_VARIABLE: str(time.monotonic() if started is None else started)}
    with stop_signals(asked.append):
        while True:
            end = _run(
                command,
                nproc,
                asked,
                variables,
                stop_grace_seconds=stop_grace_seconds,
                faults=faults,
                stall=stall,
                without_saving=without_saving,
            )
            if end.failure is None:
                return end.code
            if restarts is None:
                end.failure.print()
                return end.code
            again = restarts.after(end.failure, end.step)
            if again is None or asked:
                return end.code
            command = again
            variables[FAULT_PLAN_VARIABLE] = ""  # planned faults happen only once


def is_launched() -> bool:
    """Whether this process is a rank that `launch` started."""
    return JOB_FOLDER_VARIABLE in os.environ


def seconds_since_start() -> float:
    """How long this job has been running; under torchrun, how long this process has."""
    return time.monotonic() - float(os.environ.get(STARTED_VARIABLE, PROCESS_STARTED))


def die_with_launcher() -> None:
    """Has the kernel kill this rank when its launcher or torchrun is gone, whatever the rank is doing and even if it is
    stopped, so that no orphan keeps a device. (At a third signal torchrun ends before its ranks.)"""
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher is not None:
        die_with(int(launcher))
    elif _TORCHRUN_VARIABLE in os.environ:
        die_with(os.getppid())


@dataclass(frozen=True, slots=True)
class _End:
    """How one group of ranks ended."""

    code: int
    failure: Failure | None = None
    step: int | None = None


class _Ranks:
    """The processes of one group of ranks. A context manager that kills them at the end."""

    def __init__(self, command: Sequence[str], nproc: int, folder: Path, variables: Mapping[str, str]) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        shared = {JOB_FOLDER_VARIABLE: str(folder), **variables}
        try:
            for rank in range(nproc):
                leader = {RANK_0_VARIABLE: str(self.processes[0].pid)} if rank else {}
                self.processes.append(_start(command, rank, nproc, shared | leader))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "_Ranks":
        return self

    def __exit__(self, *exception: object) -> None:
        """Kills the ranks by SIGKILL: one that handles another signal may be in a collective, where Python runs no
        handler. Names those that the kernel does not let end, and waits no longer for them."""
        for process in self.processes:
            process.kill()
        self.wait_for_all(_LEAVE_SECONDS)
        for rank, pid in self.pids().items():
            warn(
                f"rank {rank} (process {pid}) has not ended {_LEAVE_SECONDS:.0f} s after SIGKILL: the kernel holds it, "
                "in a file system or a driver that does not answer; it may keep its device"
            )

    def codes(self) -> dict[int, int]:
        """Returns rank -> exit code, for ranks that have ended."""
        codes = {rank: process.poll() for rank, process in enumerate(self.processes)}
        return {rank: code for rank, code in codes.items() if code is not None}

    @property
    def have_succeeded(self) -> bool:
        return list(self.codes().values()) == [0] * len(self.processes)

    def pids(self) -> dict[int, int]:
        """Returns rank -> process id, for ranks that live."""
        return {rank: process.pid for rank, process in enumerate(self.processes) if process.poll() is None}

    def wait_for_all(self, seconds: float) -> None:
        """Waits until all ranks have ended, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self.pids() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def _start(command: Sequence[str], rank: int, nproc: int, variables: dict[str, str]) -> "subprocess.Popen[bytes]":
    threads = max(1, (os.cpu_count() or 1) // nproc)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        STORE_VARIABLE: str(Path(variables[JOB_FOLDER_VARIABLE]) / "store"),
        LAUNCHER_VARIABLE: str(os.getpid()),
        **variables,
    }
    return subprocess.Popen(command, env=environment)


def _run(
    command: Sequence[str],
    nproc: int,
    asked: list[int],
    variables: Mapping[str, str],
    *,
    stop_grace_seconds: float,
    faults: Path | None,
    stall: StallLimit | None,
    without_saving: Callable[[], str] | None,
) -> _End:
    """Runs one group of ranks from start to end. `asked` gets the numbers of the signals that ask it to stop."""
    num_killed, memory = num_killed_for_memory(), MemoryHistory()
    with (
        scratch_folder() as folder,
        _Ranks(command, nproc, folder, variables) as ranks,
    ):
        _wait(ranks, asked, memory, stall)
        if not asked and any(code in STOPPED for code in ranks.codes().values()):
            time.sleep(_POLL_SECONDS)  # a signal to all processes may have ended some before a thread tells `asked`
        if asked:
            _stop(ranks, asked, stop_grace_seconds)
        code = ranks.codes().get(0)
        if code in STOPPED or (code == 0 and asked):
            ranks.wait_for_all(_LEAVE_SECONDS)
        if ranks.have_succeeded:
            return _End(0)
        if not asked or any(not note.is_lost_peer for note in read_notes(ranks.folder)):
            if code in STOPPED:
                return _End(code)
            failure = _diagnose(ranks, faults, num_killed=num_killed, memory=memory)
            return _End(failure.code, failure, _activity(ranks.folder, 0).step)
    how = f" {without_saving()}" if code is None and without_saving is not None else ""
    tell(f"{_STOPS[asked[0]]}; all ranks ended{how}")
    return _End(code_of_signal(asked[0]))


def _wait(ranks: _Ranks, asked: list[int], memory: MemoryHistory, stall: StallLimit | None) -> None:
    """Waits until all ranks have succeeded, one has failed or given up waiting for another, rank 0 stalls, or a signal
    comes. Samples their memory meanwhile."""
    while not (asked or ranks.have_succeeded or any(ranks.codes().values()) or _is_hang(read_notes(ranks.folder))):
        memory.sample(ranks.pids())
        leader = Activity.read(ranks.folder, 0)
        stalled = None if stall is None or leader is None or 0 in ranks.codes() else stall.error(leader)
        if stalled is not None:
            Note.of(stalled, 0).leave(ranks.folder)
        time.sleep(_POLL_SECONDS)


def _stop(ranks: _Ranks, asked: list[int], grace_seconds: float) -> None:
    """Passes a signal on to rank 0 and waits for its end: little more than the grace, and not after a second one."""
    rank_0 = ranks.processes[0]
    rank_0.send_signal(asked[0])
    deadline = time.monotonic() + grace_seconds + _LEAVE_SECONDS
    while rank_0.poll() is None and len(asked) == 1 and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _diagnose(ranks: _Ranks, faults: Path | None, *, num_killed: int, memory: MemoryHistory) -> Failure:
    """Explains why ranks failed; if one hangs or crashed, also writes a report of every rank into `faults`."""
    notes, codes = read_notes(ranks.folder), ranks.codes()
    reports: dict[int, str] = {}
    states: dict[int, str] = {}
    errors = {note.rank: note.traceback or note.message for note in notes}
    if _is_hang(notes) or any(code in _CRASHES for rank, code in codes.items() if rank not in errors):
        reports, states = collect(ranks.folder, range(len(ranks.processes)), ranks.pids(), errors)
    ranks.wait_for_all(SETTLE_SECONDS)
    activities = {rank: _activity(ranks.folder, rank) for rank in range(len(ranks.processes))}
    failure = explain(
        {rank: code for rank, code in ranks.codes().items() if code},
        read_notes(ranks.folder),
        {rank: activity.place for rank, activity in activities.items()},
        states,
        idle={rank for rank, activity in activities.items() if activity.is_idle and rank not in states},
        num_killed=num_killed_for_memory() - num_killed,
        memory=memory,
    )
    if not reports or faults is None:
        return failure
    try:
        return replace(failure, message=f"{failure.message}; stacks of every rank: {write_reports(faults, reports)}")
    except OSError as error:
        return replace(failure, message=f"{failure.message}; stacks could not be written to {faults}: {error}")


def _is_hang(notes: Sequence[Note]) -> bool:
    return any(note.is_timeout or note.is_stalled for note in notes)


def _activity(folder: Path, rank: int) -> Activity:
    """Returns a rank's activity, with the step of rank 0, which all ranks are in."""
    own, leader = (Activity.read(folder, number) or Activity() for number in (rank, 0))
    return replace(own, step=leader.step)

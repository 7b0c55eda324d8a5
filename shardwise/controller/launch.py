"""Starts the ranks of a job on this machine and watches them: one that fails ends the others, and is named."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.config import UserError
from shardwise.controller.base import RankSilentError

STORE_VARIABLE = "SHARDWISE_STORE"
"""The file through which ranks started by `launch` find each other: no port to choose, none to clash."""
FAILURE_VARIABLE = "SHARDWISE_FAILURE_FILE"
"""Where a rank writes why it failed."""
LIFELINE_VARIABLE = "SHARDWISE_LIFELINE"
"""A pipe that closes when the launcher is gone; ranks then end themselves."""
USER_ERROR, FAILURE, INTERRUPTED, TERMINATED = 2, 1, 130, 143
"""Exit codes: a mistake of the user's, anything else, Ctrl-C, SIGTERM."""
_GRACE_SECONDS = 5.0
_SETTLE_SECONDS = 1.0
"""What ranks that wait in one collective get, after the first of them gave up, to say so too."""
_LOST_PEER = re.compile(r"peer|Connection|timed out|timeout", re.IGNORECASE)
"""What torch's transports say of a rank that is gone or hangs."""


def launch(command: Sequence[str], *, nproc: int) -> int:
    """Runs `command` as `nproc` ranks and waits for them.

    Returns:
        0 when all ranks succeeded, else the exit code of the rank that failed first, after printing why.
    """
    before = signal.signal(signal.SIGTERM, _leave)  # so that ranks end and the folder goes on that way out too
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        lifeline_read, lifeline_write = os.pipe()
        ranks = [_start(command, rank, nproc, Path(folder), lifeline_read) for rank in range(nproc)]
        os.close(lifeline_read)
        try:
            failed = _wait(ranks)
        except KeyboardInterrupt:
            _end(ranks)
            print("interrupted; all ranks ended", file=sys.stderr)
            return INTERRUPTED
        finally:
            _end(ranks)
            os.close(lifeline_write)
            signal.signal(signal.SIGTERM, before)
        return _report(failed, nproc, Path(folder)) if failed else 0


def _leave(*_: object) -> None:
    raise SystemExit(TERMINATED)


def _start(command: Sequence[str], rank: int, nproc: int, folder: Path, lifeline: int) -> subprocess.Popen[bytes]:
    threads = max(1, (os.cpu_count() or 1) // nproc)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        STORE_VARIABLE: str(folder / "store"),
        FAILURE_VARIABLE: str(folder / f"failure-{rank}.json"),
        LIFELINE_VARIABLE: str(lifeline),
    }
    return subprocess.Popen(command, env=environment, pass_fds=[lifeline])


def _wait(ranks: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Consumes exits; waits for all ranks to succeed or one to fail; returns the exit codes of those that failed."""
    while True:
        codes = {rank: process.poll() for rank, process in enumerate(ranks)}
        failed = {rank: code for rank, code in codes.items() if code}
        if failed:
            return _settled(ranks)
        if all(code == 0 for code in codes.values()):
            return {}
        time.sleep(0.05)


def _settled(ranks: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    """The exit codes of all that failed, after ranks that wait for the same collective had time to fail too."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < deadline and any(process.poll() is None for process in ranks):
        time.sleep(0.05)
    return {rank: process.returncode for rank, process in enumerate(ranks) if process.returncode}


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Ends what still runs: politely, then for good."""
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    for process in ranks:
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=_GRACE_SECONDS)


def _report(failed: dict[int, int], nproc: int, folder: Path) -> int:
    """Prints the cause: a failing rank takes its peers with it, so what they say about a lost peer comes last.

    `failed` holds the exit codes from before the other ranks were ended, so a signal in it did not come from here.
    """
    notes = [json.loads(path.read_text()) for path in folder.glob("failure-*.json")]
    first = min(notes, key=lambda note: (note["is_lost_peer"], note["time"]), default=None)
    by_signal = [rank for rank, code in failed.items() if code < 0]
    if by_signal and (first is None or first["is_lost_peer"]):
        name = signal.Signals(-failed[by_signal[0]]).name
        print(f"error: rank {by_signal[0]} was ended by {name}; the other ranks were stopped", file=sys.stderr)
        return FAILURE
    if first is None:
        rank, code = next(iter(failed.items()))
        print(f"error: rank {rank} exited with code {code} and left no reason", file=sys.stderr)
        return FAILURE
    if first["is_user_error"]:
        print(f"error: {first['message']}", file=sys.stderr)
        return USER_ERROR
    silent = [str(rank) for rank in range(nproc) if rank not in failed]
    if first["is_lost_peer"] and silent:
        reason = " ".join(first["message"].split())
        print(f"error: rank {', '.join(silent)} hangs: rank {first['rank']} waited in vain ({reason})", file=sys.stderr)
        return FAILURE
    print(f"{first['traceback']}error: rank {first['rank']} failed: {first['message']}", file=sys.stderr)
    return FAILURE


def is_lost_peer(error: BaseException) -> bool:
    """Whether it only tells that another rank is gone or hangs."""
    return not isinstance(error, UserError) and bool(_LOST_PEER.search(str(error)))


def note_failure(error: BaseException, rank: int) -> int:
    """Called by a rank on its way out: leaves the reason for the launcher, or prints it where there is none.

    Returns:
        The exit code.
    """
    is_user_error = isinstance(error, UserError)
    note: dict[str, Any] = {
        "time": time.time(),
        "rank": rank,
        "is_user_error": is_user_error,
        "is_lost_peer": is_lost_peer(error),
        "message": str(error) or type(error).__name__,
        "traceback": "" if isinstance(error, RankSilentError) else "".join(traceback.format_exception(error)),
    }
    path = os.environ.get(FAILURE_VARIABLE)
    if path is not None:
        partial = Path(f"{path}.partial")  # a rank may be ended while it writes
        partial.write_text(json.dumps(note))
        partial.replace(path)
    elif note["is_lost_peer"] and rank > 0:
        print(f"rank {rank}: another rank ended or hangs; its own message tells why", file=sys.stderr)
    else:
        where = f"rank {rank}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
        print(("" if is_user_error else note["traceback"]) + f"error: {where}{note['message']}", file=sys.stderr)
    return USER_ERROR if is_user_error else FAILURE


def is_launched() -> bool:
    """Whether this process is a rank that `launch` started."""
    return FAILURE_VARIABLE in os.environ


def follow_lifeline() -> None:
    """Ends this rank when its launcher is gone, whatever the rank is doing, so that no orphan keeps a device."""
    descriptor = os.environ.get(LIFELINE_VARIABLE)
    if descriptor is None:
        return

    def watch() -> None:
        os.read(int(descriptor), 1)  # returns at end of file: the launcher's end is closed
        os._exit(FAILURE)

    threading.Thread(target=watch, daemon=True).start()

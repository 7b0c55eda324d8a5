"""The main program of a fork server: imports the reward functions once, then forks a process for each request.

    {"folder": "/work", "functions": [{"function": "rules.py:compute_score", "parameters": {}}], "memory_bytes": null}
                                                  ->  {"ready": true}
    any byte, with the pipes of a worker  ->  a worker, and in its pipe of results {"exit": code} when it has ended

The first line comes on standard input, requests on a socket. Where a function cannot be loaded, the server says
{"error": "why"} and ends. A fork costs milliseconds, whatever the functions import.
"""

import json
import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from shardwise.config import ConfigError
from shardwise.processes import end_group_with
from shardwise.rewards.base import RewardFunction
from shardwise.rewards.reward_function import load_with_parameters
from shardwise.rewards.worker import work

NUM_PIPES = 4
"""How many pipes a worker has: jobs, results, lifeline, and one for what it prints."""


def main(control_fd: int, lifeline_fd: int) -> None:
    """Serves requests until the control socket ends, then ends its workers and its own process group.

    Consumes: requests on the socket. Waits for: the next one, or the end of a worker. Unblocked by: the parent
    closing the socket, or its death.

    Args:
        control_fd: the socket that requests come on.
        lifeline_fd: a pipe that nobody writes to, which ends when the parent does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_group_with(lifeline_fd)
    # The socket breaks where the parent has given up before it was told how importing ended.
    with suppress(BrokenPipeError, ConnectionResetError), socket.socket(fileno=control_fd) as control:
        control.set_inheritable(False)
        setup = json.load(sys.stdin)
        try:
            functions = _load_functions(setup)
        except ConfigError as error:
            control.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        else:
            control.sendall(b'{"ready": true}\n')
            _serve(control, functions, setup["memory_bytes"])
    os.killpg(0, signal.SIGKILL)  # with what importing has started


def _load_functions(setup: dict[str, Any]) -> list[RewardFunction]:
    os.chdir(setup["folder"])
    sys.path[0] = setup["folder"]
    functions = [load_with_parameters(entry["function"], entry["parameters"]) for entry in setup["functions"]]
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        raise ConfigError(
            f"reward.functions={', '.join(entry['function'] for entry in setup['functions'])}: importing started the "
            f"thread {others[0]}, which does not exist in the processes that are forked after it; start it in the "
            "function's first call"
        )
    return functions


def _serve(control: socket.socket, functions: Sequence[RewardFunction], memory_bytes: int | None) -> None:
    wakeup_read, wakeup_write = os.pipe()
    for fd in (wakeup_read, wakeup_write):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # the default would write no byte to the pipe
    signal.set_wakeup_fd(wakeup_write)
    result_fds: dict[int, int] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wakeup_read, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if wakeup_read in ready:
            os.read(wakeup_read, 1 << 12)
            _bury(result_fds)
        if control.fileno() not in ready:
            continue
        request, pipes, _, _ = socket.recv_fds(control, 1, NUM_PIPES, socket.MSG_CMSG_CLOEXEC)
        if not request:
            break
        job_fd, result_fd, lifeline_fd, output_fd = pipes
        pid = os.fork()
        if pid == 0:
            for fd in (control.fileno(), wakeup_read, wakeup_write, *result_fds.values()):
                os.close(fd)
            _become_worker(functions, memory_bytes, job_fd, result_fd, lifeline_fd, output_fd)
        result_fds[pid] = result_fd
        for fd in (job_fd, lifeline_fd, output_fd):
            os.close(fd)
    for pid in result_fds:
        _kill_group(pid)
        os.waitpid(pid, 0)


def _become_worker(
    functions: Sequence[RewardFunction],
    memory_bytes: int | None,
    job_fd: int,
    result_fd: int,
    lifeline_fd: int,
    output_fd: int,
) -> NoReturn:
    try:
        os.setsid()
        for standard_fd in (1, 2):
            os.dup2(output_fd, standard_fd)
        os.close(output_fd)
        if memory_bytes is not None:
            _limit_memory(memory_bytes)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_group_with(lifeline_fd)
        work(functions, job_fd, result_fd)
        os._exit(0)
    finally:
        os._exit(1)


def _limit_memory(num_bytes: int) -> None:
    """Lets this process have so much more address space than it has now. Processes it starts may set other limits."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit, (_, most) = pages * resource.getpagesize() + num_bytes, resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _bury(result_fds: dict[int, int]) -> None:
    """Ends what is left of the process groups of ended workers, and tells the parent, which may never read the end of
    file: a grandchild can hold the pipe."""
    for pid, fd in list(result_fds.items()):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        _kill_group(pid)
        _, status = os.waitpid(pid, 0)
        with suppress(BrokenPipeError):
            os.write(fd, b'{"exit": %d}\n' % os.waitstatus_to_exitcode(status))
        os.close(fd)
        del result_fds[pid]


def _kill_group(pid: int) -> None:
    """Kills the group of a worker that was not waited for yet: until then its number belongs to no other process."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

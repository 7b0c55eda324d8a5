"""The main loop of a reward process: reads jobs from one pipe, answers on another, one JSON object per line.

    nothing  ->  {"ready": its process id}
    {"skip": 4}  ->  nothing, where job 4 has not begun
    {"job": 3, "function": 0, "arguments": {"data_source": ..., ...}}  ->  {"job": 3, "score": 1.0, "parts": {}}
                                                          {"job": 3, "failure": "ValueError: ... (rules.py line 12)"}

Where a function cannot work on this machine at all, it says {"error": "why"} and ends. Standard output is not part of
the protocol, so whatever user code prints cannot break it.
"""

import io
import json
import os
import select
from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.config import ConfigError
from shardwise.rewards.base import RewardFunction
from shardwise.rewards.reward_function import call_function

_READ_BYTES = 1 << 16


def work(functions: Sequence[RewardFunction], job_fd: int, result_fd: int) -> None:
    """Serves jobs until the job pipe ends.

    Consumes: job lines. Waits for: the next one. Unblocked by: the parent closing the pipe.

    Args:
        job_fd, result_fd: the pipes to read from and to write to.
    """
    with os.fdopen(job_fd, "rb", buffering=0) as jobs, os.fdopen(result_fd, "wb") as results:

        def send(message: dict[str, Any]) -> None:
            results.write(json.dumps(message).encode() + b"\n")
            results.flush()

        send({"ready": os.getpid()})
        try:
            for message in _messages(jobs):
                send({"job": message["job"], **call_function(functions[message["function"]], message["arguments"])})
        except ConfigError as error:
            send({"error": str(error)})


def _messages(jobs: io.FileIO) -> Iterator[dict[str, Any]]:
    """Yields the jobs to do. It reads all that has arrived before it yields the next: jobs may have to be skipped."""
    waiting: list[dict[str, Any]] = []
    unread = b""
    ready = select.poll()
    ready.register(jobs, select.POLLIN)
    while True:
        while not waiting or ready.poll(0):
            data = jobs.read(_READ_BYTES)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for message in map(json.loads, lines):
                if "skip" in message:
                    waiting = [job for job in waiting if job["job"] != message["skip"]]
                else:
                    waiting.append(message)
        yield waiting.pop(0)

"""The main program of processes that apply a function to rows: takes the function once, then forks one for every
connection. A fork costs milliseconds, and shares the function's memory, such as a tokenizer's vocabulary.

    (nothing)                    ->  b"", once, when the process is there
    a pickled list of rows       ->  the outcomes by place, pickled, without those of rows whose function raised
"""

import copyreg
import gc
import io
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from shardwise.processes import die_with


def main(folder: str, parent: int, connection_fds: Sequence[int]) -> None:
    """Serves the connections until they end, or the parent does.

    Consumes: the pickled function on standard input, rows on the connections. Waits for: the end of all connections.
    Unblocked by: the parent, which kills the process group, or its death. Where the function cannot be loaded, the
    connections end.

    Args:
        folder: where paths in rows begin.
        parent: id of the process that has started this one.
    """
    die_with(parent)
    own_id = os.getpid()
    try:
        function = pickle.load(sys.stdin.buffer)
    except Exception:  # it is of a module that this process cannot import
        return
    os.chdir(folder)
    gc.freeze()  # the collector would write to, and so copy, all memory that is shared
    for own_fd in connection_fds:
        if os.fork() == 0:
            die_with(own_id)
            for fd in connection_fds:
                if fd != own_fd:
                    os.close(fd)
            _serve(function, Connection(own_fd))
            return
    for fd in connection_fds:
        os.close(fd)
    with suppress(ChildProcessError):  # none is left
        while True:
            os.wait()


def _serve(function: Callable[[Any], object], connection: Connection) -> None:
    with suppress(EOFError, OSError):  # the parent is gone
        connection.send_bytes(b"")
        while True:
            outcomes = {}
            for place, row in enumerate(pickle.loads(connection.recv_bytes())):
                with suppress(Exception):  # the parent calls it again, for the error
                    outcomes[place] = function(row)
            connection.send_bytes(_dump_outcomes(outcomes))


def _dump_outcomes(outcomes: dict[int, Any]) -> bytes:
    """Pickles tensors as arrays: torch's own way writes a file for each."""
    written = io.BytesIO()
    pickler = pickle.Pickler(written, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {Tensor: lambda tensor: (torch.from_numpy, (tensor.numpy(),))}
    pickler.dump(outcomes)
    return written.getvalue()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), [int(fd) for fd in sys.argv[3:]])

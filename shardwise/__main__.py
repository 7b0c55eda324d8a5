"""The command `shardwise`, and `python -m shardwise`, which is how ranks are started."""

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn

from shardwise.controller.signals import interrupted, interruptible_imports


def main() -> int:
    """Runs the command line. Ctrl-C ends it in one line, also while it is still being imported."""
    try:
        with interruptible_imports():
            from shardwise import cli
        return cli.main()
    except KeyboardInterrupt:
        return interrupted()


def run() -> NoReturn:
    """`main` as a process of its own.

    Threads in which code of users hangs may be left. One that wakes up while the interpreter is taken down is unwound
    through whatever library it is in, which may abort the process. So that does not happen: what was registered for the
    end of the process is done, and then it ends.
    """
    ended: list[int] = []
    atexit.register(_leave, ended)  # before anything else is, so that it comes last
    ended.append(main())
    sys.exit(ended[0])


def _leave(ended: list[int]) -> None:
    if not ended:  # an error on its way out, which the interpreter tells
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(ended[0])


if __name__ == "__main__":
    run()

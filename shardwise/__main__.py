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
    """Runs `main` as the whole of this process.

    Threads in which users' code hangs may be left. One that wakes up while the interpreter shuts down is unwound
    through whatever library it is in, which may abort the process. To prevent that, the process does what was
    registered for its end, and then ends at once.
    """
    ended: list[int] = []
    atexit.register(_leave, ended)  # before anything else is, so that it comes last
    ended.append(main())
    sys.exit(ended[0])


def _leave(ended: list[int]) -> None:
    if not ended:  # an error is on its way out, which the interpreter reports
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(ended[0])


if __name__ == "__main__":
    run()

"""How a job says to its scheduler what became of it: the exit code of the launcher, and of rank 0."""

import signal

FAILURE = 1
"""Anything that has no code of its own."""
USER_ERROR = 2
"""A mistake in what was given, or numbers that diverged: the same command fails again."""
TIME_IS_UP = 75
"""Saved and stopped for trainer.max_time_seconds: the same command goes on (EX_TEMPFAIL of sysexits.h)."""
HUNG_UP = 128 + signal.SIGHUP
"""Stopped because its terminal closed: the same command goes on."""
INTERRUPTED = 128 + signal.SIGINT
"""Stopped by Ctrl-C or SIGINT: the same command goes on."""
TERMINATED = 128 + signal.SIGTERM
"""Stopped by SIGTERM: the same command goes on."""
STOPPED = (TIME_IS_UP, HUNG_UP, INTERRUPTED, TERMINATED)


def code_of_signal(number: int) -> int:
    """Of a job that a signal stopped."""
    return 128 + number

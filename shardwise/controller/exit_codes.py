"""Exit codes of the launcher and of rank 0, which tell the scheduler how the job ended."""

import signal

FAILURE = 1
"""Any failure that has no code of its own."""
USER_ERROR = 2
"""A mistake of the user's, or diverged numbers: the same command fails again."""
TIME_IS_UP = 75
"""Saved and stopped for trainer.max_time_seconds: the same command continues (EX_TEMPFAIL of sysexits.h)."""
HUNG_UP = 128 + signal.SIGHUP
"""Stopped because its terminal closed: the same command continues."""
INTERRUPTED = 128 + signal.SIGINT
"""Stopped by Ctrl-C or SIGINT: the same command continues."""
TERMINATED = 128 + signal.SIGTERM
"""Stopped by SIGTERM: the same command continues."""
STOPPED = (TIME_IS_UP, HUNG_UP, INTERRUPTED, TERMINATED)


def code_of_signal(number: int) -> int:
    """Returns the exit code of a job that this signal stopped."""
    return 128 + number

"""Errors that are the user's to mend. The command line prints them as one line, without a traceback."""

import errno
from collections.abc import Mapping

_REMEDIES: Mapping[int, str] = {
    errno.EACCES: "give this user the right to it, or another path",
    errno.EPERM: "give this user the right to it, or another path",
    errno.EROFS: "give a path on a file system that can be written to",
    errno.ENAMETOOLONG: "give a shorter path; most file systems take names of up to 255 bytes",
    errno.ELOOP: "its links lead in a circle; give what they should lead to",
    errno.ENOTDIR: "a part of it is a file; give a path through folders",
}
"""By what the operating system says of a path."""


class UserError(Exception):
    """Something the user gave cannot be used; the message says what was given, what is allowed and how to fix it."""

    is_shared = False
    """Every rank raises it, in the same words."""


class ConfigError(UserError):
    """A configuration file, an override or a combination of keys that cannot work."""


class DataError(UserError):
    """A data file or a row of it that cannot be read; names file, row and column."""


class ModelError(UserError):
    """A model folder that cannot be loaded, or that does not fit its tokenizer."""


class DamagedError(ModelError):
    """A file that is missing, or is not what was written."""


class ExportError(UserError):
    """Weights that could not be written; names the rank and the cause."""


class TrainingError(UserError):
    """A run that cannot go on, although every input was valid: the numbers diverged."""


class NotFiniteError(TrainingError):
    """Weights or optimizer states that hold NaN or infinities; names the first."""


class EngineLostError(RuntimeError):
    """The process of a rollout engine was lost more often than it may be replaced. Nobody gave anything wrong, and the
    same command may do better; the message quotes other programs, so that its words tell nothing else."""


class JudgeLostError(Exception):
    """A judge that could not be reached, or was too busy, at every attempt, or a process of reward functions that was
    killed while it imported them. Nobody need have given anything wrong, and the same command may do better."""


class PeerLostError(RuntimeError):
    """Another process of the job is gone or silent. What ended it is the cause, and tells itself."""


class RewardError(UserError):
    """A reward function that failed; names the function and the row."""


def error_text(error: BaseException) -> str:
    """What an exception says, also one of user code's that cannot say it."""
    try:
        return str(error)
    except (Exception, SystemExit) as trouble:
        return f"(its __str__ raised {type(trouble).__name__})"


def as_user_error(error: BaseException) -> BaseException:
    """The error, as a ConfigError if it is of a path that the operating system refuses for what the path is."""
    if not isinstance(error, OSError) or error.filename is None:
        return error
    remedy = _REMEDIES.get(error.errno or 0)
    return error if remedy is None else ConfigError(f"{error.filename}: {error.strerror}; {remedy}")

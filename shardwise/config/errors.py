"""Errors that are the user's to fix: the command line prints them as one line, without a traceback."""

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
"""errno of an operating system's error about a path -> what the user can do."""


class UserError(Exception):
    """Something the user gave cannot be used; the message says what was given, what is allowed and how to fix it."""

    is_shared = False
    """Whether every rank raises it, in the same words."""


class ConfigError(UserError):
    """A configuration file, an override or a combination of keys that cannot work."""


class DataError(UserError):
    """A data file or a row of it that cannot be read; names file, row and column."""


class ModelError(UserError):
    """A model folder that cannot be loaded, or that does not fit its tokenizer."""


class DamagedError(ModelError):
    """A file that is missing, or does not hold what was written."""


class ExportError(UserError):
    """Weights that could not be written; names the rank and the cause."""


class TrainingError(UserError):
    """A run that cannot go on, although every input was valid: the numbers diverged."""


class NotFiniteError(TrainingError):
    """Weights or optimizer states that hold NaN or infinities; names the first."""


class EngineLostError(RuntimeError):
    """The process of a rollout engine was lost more often than it may be replaced. It is no mistake of the user's, and
    the same command may succeed. The message quotes other programs, so its words say nothing about the kind of
    error."""


class JudgeLostError(Exception):
    """A judge that could not be reached, or was too busy, at every attempt, or a process of reward functions that was
    killed while it imported them. It need not be a mistake of the user's, and the same command may succeed."""


class PeerLostError(RuntimeError):
    """Another process of the job is gone or silent. The cause is what ended that process, which reports it itself."""


class RewardError(UserError):
    """A reward function that failed; names the function and the row."""


def error_text(error: BaseException) -> str:
    """Returns the message of an exception, even of one from user code whose __str__ raises."""
    try:
        return str(error)
    except (Exception, SystemExit) as trouble:
        return f"(its __str__ raised {type(trouble).__name__})"


def in_one_line(message: object) -> str:
    """Returns the message of an exception without line breaks, for a message of ours that quotes it."""
    return " ".join(str(message).split())


def as_user_error(error: BaseException) -> BaseException:
    """Returns the error; as a ConfigError if the operating system refuses a path for a reason that the user can fix."""
    if not isinstance(error, OSError) or error.filename is None:
        return error
    remedy = _REMEDIES.get(error.errno or 0)
    return error if remedy is None else ConfigError(f"{error.filename}: {error.strerror}; {remedy}")

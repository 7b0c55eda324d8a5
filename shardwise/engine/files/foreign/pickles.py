"""Pickles of other programs, read as data.

A pickle names classes and functions that loading it imports and calls, which may be anything. Here a name gets a
stand-in that only remembers what it was given, and only names that the caller lists do; every other one is refused.
"""

import io
import pickle
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import torch

from shardwise.config import ModelError


class Record:
    """Stands for an object of a class, or for the result of a function, that was neither imported nor called.

    Example: the pickled `Shard(dim=0)` is a Record of kind "Shard" with the attributes {"dim": 0}.
    """

    kind: ClassVar[str]
    """The name of the class or function, without its module."""
    args: tuple[Any, ...]
    """What it was called with."""
    state: Any
    """What was to be restored into it, as its class pickled it; None where there was nothing."""

    def __new__(cls, *args: Any) -> "Record":
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def attributes(self) -> dict[str, Any]:
        return attributes_of(self.state)


def attributes_of(state: Any) -> dict[str, Any]:
    """Returns the attributes in the pickled state of an ordinary object: a dict, or a pair of a dict and its slots."""
    parts = state if isinstance(state, tuple) else (state,)
    return {name: value for part in parts if part is not None for name, value in part.items()}


class _Dict(dict[Any, Any]):
    """Stands for an OrderedDict, without its own attributes (state dicts have a `_metadata`)."""

    def __setstate__(self, state: Any) -> None:
        pass


_PLAIN: dict[str, Any] = {
    "collections.OrderedDict": _Dict,
    "torch.Size": tuple,
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
}
_RECORDS = ("torch.device", "torch.serialization._get_layout")


def _member(_owner: type[Record], name: str) -> type[Record]:
    """Stands for `getattr`, with which classes inside of classes and members of enumerations are pickled."""
    return _record_class(name)


def read_pickle(
    data: bytes,
    origin: str,
    *,
    records: Collection[str],
    functions: Mapping[str, Any] | None = None,
    load_storage: Callable[[Any], Any] | None = None,
) -> Any:
    """Reads a pickle as tuples, lists, dicts, numbers, strings, torch dtypes and Records.

    Args:
        origin: what errors call it, such as the path of a file.
        records: dotted names of the classes and functions that it may name.
        functions: dotted name -> what stands for it instead of a Record.
        load_storage: takes what torch.save puts in the place of a tensor's storage.
    Raises:
        ModelError: it names something else, which the error tells, or is not a whole pickle.
    """
    stand_ins = {name: _record_class(name) for name in (*_RECORDS, *records)}
    known = _PLAIN | {"__builtin__.getattr": _member, "builtins.getattr": _member} | stand_ins | dict(functions or {})
    try:
        return _Unpickler(data, known, load_storage).load()
    except _NotAllowed as refused:
        raise ModelError(
            f"{origin} is refused: loading it would call {refused}, which no tensor needs and which may run code of "
            "whoever wrote it; nothing was called. Get it from where it was trained, saved as safetensors"
        ) from None
    except Exception as error:  # a truncated or malicious pickle can raise anything
        raise ModelError(f"{origin} cannot be read: {type(error).__name__}: {error}; copy it again") from None


class _NotAllowed(Exception):
    """A pickle asked for something that is not allowed; the message is its dotted name."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, known: Mapping[str, Any], load_storage: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known
        self._load_storage = load_storage

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path not in self._known:
            raise _NotAllowed(path)
        return self._known[path]

    def persistent_load(self, reference: Any) -> Any:
        if self._load_storage is None:
            raise pickle.UnpicklingError("it refers to storages outside of it")
        return self._load_storage(reference)


def _record_class(path: str) -> type[Record]:
    return type("Record", (Record,), {"kind": path.rpartition(".")[2]})

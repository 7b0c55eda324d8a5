import pickle
from collections import OrderedDict
from fractions import Fraction

import pytest
import torch
from foreign_checkpoints import Touch

from shardwise.config import ModelError
from shardwise.engine.files.foreign.pickles import Record, read_pickle


class Slotted:
    __slots__ = ("__dict__", "b")


def read(value, *, protocol=2, records=(), **options):
    return read_pickle(pickle.dumps(value, protocol), "the file", records=records, **options)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_plain_data_sizes_and_dtypes_come_back(protocol):
    value = {"a": [1, 2.5, "x", None, (True, -7)], "shape": torch.Size([3, 4]), "dtype": torch.bfloat16}
    assert read(value, protocol=protocol) == value
    state = OrderedDict(b=1, a=2)
    state._metadata = {"version": 1}
    found = read(state, protocol=protocol)
    assert list(found.items()) == [("b", 1), ("a", 2)]


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_allowed_class_becomes_a_record_and_is_not_imported(protocol):
    found = read(Fraction(3, 4), protocol=protocol, records=["fractions.Fraction"])
    assert isinstance(found, Record)
    assert not isinstance(found, Fraction)
    assert (found.kind, found.args) == ("Fraction", Fraction(3, 4).__reduce__()[1])


def test_attributes_are_those_of_dict_and_slots():
    value = Slotted()
    value.a, value.b = 1, 2
    assert read(value, records=[f"{__name__}.Slotted"]).attributes == {"a": 1, "b": 2}


def test_what_is_not_allowed_is_named_and_not_called(tmp_path):
    ran = tmp_path / "ran"
    message = r"^the file is refused: loading it would call posix\.system, .*; nothing was called"
    for records in ([], ["fractions.Fraction"]):
        with pytest.raises(ModelError, match=message):
            read([1, Touch(ran)], records=records)
    assert not ran.exists()


@pytest.mark.parametrize(
    "attack",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cbuiltins\ngetattr\n(cbuiltins\nobject\nS'__class__'\ntR.",
        b"(S'touch x'\nios\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"ctorch.storage\n_load_from_bytes\n.",
        b"ctorch\nload\n.",
    ],
)
def test_every_way_to_name_something_is_refused(attack):
    with pytest.raises(ModelError, match=r"is refused: loading it would call (builtins|os|torch)\."):
        read_pickle(attack, "the file", records=[])


@pytest.mark.parametrize("data", [b"", b"hello", pickle.dumps({"a": 1})[:-3], b"\x80\x02cfractions\nFraction\n\x81."])
def test_what_is_no_whole_pickle_is_a_users_error(data):
    with pytest.raises(ModelError, match=r"^the file cannot be read: .*; copy it again"):
        read_pickle(data, "the file", records=["fractions.Fraction"])

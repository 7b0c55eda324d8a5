import json
import math
import re

import pytest
import xxhash

from shardwise.config import ModelError
from shardwise.engine.files.verified_files import FileRecord, read_sealed_json, write_sealed_json


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some file"
    path.write_bytes(b"0123456789" * 3_000_000)  # more than one block
    return path


def test_a_record_is_the_size_and_the_hash_of_the_whole_file(file):
    assert FileRecord.of(file) == FileRecord(30_000_000, xxhash.xxh3_64_hexdigest(file.read_bytes()))
    FileRecord.of(file).check(file)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: data[:-1], "is damaged: it has 29999999 bytes, 30000000 were written"),
        (lambda data: data + b"x", "is damaged: it has 30000001 bytes, 30000000 were written"),
        (lambda data: data[:-1] + b"8", "is damaged: its xxh3 hash is not the one that was recorded"),
    ],
)
def test_a_changed_file_is_named(file, change, expected):
    record = FileRecord.of(file)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ModelError, match=re.escape(f"{file} {expected}")):
        record.check(file)


def test_a_missing_file_is_named(file):
    record = FileRecord.of(file)
    file.unlink()
    with pytest.raises(ModelError, match=r"some file is missing$"):
        record.check(file)


CONTENT = {"b": [1, 0.1, None, True], "a": {"ü": "x", "1e22": 1e22}}


def test_sealed_json_comes_back_as_it_was(tmp_path):
    write_sealed_json(tmp_path / "f.json", CONTENT)
    assert read_sealed_json(tmp_path / "f.json") == CONTENT


def test_sealed_json_is_read_whatever_json_makes_of_it(tmp_path):
    write_sealed_json(tmp_path / "f.json", {"t": {2: 1, 10: 2}, "x": [math.inf, math.nan]})
    assert read_sealed_json(tmp_path / "f.json") == {"t": {"2": 1, "10": 2}, "x": [None, None]}


def test_every_flipped_bit_of_sealed_json_is_noticed_or_changes_nothing(tmp_path):
    """White space between values, and escapes for the same letters, mean nothing."""
    path = tmp_path / "f.json"
    write_sealed_json(path, CONTENT)
    data = path.read_bytes()
    num_noticed = 0
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            path.write_bytes(flipped)
            try:
                found = read_sealed_json(path)
            except ModelError:
                num_noticed += 1
            else:
                assert found == CONTENT
    assert num_noticed > 0.9 * 8 * len(data)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"content": 1}', json.dumps({"xxh3": "0", "content": 1})])
def test_what_is_no_sealed_json_is_refused(tmp_path, text):
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(ModelError, match=r"f\.json is damaged"):
        read_sealed_json(tmp_path / "f.json")

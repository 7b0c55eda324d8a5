import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.config import ModelError
from shardwise.engine.files.safetensors_file import (
    DTYPE_NAMES,
    SafetensorsReader,
    SafetensorsWriter,
    TensorSpec,
    differences,
    host_bytes,
)


def tensors_of_every_dtype():
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for index, dtype in enumerate(DTYPE_NAMES.values()):
        raw = torch.randint(0, 2, (5, 3, 16), dtype=torch.uint8, generator=generator)
        tensors[f'{index % 4}."ü{index}'] = raw.view(dtype)
    return tensors | {"empty": torch.zeros(2, 0), "scalar": torch.tensor(3.5), "transposed": torch.rand(4, 3).t()}


def test_bytes_of_a_file_are_those_of_the_safetensors_package(tmp_path):
    """Tensors come in another order than they lie in the file."""
    tensors = tensors_of_every_dtype()
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "theirs", metadata={"format": "pt"})
    writer = SafetensorsWriter(tmp_path / "ours", {name: TensorSpec.of(tensor) for name, tensor in tensors.items()})
    for name in reversed(tensors):
        assert not writer.is_complete
        writer.write(name, tensors[name])
    writer.close()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_the_bytes_of_a_tensor_are_its_memory_which_can_still_be_resized(dtype):
    tensor = torch.arange(6).view(2, 3).to(dtype)
    assert bytes(host_bytes(tensor)) == bytes(tensor.view(torch.uint8).flatten().tolist())
    assert len(host_bytes(torch.tensor(1.5))) == 4
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0


def test_blocks_go_through_a_tensor_in_order_when_it_is_written_and_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("shardwise.engine.files.safetensors_file.BLOCK_BYTES", 7)
    tensors = {"a": torch.arange(5.0), "b": torch.arange(14, dtype=torch.uint8), "empty": torch.zeros(0)}
    writer, seen = SafetensorsWriter(tmp_path / "f", {name: TensorSpec.of(t) for name, t in tensors.items()}), {}
    for name, tensor in tensors.items():
        seen[name] = []
        writer.write(name, tensor, seen=lambda block, name=name: seen[name].append(bytes(block)))
    writer.close()
    reader = SafetensorsReader(tmp_path / "f")
    for name, tensor in tensors.items():
        read = [bytes(block) for block in reader.blocks(name)]
        assert read == seen[name]
        assert [len(block) for block in read] == [7] * (tensor.nbytes // 7) + [tensor.nbytes % 7] * (
            tensor.nbytes % 7 > 0
        )
        assert b"".join(read) == bytes(host_bytes(tensor))


def test_what_was_written_is_read_back(tmp_path):
    tensors = tensors_of_every_dtype()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "file")
    reader = SafetensorsReader(tmp_path / "file")
    assert reader.specs == {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        found = reader.read(name, [slice(0, size) for size in tensor.shape])
        assert found.shape == tensor.shape
        assert found.dtype == tensor.dtype
        assert bytes(found.flatten().view(torch.uint8).tolist()) == bytes(
            tensor.contiguous().flatten().view(torch.uint8).tolist()
        )


def test_every_box_of_a_tensor_is_the_slice(tmp_path):
    tensor = torch.arange(3 * 4 * 2, dtype=torch.int32).view(3, 4, 2)
    save_file({"before": torch.ones(7), "t": tensor}, tmp_path / "file")
    reader = SafetensorsReader(tmp_path / "file")
    parts = [[slice(a, b) for a, b in itertools.combinations_with_replacement(range(n + 1), 2)] for n in tensor.shape]
    for box in itertools.product(*parts):
        assert torch.equal(reader.read("t", box), tensor[box]), box


def test_a_file_that_is_cut_after_it_was_opened_fails_only_for_what_lies_behind_the_cut(tmp_path):
    """What a network file system does; a file mapped into memory would kill the process."""
    path = tmp_path / "file"
    save_file({"t": torch.arange(8.0)}, path)
    reader = SafetensorsReader(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 16)
    assert reader.read("t", [slice(0, 4)]).tolist() == [0, 1, 2, 3]
    with pytest.raises(ModelError) as error:
        reader.read("t", [slice(2, 6)])
    assert str(error.value) == (
        f"{path}: t cannot be read: the file ends at byte {size - 16}, the tensor at {size - 8}; "
        "download or copy it again"
    )


def with_header(path, header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"{", "Expecting property name"),
        ([], "its header is not a JSON object"),
        ({"t": ENTRY | {"dtype": "F4"}}, "t has dtype F4; known are BOOL, U8"),
        ({"t": {"dtype": "F32", "shape": [2]}}, "its header lacks 'data_offsets'"),
        ({"t": ENTRY | {"shape": [3]}}, r"t has 8 bytes, \[3\] of torch.float32 is 12"),
        ({"t": [1, 2]}, r"its header has \[1, 2\] for t, and not an object with dtype, shape and data_offsets"),
        ({"t": ENTRY | {"dtype": ["F32"]}}, r"t has dtype \['F32'\]; known are BOOL, U8"),
        ({"t": ENTRY | {"shape": ["a", 2]}}, r"t has shape \['a', 2\], which is not a list of sizes"),
        ({"t": ENTRY | {"shape": [-1, -2]}}, r"t has shape \[-1, -2\], which is not a list of sizes"),
        ({"t": ENTRY | {"shape": [2.0]}}, r"t has shape \[2.0\], which is not a list of sizes"),
        ({"t": ENTRY | {"shape": [True, 2]}}, r"t has shape \[True, 2\], which is not a list of sizes"),
        ({"t": ENTRY | {"shape": 2}}, "t has shape 2, which is not a list of sizes"),
        ({"t": ENTRY | {"data_offsets": [-8, 0]}}, r"t has data_offsets \[-8, 0\], which are not the bytes where it "),
        ({"t": ENTRY | {"data_offsets": [0, 4, 8]}}, r"t has data_offsets \[0, 4, 8\], which are not the bytes where"),
        ({"t": ENTRY | {"data_offsets": [0, "8"]}}, r"t has data_offsets \[0, '8'\], which are not the bytes where it"),
        ({"t": ENTRY | {"data_offsets": [8, 16]}}, "t begins at byte 8 of the data, where the tensor before ends at 0"),
        (
            {"t": ENTRY | {"shape": [1], "data_offsets": [0, 4]}, "u": ENTRY},
            "u begins at byte 0 of the data, where the tensor before ends at 4",
        ),
        ({"t": ENTRY | {"shape": [1], "data_offsets": [0, 4]}}, r"its tensors end at byte \d+, and the file at \d+"),
        (b"[" * 100_000, "maximum recursion depth exceeded"),
        ({}, r"its tensors end at byte 10, and the file at 18"),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(tmp_path, header, reason):
    with_header(tmp_path / "file", header)
    with pytest.raises(ModelError, match=rf"^{tmp_path}/file cannot be read as a safetensors file: {reason}") as error:
        SafetensorsReader(tmp_path / "file")
    assert str(error.value).endswith("; download or copy it again")


def test_truncated_files_are_refused_wherever_the_cut_is(tmp_path):
    save_file({"t": torch.arange(8.0)}, tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    for length in (0, 7, 8, 20, len(data) - 1):
        (tmp_path / "cut").write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"cut cannot be read as a safetensors file: (it has|its header|its tens)"):
            SafetensorsReader(tmp_path / "cut")
    with pytest.raises(ModelError, match="No such file"):
        SafetensorsReader(tmp_path / "gone")


def test_a_tensor_is_written_once_and_as_announced(tmp_path):
    writer = SafetensorsWriter(
        tmp_path / "file", {"a": TensorSpec(torch.float32, (2,)), "b": TensorSpec(torch.int8, ())}
    )
    with pytest.raises(AssertionError, match=r"a: float32 \[3\], not float32 \[2\]"):
        writer.write("a", torch.zeros(3))
    writer.write("a", torch.ones(2))
    with pytest.raises(KeyError):
        writer.write("a", torch.ones(2))
    with pytest.raises(AssertionError, match=r"\['b'\] were never written"):
        writer.close()
    writer.write("b", torch.tensor(5, dtype=torch.int8))
    writer.close()
    assert {name: tensor.tolist() for name, tensor in load_file(tmp_path / "file").items()} == {"a": [1, 1], "b": 5}


def test_differences_are_listed_by_kind():
    wanted = {"a": [2], "b": [3], "c": [4], **{f"m{n}": [1] for n in range(5)}}
    assert differences(wanted, wanted) == ""
    assert differences(wanted, {"a": [2], "b": [9], "c": [4], "x": [1]}) == (
        "5 missing: m0, m1, m2 ...; 1 not part of the model: x; 1 of the wrong shape or dtype: b is [9], expected [3]"
    )

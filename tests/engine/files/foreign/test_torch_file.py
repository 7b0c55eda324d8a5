import zipfile

import pytest
import torch
from foreign_checkpoints import Touch
from torch import nn

from shardwise.config import ModelError
from shardwise.engine.files.foreign.torch_file import StoredTensor, TorchFile
from shardwise.engine.files.safetensors_file import TensorSpec

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]
DTYPES += [torch.float8_e4m3fn, torch.uint32]


def test_tensors_of_every_kind_are_read_as_torch_load_reads_them(tmp_path):
    base = torch.randn(6, 8)
    saved = {str(dtype): (base * 3).to(dtype) for dtype in DTYPES} | {
        "transposed": base.T,
        "middle": base[2:4, 1:7],
        "every other": base.flatten()[1::2],
        "expanded": torch.arange(3.0)[:, None].expand(3, 5),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "parameter": nn.Parameter(base[1]),
    }
    torch.save({"nested": [saved], "step": 3}, tmp_path / "f.pt")
    content = TorchFile(tmp_path / "f.pt").content
    assert content["step"] == 3
    found = content["nested"][0]
    assert found.keys() == saved.keys()
    for name, tensor in saved.items():
        assert isinstance(found[name], StoredTensor)
        assert found[name].spec == TensorSpec.of(tensor)
        read = found[name].read()
        assert read.is_contiguous()
        assert torch.equal(read.view(torch.uint8) if read.dim() else read, bytes_of(tensor)), name


def bytes_of(tensor):
    return tensor.detach().contiguous().view(torch.uint8) if tensor.dim() else tensor.detach()


def test_a_file_may_stand_inside_of_another(tmp_path):
    torch.save(torch.arange(5), tmp_path / "inner")
    inner = (tmp_path / "inner").read_bytes()
    (tmp_path / "outer").write_bytes(b"x" * 77 + inner + b"y" * 99)
    found = TorchFile(tmp_path / "outer", start=77, num_bytes=len(inner)).content
    assert found.read().tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ModelError, match=rf"outer is cut: it has {176 + len(inner)} bytes and should have "):
        TorchFile(tmp_path / "outer", start=177, num_bytes=len(inner))


def test_a_pickle_that_would_run_code_is_refused_and_nothing_runs(tmp_path):
    torch.save({"w": torch.ones(2), "x": Touch(tmp_path / "ran")}, tmp_path / "f.pt")
    with pytest.raises(ModelError, match=r"f\.pt is refused: loading it would call posix\.system, "):
        TorchFile(tmp_path / "f.pt")
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_cut_or_of_another_format_is_refused(tmp_path):
    path = tmp_path / "f.pt"
    torch.save(torch.ones(50), path)
    whole = path.read_bytes()
    for content in (whole[:-30], whole[:100], b"", b"text"):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"f\.pt cannot be read as a file of torch\.save: .*; copy it again"):
            TorchFile(path)
    with pytest.raises(ModelError, match=r"none\.pt cannot be read as a file of torch\.save: .*No such file"):
        TorchFile(tmp_path / "none.pt")
    torch.save(torch.ones(50), path, _use_new_zipfile_serialization=False)
    with pytest.raises(ModelError, match=r"save it with torch 1\.6 or newer"):
        TorchFile(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/other.txt", "hello")
    with pytest.raises(ModelError, match=r"f\.pt is no file of torch\.save: its archive holds no data\.pkl"):
        TorchFile(path)


def test_a_changed_bit_is_found_before_a_tensor_is_given(tmp_path):
    path = tmp_path / "f.pt"
    torch.save({"a": torch.full((50,), 1.5), "b": torch.zeros(3)}, path)
    data = bytearray(path.read_bytes())
    place = data.index(torch.full((50,), 1.5).numpy().tobytes())
    data[place + 41] ^= 1
    path.write_bytes(data)
    content = TorchFile(path).content
    assert content["b"].read().tolist() == [0, 0, 0]
    for _ in range(2):
        with pytest.raises(ModelError, match=r"f\.pt is damaged: .*data/0 does not have its CRC-32; copy it again"):
            content["a"].read()


def test_a_tensor_that_reaches_outside_of_its_storage_is_refused(tmp_path):
    """The pickle claims nine numbers of a storage of four."""
    torch.save(torch.ones(4), tmp_path / "f.pt")
    stored = TorchFile(tmp_path / "f.pt").content
    for shape, stride, offset in [
        ((9,), (1,), 0),
        ((2,), (1,), 3),
        ((2,), (4,), 0),
        ((1,), (1,), -1),
        ((3,), (-1,), 2),
    ]:
        claimed = StoredTensor(TensorSpec(torch.float32, shape), stored.file, stored.key, stride, offset)
        with pytest.raises(ModelError, match=r"f\.pt is damaged: a tensor lies outside of its data"):
            claimed.read()

"""Messages between processes as one byte buffer: a JSON header and raw tensors. Nothing is unpickled, so none executes.

Layout: 8 bytes header length, the header, padding to 8, then the buffers, each padded to 8.
What can travel: None, bool, int, float, str, lists, tuples (as lists), dicts with string keys, tensors (copied to the
host), and the dataclasses of `shardwise.types`.
"""

import dataclasses
import json
from typing import Any

import torch
from torch import Tensor

import shardwise.types as nouns

_NOUNS = {name: noun for name, noun in vars(nouns).items() if isinstance(noun, type) and dataclasses.is_dataclass(noun)}
_LONG_LIST = 32


def encode(value: Any) -> Tensor:
    """Returns the message as a [num_bytes] uint8 tensor. Raises TypeError for a value of another kind."""
    buffers: list[Tensor] = []
    header = json.dumps(_pack(value, buffers)).encode()
    parts = [torch.tensor([len(header)]).view(torch.uint8), _bytes(header)]
    parts += [buffer.view(-1).view(torch.uint8) for buffer in buffers]
    return torch.cat([_padded(part) for part in parts])


def decode(message: Tensor) -> Any:
    """Returns the value that was encoded; tensors get memory of their own."""
    length = int(message[:8].view(torch.int64))
    header = json.loads(message[8 : 8 + length].numpy().tobytes())
    return _unpack(header, message, [8 + _aligned(length)])


def _pack(value: Any, buffers: list[Tensor]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        buffers.append(value.detach().cpu().contiguous())
        return {"$tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, (list, tuple)):
        kinds = {type(item) for item in value} if len(value) > _LONG_LIST else set()
        # Token ids and logprobs: as text they would be the bulk of a message.
        if kinds == {float}:
            return {"$list": _pack(torch.tensor(value, dtype=torch.float64), buffers)}
        if kinds == {int} and min(value) >= -(2**63) and max(value) < 2**63:
            return {"$list": _pack(torch.tensor(value, dtype=torch.int64), buffers)}
        return [_pack(item, buffers) for item in value]
    if isinstance(value, dict):
        bad = [key for key in value if not isinstance(key, str) or key.startswith("$")]
        if bad:
            raise TypeError(f"cannot send a dict with the key {bad[0]!r}; keys are strings that do not begin with $")
        return {key: _pack(item, buffers) for key, item in value.items()}
    if _NOUNS.get(type(value).__name__) is type(value):
        packed = {field.name: _pack(getattr(value, field.name), buffers) for field in dataclasses.fields(value)}
        return {"$noun": [type(value).__name__, packed]}
    raise TypeError(
        f"cannot send a {type(value).__name__}; send numbers, strings, tensors, lists, dicts or shardwise.types"
    )


def _unpack(node: Any, message: Tensor, cursor: list[int]) -> Any:
    """`cursor` holds the offset of the next buffer: header and buffers are read in the order they were written."""
    if isinstance(node, list):
        return [_unpack(item, message, cursor) for item in node]
    if not isinstance(node, dict):
        return node
    if "$tensor" in node:
        name, shape = node["$tensor"]
        dtype = getattr(torch, name)
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        raw = message[cursor[0] : cursor[0] + num_bytes].clone()
        cursor[0] += _aligned(num_bytes)
        return raw.view(dtype).view(shape)
    if "$list" in node:
        return _unpack(node["$list"], message, cursor).tolist()
    if "$noun" in node:
        name, packed = node["$noun"]
        return _NOUNS[name](**{key: _unpack(item, message, cursor) for key, item in packed.items()})
    return {key: _unpack(item, message, cursor) for key, item in node.items()}


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def _padded(part: Tensor) -> Tensor:
    return torch.nn.functional.pad(part, (0, _aligned(part.numel()) - part.numel()))

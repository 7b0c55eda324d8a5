"""Attention of a decode step on a CPU: one new token of every row, over that row's cached keys and values.

torch's own reads every row as far as the longest reaches, and is slow at one query a row: at 64 rows of 160 tokens and
head dim 64 this kernel takes a third of its time. What builds torch.compile's kernels builds it.

Shapes: B rows, H query heads, K key/value heads, C capacity of the cache in tokens, d head dim.
"""

import ctypes
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch._inductor.codecache import CppCodeCache
from torch._inductor.exc import InvalidCxxCompiler

from shardwise.config import ConfigError

SOURCE = Path(__file__).with_suffix(".cpp")


class _Shape(ctypes.Structure):
    """`Shape` of the source."""

    _fields_: ClassVar = [(name, ctypes.c_int64) for name in ("rows", "kv_heads", "queries", "d", "dv", "capacity")]


class DecodeAttention:
    """The kernel, compiled once and kept in torch's cache of compiled code."""

    def __init__(self) -> None:
        """
        Raises:
            ConfigError: there is no C++ compiler.
        """
        try:
            library = CppCodeCache.load(SOURCE.read_text(), device_type="cpu")
        except InvalidCxxCompiler:
            raise ConfigError(
                "rollout.engine.compile_decode=true needs a C++ compiler on a CPU, and none is found: install g++ or "
                "clang, name one in the environment variable CXX, or set compile_decode to false"
            ) from None
        pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self._entries = {
            torch.float32: library.decode_attention_float32,
            torch.bfloat16: library.decode_attention_bfloat16,
            torch.float16: library.decode_attention_float16,
        }
        for entry in self._entries.values():
            entry.argtypes = [*[pointer] * 8, ctypes.POINTER(_Shape), number, number, integer, ctypes.c_int]
            entry.restype = None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Stores key and value of each row at its position, and attends over all up to there.

        Args:
            query: [B, H, 1, d]. key, value: [B, K, 1, d]; the value's head dim may differ.
            keys, values: [B or more, K, C, d], contiguous.
            positions: [B] int64, below C.
            scaling, window, softcap: as in `attend`.
            sinks: [H].
        Returns:
            [B, H, 1, dv].
        """
        num_rows, num_heads, _, head_dim = query.shape
        num_kv_heads, capacity, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
        out = query.new_empty(num_rows, num_heads, 1, value_dim)
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        floats = None if sinks is None else sinks.float().contiguous()
        shape = _Shape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim, value_dim, capacity)
        self._entries[query.dtype](
            *(tensor.data_ptr() for tensor in (out, query, key, value, keys, values, positions)),
            None if floats is None else floats.data_ptr(),
            shape,
            head_dim**-0.5 if scaling is None else scaling,
            softcap or 0.0,
            window or 0,
            torch.get_num_threads(),
        )
        return out

"""CPU kernels for decode steps: attention of one new token per row over that row's cached keys and values, and the
projection of a few hidden states to float32 logits.

torch's attention reads every row up to the length of the longest one, and is slow with one query per row: at 64 rows of
160 tokens and head dim 64 ours takes a third of its time. torch's product of float32 rows with a vocabulary of 8192
takes twice (64 rows) to ten times (one row) as long as ours, which reads both in their own dtype. Each row gets the
same bits whatever the other rows are. The toolchain that builds torch.compile's kernels builds these.

Shapes: B rows, H query heads, K key/value heads, C capacity of the cache in tokens, d head dim, D hidden size,
V vocabulary.
"""

import ctypes
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from shardwise.config import ConfigError

SOURCE = Path(__file__).with_suffix(".cpp")


class _Shape(ctypes.Structure):
    """The struct `Shape` of the C++ source."""

    _fields_: ClassVar = [(name, ctypes.c_int64) for name in ("rows", "kv_heads", "queries", "d", "dv", "capacity")]


class DecodeKernels:
    """The kernels, compiled once and kept in torch's cache of compiled code."""

    def __init__(self) -> None:
        """Compiles or loads the kernels.

        Raises:
            ConfigError: there is no C++ compiler.
        """
        from torch._inductor.codecache import CppCodeCache  # importing it takes a while, and few runs compile
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            library = CppCodeCache.load(SOURCE.read_text(), device_type="cpu")
        except InvalidCxxCompiler:
            raise ConfigError(
                "rollout.engine.compile_decode=true needs a C++ compiler on a CPU, and none is found: install g++ or "
                "clang, name one in the environment variable CXX, or set compile_decode to false"
            ) from None
        pointer, integer, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
        self._attend, self._project = {}, {}
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            name = str(dtype).removeprefix("torch.")
            attend, project = library[f"attend_{name}"], library[f"project_{name}"]
            attend.argtypes = [*[pointer] * 8, ctypes.POINTER(_Shape), number, number, integer, integer, threads]
            project.argtypes = [*[pointer] * 3, *[integer] * 3, threads]
            attend.restype = project.restype = None
            self._attend[dtype], self._project[dtype] = attend, project

    def attend(
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
        chunk: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Stores each row's key and value at its position, then attends over all positions up to that one.

        Args:
            query: [B, H, 1, d]. key, value: [B, K, 1, d]; the value's head dim may differ.
            keys, values: [B or more, K, C, d], contiguous.
            positions: [B] int64, below C.
            scaling, window, chunk, softcap: as in `ops.attend`.
            sinks: [H].
        Returns:
            [B, H, 1, dv].
        """
        dtypes = {tensor.dtype for tensor in (query, key, value, keys, values)}
        assert len(dtypes) == 1, f"attention of mixed dtypes: {dtypes}"  # C would read one as the other
        num_rows, num_heads, _, head_dim = query.shape
        num_kv_heads, capacity, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
        out = query.new_empty(num_rows, num_heads, 1, value_dim)
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        floats = None if sinks is None else sinks.float().contiguous()
        shape = _Shape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim, value_dim, capacity)
        self._attend[query.dtype](
            *(tensor.data_ptr() for tensor in (out, query, key, value, keys, values, positions)),
            None if floats is None else floats.data_ptr(),
            shape,
            head_dim**-0.5 if scaling is None else scaling,
            softcap or 0.0,
            window or 0,
            chunk or 0,
            torch.get_num_threads(),
        )
        return out

    def project(self, states: Tensor, weight: Tensor) -> Tensor:
        """Computes states [B, D] @ weight [V, D]^T -> [B, V] float32, like `ops.project_float32`."""
        dtype = torch.promote_types(states.dtype, weight.dtype)
        states, weight = states.to(dtype).contiguous(), weight.to(dtype).contiguous()
        out = states.new_empty(len(states), len(weight), dtype=torch.float32)
        self._project[dtype](
            *(tensor.data_ptr() for tensor in (out, states, weight)),
            *states.shape,
            len(weight),
            torch.get_num_threads(),
        )
        return out

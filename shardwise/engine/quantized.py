"""Frozen base weights in 4 bits (QLoRA, Dettmers et al. 2023), packed and unpacked by bitsandbytes.

Blocks of 64 numbers lie within a row, so a row is quantized alike on every layout, and FSDP shards, gathers and
offloads the packed rows as it does any weight.
"""

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.torch_version import TorchVersion
from transformers.pytorch_utils import Conv1D

from shardwise.config import ConfigError
from shardwise.engine.shards import local_shard
from shardwise.ops import plain_name

BLOCK = 64
"""Numbers that share a scale."""
CODE_BYTES = BLOCK // 2
BLOCK_BYTES = CODE_BYTES + torch.float32.itemsize
"""Bytes of a block with its scale: 4.5 bits for each number."""
FORMAT: Final = "nf4"
MIN_TORCH = "2.12"
"""FSDP of earlier releases makes every shard a parameter with gradients, which integers cannot have."""
SHARDS_INTEGERS = torch.__version__ >= TorchVersion(MIN_TORCH)


@cache
def _kernels() -> ModuleType:
    """Imports bitsandbytes' kernels on first use, since that takes seconds. Raises ConfigError: they cannot be
    imported."""
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise ConfigError(
            f"engine.lora.quantize_base needs bitsandbytes, which cannot be imported ({error}); "
            "pip install bitsandbytes, or leave the key out"
        ) from None
    return cast(ModuleType, bitsandbytes.functional)


def packed_bytes(row_length: int) -> int:
    """Bytes of a packed row."""
    return -(-row_length // BLOCK) * BLOCK_BYTES


def pack_rows(rows: Tensor) -> Tensor:
    """[n, length] -> uint8 [n, bytes]: each row has the codes of its blocks, then their float32 scales. A row's last
    block is padded with zeros."""
    if len(rows) == 0:
        return torch.empty(0, packed_bytes(rows.shape[1]), dtype=torch.uint8, device=rows.device)
    whole_blocks = pad(rows, (0, -rows.shape[1] % BLOCK)).contiguous()
    codes, state = _kernels().quantize_4bit(whole_blocks, blocksize=BLOCK, quant_type=FORMAT)
    return torch.cat([codes.view(len(rows), -1), state.absmax.view(len(rows), -1).view(torch.uint8)], dim=1)


@torch.library.custom_op("shardwise::unpack_rows", mutates_args=())
def unpack_rows(packed: Tensor, row_length: int, dtype: torch.dtype) -> Tensor:
    """uint8 [n, bytes] -> [n, row_length] in float32, bfloat16 or float16. Compiled layers see one operation."""
    if len(packed) == 0:
        return torch.empty(0, row_length, dtype=dtype, device=packed.device)
    num_blocks = packed.shape[1] // BLOCK_BYTES
    codes, scales = packed.split([num_blocks * CODE_BYTES, packed.shape[1] - num_blocks * CODE_BYTES], dim=1)
    state = _kernels().QuantState(
        absmax=scales.contiguous().view(torch.float32).view(-1),
        shape=torch.Size((len(packed), num_blocks * BLOCK)),
        dtype=dtype,
        blocksize=BLOCK,
        quant_type=FORMAT,
    )
    return cast(Tensor, _kernels().dequantize_4bit(codes.contiguous().view(-1, 1), state)[:, :row_length]).contiguous()


@unpack_rows.register_fake
def _unpacked_shape(packed: Tensor, row_length: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(len(packed), row_length, dtype=dtype)


class QuantizedLinear(nn.Linear):
    """A linear layer whose frozen weight is packed, uint8 [rows, bytes]: the rows of the weight as it is stored, which
    is [in, out] for a Conv1D. It computes in the dtype of its input."""

    def __init__(self, linear: nn.Linear | Conv1D) -> None:
        """Stands in for a layer on the meta device, and takes over its bias."""
        nn.Module.__init__(self)
        self.is_transposed = isinstance(linear, Conv1D)
        self.stored_shape: torch.Size = linear.weight.shape
        self.out_features, self.in_features = reversed(self.stored_shape) if self.is_transposed else self.stored_shape
        num_rows, row_length = self.stored_shape
        packed = torch.empty(num_rows, packed_bytes(row_length), dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def forward(self, input: Tensor) -> Tensor:
        output = cast(Tensor, _Product.apply(input, self.weight, self.stored_shape[1], self.is_transposed))
        return output if self.bias is None else output + self.bias

    def fill(self, rows: Tensor) -> None:
        """Packs this rank's rows, given as they are stored."""
        own = local_shard(self.weight)
        own.copy_(pack_rows(rows.to(own.device, torch.float32)))

    def unpacked(self) -> Tensor:
        """The unpacked weight, float32, sharded like the packed one."""
        return self._beside(unpack_rows(local_shard(self.weight), self.stored_shape[1], torch.float32))

    def outline(self) -> Tensor:
        """The unpacked weight's shape and sharding, without memory."""
        return self._beside(torch.empty(len(local_shard(self.weight)), self.stored_shape[1], device="meta"))

    def _beside(self, rows: Tensor) -> Tensor:
        """A tensor made of this rank's rows, sharded like the packed ones."""
        weight: Tensor = self.weight
        if not isinstance(weight, DTensor):
            return rows
        shape, stride = self.stored_shape, (self.stored_shape[1], 1)
        return DTensor.from_local(
            rows, weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride
        )


class _Product(torch.autograd.Function):
    """x W^T, or x W where the stored rows are those of [in, out]. W is unpacked in the forward and once more in the
    backward pass; in between only the packed weight is kept, which FSDP may free and gather again."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, packed: Tensor, row_length: int, is_transposed: bool) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.row_length, ctx.is_transposed = row_length, is_transposed
        rows = unpack_rows(packed, row_length, input.dtype)
        return input @ (rows if is_transposed else rows.T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (packed,) = ctx.saved_tensors
        rows = unpack_rows(packed, ctx.row_length, grad.dtype)
        return grad @ (rows.T if ctx.is_transposed else rows), None, None, None


def quantize_layers(model: nn.Module, names: Sequence[str]) -> None:
    """Puts a QuantizedLinear into the place of every linear layer in `names`, on the meta device, before the model is
    sharded. Raises ConfigError: bitsandbytes is missing, or torch is too old."""
    if not SHARDS_INTEGERS:
        raise ConfigError(
            f"engine.lora.quantize_base needs torch {MIN_TORCH} or newer, and this is {torch.__version__}, whose FSDP "
            "shards floating-point numbers only; install a newer torch, or leave the key out"
        )
    _kernels()
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear | Conv1D), f"{name} is {type(layer).__name__}"
        model.set_submodule(name, QuantizedLinear(layer))


def quantized_weights(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Name of a packed weight in the transformers class -> its layer."""
    layers = ((plain_name(path), part) for path, part in model.named_modules() if isinstance(part, QuantizedLinear))
    return {f"{path.removesuffix('.base_layer')}.weight": layer for path, layer in layers}

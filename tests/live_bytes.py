"""How many bytes of tensors are alive, and the weights of a model large enough to count them."""

import time

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.engine.weights import stream_weights

PATIENCE_SECONDS = 0.2


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made meanwhile held at a time, beside the parameters and buffers of `models`. Threads
    (gloo's, those that hash) let a tensor go a moment after they are done with it: what is more than ever before counts
    when it stays."""

    def __init__(self, *models):
        super().__init__()
        tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        shards = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
        self._before = {shard.untyped_storage().data_ptr() for shard in shards}
        self._live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if type(leaf) is torch.Tensor and leaf.untyped_storage().data_ptr() not in self._before:
                storage = leaf.untyped_storage()
                self._live[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        patient_until = time.monotonic() + PATIENCE_SECONDS
        while (live := self._count()) > 1.02 * self.peak and time.monotonic() < patient_until:
            time.sleep(0.01)
        self.peak = max(self.peak, live)
        return out

    def _count(self):
        self._live = {place: held for place, held in self._live.items() if not held[0].expired()}
        return sum(num_bytes for _, num_bytes in self._live.values())


UNITS = {
    "qwen3": {"hidden_size": 1024, "intermediate_size": 6144, "num_hidden_layers": 2},
    "qwen3_moe": {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 16, "num_hidden_layers": 3},
}
"""Sizes of tiny_folder whose layers are larger than the buckets that small tensors are gathered in."""


class ModelSender:
    """Sends the weights of a sharded model."""

    def __init__(self, model):
        self._model = model

    def named_weights(self, dtype):
        return stream_weights(self._model, dtype)


def unit_bytes(model):
    """Of the largest layer."""
    return max(sum(weight.nbytes for weight in layer.parameters()) for layer in model.base_model.layers)

"""Checkpoints as other trainers write them; `write_verl` and `write_dcp` run on ranks."""

import pickle
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_models import tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwise.engine.files.foreign import ShardedTensor, ShardedTensors
from shardwise.engine.files.foreign.tensors import Piece
from shardwise.engine.files.safetensors_file import TensorSpec

NUM_UPDATES = 3


def sharded(family, axes, **overrides):
    """A tiny model as FSDP2 shards it over a mesh of these axes, its class kept; the root is the Sequential."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model = tiny_model(family, **overrides)
    root = nn.Sequential(model)
    for unit in (*model.base_model.layers, root):
        fully_shard(unit, mesh=mesh)
    return model


def train(model):
    """Some updates by gradients that every rank can compute; returns the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(NUM_UPDATES):
        for parameter in model.parameters():
            parameter.grad = (parameter.detach() * 0.5).cos()
        optimizer.step()
    return optimizer


def write_verl(folder, family, axes, trained, overrides):
    """What verl's FSDP workers write into global_step_N/actor, without huggingface/. Rank 0 returns the whole model's
    tensors, with AdamW's states by (parameter, key)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = sharded(family, axes, **overrides)
    optimizer = train(model) if trained else None
    name = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    torch.save(model.state_dict(), folder / f"model_{name}")
    torch.save({"lr_scheduler": None, "rng": None}, folder / f"extra_state_{name}")
    if optimizer is not None:
        torch.save(optimizer.state_dict(), folder / f"optim_{name}")
    return whole(model), optimizer_states(model, optimizer)


def write_dcp(folder, family, keys, overrides):
    """A folder of torch.distributed.checkpoint with the model under the first key, and under the second the optimizer
    by the names of its parameters."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = sharded(family, {"fsdp": dist.get_world_size()}, **overrides)
    optimizer = train(model)
    for parameter in model.parameters():
        parameter.grad = None  # with gradients there, torch gives no states
    state = model.state_dict()
    if keys is not None:
        model_key, optimizer_key = keys
        states = get_optimizer_state_dict(model, optimizer)
        state = {"app": {model_key: state, optimizer_key: states}, "num_tokens": 7}
    dcp.save(state, checkpoint_id=folder)
    return whole(model), optimizer_states(model, optimizer)


def whole(model):
    return {name: _full(tensor).numpy() for name, tensor in model.state_dict().items()}


def optimizer_states(model, optimizer):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{key}/{names[id(parameter)]}": _full(value).numpy()
        for parameter, state in ({} if optimizer is None else optimizer.state).items()
        for key, value in state.items()
    }


def _full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Touch:
    """Unpickled by torch.load or pickle.load, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os

        return os.system, (f"touch {self.path}",)


def pickled_attack(path):
    return pickle.dumps(Touch(path))


def _halves(name, tensor, log=None):
    """In two pieces, as two ranks would hold it; reads are logged."""

    def piece(start, stop):
        def read():
            if log is not None and start == 0:
                log.append(name)
            return tensor[start:stop].clone()

        return Piece((start, *[0] * (tensor.dim() - 1)), (stop - start, *tensor.shape[1:]), read)

    middle = -(-tensor.shape[0] // 2)
    pieces = [piece(0, middle), piece(middle, tensor.shape[0])]
    return ShardedTensor.of(name, TensorSpec.of(tensor), pieces, origin=Path("source"))


def in_halves(tensors, log=None):
    """Tensors of a checkpoint of two ranks, in memory."""
    return ShardedTensors(
        Path("source"), {name: _halves(name, tensor.detach(), log) for name, tensor in tensors.items()}
    )

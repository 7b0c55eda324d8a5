"""Routers that are kept out of training stay as they are, bit for bit, and all else is trained, saved and loaded."""

from pathlib import Path

import torch
import torch.distributed as dist
from tiny_models import random_samples, tiny_folder, tiny_model

from shardwise.config import EngineConfig, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.data.synthetic import train_tokenizer
from shardwise.engine import TrainEngine
from shardwise.recipes.losses import sft_loss

UNITS = {"wrap_policy": {"moe_experts": ["Qwen3MoeExperts"]}}
GATE_UNITS = {"module_precision": [{"module": "model.layers.*.mlp.gate"}]}


def step(engine):
    packed = pack(random_samples([9, 5, 12, 7]), num_shards=dist.get_world_size(), max_tokens=12)
    engine.forward_backward(packed.shards[dist.get_rank()], sft_loss, packed.denominators)
    engine.optim_step()


def build(folder, keys):
    config = EngineConfig(freeze_router=True, router_aux_loss_coef=0.1, **keys)
    return TrainEngine.build(
        Path(folder), config, device=torch.device("cpu"), optimizer=OptimizerConfig(learning_rate=0.1)
    )


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.named_weights(torch.float32)}


def train_save_and_go_on(folder, cells, to):
    """Of every cell: the weights after two steps, and after one step, a save, and the second step in a new engine."""
    found = []
    for place, keys in enumerate(cells):
        engine = build(folder, keys)
        step(engine)
        state, model = Path(to) / f"state{place}", Path(to) / f"model{place}"
        engine.state.save(state)
        engine.export_hf(model, train_tokenizer(["2+3=5"], vocab_size=261))
        step(engine)
        other = build(model, keys)
        other.state.load(state)
        step(other)
        found.append((weights(engine), weights(other)))
    return found


def test_frozen_routers_stay_and_everything_else_is_trained(run_ranks, tmp_path):
    """In units with trained weights and in units of their own, gradients reduced each time or once."""
    cells = [UNITS | {"reduce_gradients": "last_micro_batch"}, GATE_UNITS | {"fsdp_size": 1}]
    before = tiny_model("qwen3_moe").state_dict()
    folder = tiny_folder("qwen3_moe", tmp_path / "source")
    for rank in run_ranks(train_save_and_go_on, 2, str(folder), cells, str(tmp_path)):
        for after, resumed in rank:
            for name, weight in after.items():
                assert torch.equal(weight, before[name]) == name.endswith("mlp.gate.weight"), name
                assert torch.equal(weight, resumed[name]), name

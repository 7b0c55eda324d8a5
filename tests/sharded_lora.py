"""A tiny model with adapters, sharded by hand in the engine's order, and peft's own model to hold against it."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_models import random_samples, reference_logprobs
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shardwise.config import EngineConfig, LoraConfig
from shardwise.engine.files.adapters import init_adapters
from shardwise.engine.files.loading import load_weights
from shardwise.engine.lora import base_names, inject_lora
from shardwise.engine.mesh import ParallelDims
from shardwise.engine.precision import Precision
from shardwise.engine.quantized import SHARDS_INTEGERS
from shardwise.engine.shards import local_box
from shardwise.families import decoder_layers

needs_integer_shards = pytest.mark.skipif(not SHARDS_INTEGERS, reason="FSDP of this torch shards no integers")

SAVED = {
    "qwen3": ["model.norm"],
    "llama": ["lm_head", "model.embed_tokens"],
    "qwen3_moe": ["lm_head"],
    "gpt2": ["ln_f"],
}
"""Modules to save; the heads of qwen3 and gpt2 are tied."""
VARIANTS = {
    "lora": LoraConfig(rank=3, alpha=12, target_modules=["q_proj", "self_attn.v_proj", "down_proj"]),
    "rslora": LoraConfig(rank=3, alpha=12, use_rslora=True),
    "dora": LoraConfig(rank=3, alpha=12, use_dora=True),
    "conv1d": LoraConfig(rank=3, alpha=12, use_rslora=True, target_modules=["c_attn", "mlp.c_proj"]),
    "experts": LoraConfig(rank=3, alpha=12, target_modules=["q_proj"], target_parameters=["gate_up_proj", "down_proj"]),
    "only_experts": LoraConfig(
        rank=3, alpha=12, use_rslora=True, target_modules=[], target_parameters=["0.mlp.experts.down_proj"]
    ),
}
LENGTHS = [9, 13, 6, 11]
"""One sequence for each of four ranks, two for each of two."""


def samples():
    return random_samples(LENGTHS)


def meta_model(folder):
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32, attn_implementation="eager"
        ).train()


def build(folder, lora: LoraConfig, *, dtype=torch.float32, fsdp_size=None, checkpointed=False, seed=0):
    """inject, wrap, shard, materialize, load, initialize."""
    model = meta_model(folder)
    inject_lora(model, lora)
    Precision(model, EngineConfig(param_dtype=str(dtype).removeprefix("torch."))).cast_parameters(model)
    if checkpointed:
        layers = set(decoder_layers(model))
        for path, layer in [(path, part) for path, part in model.named_modules() if part in layers]:
            model.set_submodule(path, checkpoint_wrapper(layer))
    dims = ParallelDims.from_sizes(world_size=dist.get_world_size(), fsdp_size=fsdp_size, ulysses_size=1)
    mesh = dims.build("cpu").fsdp
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*decoder_layers(model), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))  # what nobody fills shows
        parameter._is_hf_initialized = True
    model.initialize_weights()
    load_base(model, folder)
    init_adapters(model, seed)
    load_weights(model, Path(folder), copies=True)
    return model


@torch.no_grad()
def load_base(model, folder):
    from transformers import AutoModelForCausalLM

    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    state = model.state_dict()
    for name, base in base_names(model).items():
        if base in stored:
            copy_whole(state[name], stored[base])


def copy_whole(tensor, whole):
    if isinstance(tensor, DTensor):
        from torch.distributed.tensor import distribute_tensor

        whole = distribute_tensor(whole.to(tensor.dtype), tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(whole)


def logits(model):
    with torch.no_grad():
        result = [model(input_ids=s.token_ids[None], use_cache=False).logits[0].float() for s in samples()]
    if isinstance(model, FSDPModule):
        model.reshard()
    return result


def loss_and_gradients(model, num_ranks=1, rank=0):
    """The mean loss of all trained tokens, this rank's part of it, and the gradients by name."""
    total, num_tokens = 0.0, sum(int(s.loss_mask.sum()) for s in samples())
    for sample in samples()[rank::num_ranks]:
        loss = -reference_logprobs(model, sample.token_ids)[sample.loss_mask].sum() / num_tokens
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def wholes(tensors):
    """Name -> the whole of each tensor, in memory of its own, put together in one exchange over the default group.
    DTensor's own way may take a mesh of an earlier call with the same ranks out of torch's caches, whose groups are
    gone."""
    mine = {name: (local_box(t)[0].start, t.to_local()) for name, t in tensors.items() if isinstance(t, DTensor)}
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    found = {}
    for name, tensor in tensors.items():
        if name in mine:
            by_place = {(start, len(rows)): rows for start, rows in (of_rank[name] for of_rank in of_ranks)}
            found[name] = torch.cat([by_place[place] for place in sorted(by_place)])  # replicas hold the same
        else:
            found[name] = tensor.clone()
    return found


def base_model(folder, task_type):
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    auto_class = {"CAUSAL_LM": AutoModelForCausalLM, "TOKEN_CLS": AutoModelForTokenClassification}[task_type]
    return auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def peft_model(folder, adapter_folder, task_type="CAUSAL_LM"):
    from peft import PeftModel

    return PeftModel.from_pretrained(base_model(folder, task_type), adapter_folder, is_trainable=True)


def random_adapter(folder, lora: LoraConfig, adapter_folder, task_type="CAUSAL_LM"):
    """An adapter that peft made and wrote, every trained tensor of it random. Of TOKEN_CLS the head is trained too."""
    torch.manual_seed(0)
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    base = base_model(folder, task_type)
    config = PeftLoraConfig(
        task_type=task_type,
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.target_modules,
        target_parameters=lora.target_parameters or None,
        modules_to_save=lora.modules_to_save or None,
        use_dora=lora.use_dora,
        use_rslora=lora.use_rslora,
        fan_in_fan_out=base.config.model_type == "gpt2",
    )
    model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(adapter_folder)
    return adapter_folder

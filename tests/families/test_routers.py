"""Which modules are routers, and what is read of them, against what transformers records and what experts are given."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.families import Router, UnreadableRouter, routers_of

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
NAMED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
} | NAMED
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
FAMILIES = {
    "qwen2_moe": NAMED | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": NAMED,
    "mixtral": LOCAL,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": ROUTED | LATENT | {"num_key_value_heads": 4},
    "deepseek_v3": ROUTED | LATENT | {"num_key_value_heads": 4},
    "glm4_moe": ROUTED,
    "gpt_oss": LOCAL,
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4},
    "minimax_m2": LOCAL,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_intermediate_size": 16, "moe_k": 2},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "afmoe": NAMED | {"num_dense_layers": 1},
    "cohere2_moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "hy_v3": NAMED | {"num_shared_experts": 1},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8},
    "llama4_text": LOCAL | {"intermediate_size_mlp": 48},
}
OTHERS_THAN_FUSED = {"jetmoe": ["mlp.router", "self_attention.experts.router"], "llama4_text": ["feed_forward.router"]}
"""Routers of a layer whose experts are given no indices: what they choose is compared with the largest logits."""


def random_model(family):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **COMMON | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_is_what_transformers_records_and_gives_its_experts(family):
    model, read, given = random_model(family), [], []
    routers = routers_of(model)
    for router in routers:
        router.modules[0].register_forward_hook(
            lambda _, __, output, r=router: read.append((r, output, *r.read(output)))
        )
    for path, module in model.named_modules():
        if path.rpartition(".")[2] == "experts" and family not in OTHERS_THAN_FUSED:
            module.register_forward_hook(lambda _, args, __: given.append(args[1:]))
    recorded = model(torch.randint(3, 97, (1, 13)), use_cache=False, output_router_logits=True).router_logits
    assert len(read) == len(routers)
    recorded = [logits for logits in recorded if logits is not None]
    if family == "jetmoe":  # of the attention's router transformers records it twice
        assert [router.path for router in routers] == [
            f"model.layers.{layer}.{name}" for layer in range(2) for name in OTHERS_THAN_FUSED[family]
        ]
    else:
        assert len(routers) == len(recorded) > 0
        for logits, (_, _, found, _) in zip(recorded, read, strict=True):
            assert torch.equal(found, logits.flatten(0, -2))
    for place, (router, output, logits, experts) in enumerate(read):
        if family in OTHERS_THAN_FUSED:
            assert torch.equal(experts.sort().values, logits.topk(experts.shape[1]).indices.sort().values)
            continue
        assert torch.equal(experts, given[place][0])
        assert router.carrier(output)[1] is given[place][1]


@pytest.mark.parametrize("holder", ["router", "block", "config"])
def test_a_model_that_declares_nothing_is_looked_through_for_gates_beside_experts(holder):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(4, 3, bias=False), nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
            if holder != "config":
                (self if holder == "block" else self.gate).top_k = 2

    model = nn.ModuleDict({"gate": nn.Linear(4, 4), "layers": nn.ModuleList([Block(), Block()])})
    model.config = SimpleNamespace(num_experts_per_tok=2 if holder == "config" else 3)
    routers = routers_of(model)
    assert [router.path for router in routers] == ["layers.0.gate", "layers.1.gate"]
    output = routers[0].modules[0](torch.randn(1, 5, 4))
    logits, experts = routers[0].read(output)
    assert torch.equal(logits, output[0])
    assert torch.equal(experts, output[0].topk(2).indices)
    assert routers[0].carrier(output) == (0, output)


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (torch.zeros(5, 3), "neither gives the experts that it chooses nor says in top_k how many they are"),
        ((torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 3)), "does not give its logits"),
    ],
)
def test_a_router_that_cannot_be_read_is_named(output, problem):
    with pytest.raises(UnreadableRouter, match=rf"^layers\.0\.gate cannot be read: SimpleNamespace {problem}$"):
        Router("layers.0.gate", (SimpleNamespace(),)).read(output)

"""Which modules are routers, and what is read of them, against what transformers records and what experts are given."""

from types import SimpleNamespace

import pytest
import torch
from family_checks import NO_EXPERTS
from family_table import FAMILIES, random_model
from torch import nn

from shardwise.families import Router, UnreadableRouter, proven_record, routers_of
from shardwise.families.routers import GIVES_PROBABILITIES

WITH_EXPERTS = [
    family for family in FAMILIES if proven_record().get(family, {}).get("expert_parallel", NO_EXPERTS) != NO_EXPERTS
]
OTHERS_THAN_FUSED = {"jetmoe": ["mlp.router", "self_attention.experts.router"], "llama4_text": ["feed_forward.router"]}
"""Routers of a layer whose experts are given no indices: what they choose is compared with the largest logits."""


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_what_is_read_is_what_transformers_records_and_gives_its_experts(family):
    model, read, given = random_model(family, FAMILIES[family]), [], []
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
        for given_out, (router, _, found, _) in zip(recorded, read, strict=True):
            is_probability = torch.allclose(given_out.sum(-1), torch.ones(()))
            assert is_probability == (router.kind in GIVES_PROBABILITIES)
            expected = given_out.log() if is_probability else given_out
            torch.testing.assert_close(found, expected.flatten(0, -2), rtol=0, atol=0)
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

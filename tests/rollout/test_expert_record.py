"""Which experts the embedded engine says that it sent tokens to."""

from functools import partial
from pathlib import Path

import pytest
import torch
from family_table import FAMILIES, save_model
from tiny_models import tiny_folder
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from shardwise.config import ModelError
from shardwise.families import routers_of
from shardwise.rollout import EmbeddedEngine
from shardwise.types import GenerateRequest

PROMPTS = [[5, 9, 11, 4], [7], [8, 3, 20, 21, 22, 6]]


def generate(folder: Path, *, with_experts: bool):
    engine = EmbeddedEngine.from_folder(folder, dtype=torch.float32, max_rows=3, device=torch.device("cpu"))
    requests = [
        GenerateRequest(
            uid=str(n), prompt_ids=ids, num_completions=2, max_tokens=9, temperature=1.0, with_experts=with_experts
        )
        for n, ids in enumerate(PROMPTS)
    ]
    return engine.generate(requests)


@torch.no_grad()
def test_experts_are_those_of_transformers_on_the_whole_sequence(tmp_path):
    """Prompts of unequal length, groups that share a prefill, rows that wait and rows that move."""
    folder = tiny_folder("qwen3_moe", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for prompt, group in zip(PROMPTS, generate(folder, with_experts=True), strict=True):
        for completion in group:
            tokens = torch.tensor([prompt + completion.token_ids[:-1]])
            routed = model(tokens, use_cache=False, output_router_logits=True).router_logits
            expected = torch.stack([logits.topk(2).indices for logits in routed], dim=1)
            assert torch.equal(completion.experts.sort().values, expected.sort().values.to(torch.int16))


@torch.no_grad()
def test_experts_are_in_the_order_of_the_routers_in_the_model(tmp_path):
    """In JetMoE attention's stand behind the MLP's and are called before them; training reads by place."""
    model = save_model("jetmoe", FAMILIES["jetmoe"], tmp_path).eval()
    routers, chosen = routers_of(model), {}

    def keep(place, router, _module, _args, output):
        chosen[place] = router.read(output)[1]

    for place, router in enumerate(routers):
        for module in router.modules:
            module.register_forward_hook(partial(keep, place, router))
    for prompt, group in zip(PROMPTS, generate(tmp_path, with_experts=True), strict=True):
        for completion in group:
            chosen.clear()
            model(torch.tensor([prompt + completion.token_ids[:-1]]), use_cache=False)
            order = list(chosen)
            expected = torch.stack([chosen[place] for place in range(len(routers))], dim=1)
            assert torch.equal(completion.experts, expected.to(torch.int16))
            assert order != sorted(order)


def test_nothing_is_kept_unless_asked_for_and_a_dense_model_is_refused(tmp_path):
    experts = tiny_folder("qwen3_moe", tmp_path / "experts")
    assert all(completion.experts is None for group in generate(experts, with_experts=False) for completion in group)
    with pytest.raises(
        ModelError, match=r"^rollout\.router_replay=true: Qwen3ForCausalLM has no routers, so nothing to"
    ):
        generate(tiny_folder("qwen3", tmp_path / "dense"), with_experts=True)


def test_routers_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    choose = Qwen3MoeTopKRouter.forward
    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", lambda *args: (None, *choose(*args)[1:]))
    message = (
        r"^rollout\.router_replay=true: model\.layers\.0\.mlp\.gate cannot be read: Qwen3MoeTopKRouter does not give"
    )
    with pytest.raises(ModelError, match=message):
        generate(tiny_folder("qwen3_moe", tmp_path), with_experts=True)

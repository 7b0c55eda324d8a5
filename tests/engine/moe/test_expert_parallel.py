"""Experts that ranks share: what each module computes, and which models have such."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from family_table import FAMILIES, save_model
from ranks import RankError
from tiny_models import tiny_folder, tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise.config import ConfigError, EngineConfig, LoraConfig, OptimizerConfig
from shardwise.engine import TrainEngine
from shardwise.engine.model import build_on_meta
from shardwise.engine.moe.expert_parallel import spread_experts, spread_paths

CPU = torch.device("cpu")
PATH = "model.layers.0.mlp.experts"
CHOICES = {
    "by all": lambda n, rank: torch.tensor([[(i + rank) % 6, (3 * i + 1 + rank) % 6] for i in range(n)]),
    "all by the last rank": lambda n, rank: torch.tensor([[5, 4]] * n),
    "all by the first rank": lambda n, rank: torch.tensor([[0, 1]] * n),
    "each rank by itself": lambda n, rank: torch.tensor([[3 * rank, 3 * rank + 2]] * n),
}


def compute(experts, tokens, chosen, weights):
    """Outputs, and the gradients of tokens, weights and parameters, of a loss in which every output counts."""
    tokens, weights = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
    out = experts(tokens, chosen, weights)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return out.detach(), tokens.grad, weights.grad, [p.grad for p in experts.parameters()]


def spread_and_whole(implementation, choice, num_tokens, checkpointed):
    """On this rank: outputs and gradients of its tokens, and its part of those of the parameters; and the same of
    experts that are whole, whose parameters have the gradients of all ranks' tokens."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = tiny_model("qwen3_moe", hidden_size=16)
    model.set_experts_implementation(implementation)
    whole = copy.deepcopy(model.get_submodule(PATH))
    values = dict(whole.named_parameters())
    spread_experts(model, [PATH], init_device_mesh("cpu", (size,)))
    spread = model.get_submodule(PATH)
    assert spread._checkpoint_wrapped_module.num_experts == 6 // size
    for name, parameter in spread.named_parameters():
        assert torch.equal(parameter.full_tensor(), values[name])
    cases = []
    for other in range(size):
        torch.manual_seed(other)
        tokens, weights = torch.randn(num_tokens[other], 16), torch.rand(num_tokens[other], 2)
        cases.append((tokens, CHOICES[choice](num_tokens[other], other).view(-1, 2).long(), weights))
    if checkpointed:
        module, spread = spread, nn.Module()
        spread.parameters = module.parameters
        spread.forward = lambda *args: torch.utils.checkpoint.checkpoint(module, *args, use_reentrant=False)
    *found, gradients = compute(spread, *cases[rank])
    expected, totals = None, [torch.zeros_like(p) for p in whole.parameters()]
    for other, case in enumerate(cases):
        whole.zero_grad()
        if not len(case[0]):  # the eager experts' output then has no graph
            expected = [case[0], case[0], case[2]] if other == rank else expected
            continue
        *results, of_parameters = compute(whole, *case)
        expected = results if other == rank else expected
        totals = [t if g is None else t + g for t, g in zip(totals, of_parameters, strict=True)]
    assert all(isinstance(gradient, DTensor) for gradient in gradients)
    parts = [total.chunk(size)[rank] for total in totals]
    return [*found, *(gradient.to_local() for gradient in gradients)], [*expected, *parts]


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("choice", CHOICES)
def test_outputs_and_gradients_are_those_of_experts_on_one_rank(run_ranks, implementation, choice):
    """Also of a rank to whose experts no token goes, and of one that has no tokens itself."""
    for num_tokens, checkpointed in (((5, 3), False), ((4, 0), False), ((3, 7), True)):
        for found, expected in run_ranks(spread_and_whole, 2, implementation, choice, num_tokens, checkpointed):
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_experts_of_three_ranks(run_ranks):
    for found, expected in run_ranks(spread_and_whole, 3, "grouped_mm", "by all", (5, 1, 8), False):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_frozen_parameter_stays_frozen_and_a_trained_one_trained(run_ranks):
    assert run_ranks(trained_parts, 2) == [[False, True]] * 2


def trained_parts():
    model = tiny_model("qwen3_moe")
    model.get_submodule(PATH).gate_up_proj.requires_grad_(False)
    spread_experts(model, [PATH], init_device_mesh("cpu", (2,)))
    return [parameter.requires_grad for parameter in model.get_submodule(PATH).parameters()]


def test_experts_are_found_in_every_layer_that_has_them(tmp_path):
    save_model("deepseek_v3", FAMILIES["deepseek_v3"], tmp_path)  # its first layer is dense
    assert spread_paths(build_on_meta(tmp_path), 2) == ["model.layers.1.mlp.experts"]


@pytest.mark.parametrize(
    ("family", "options", "size", "message"),
    [
        ("llama", {}, 2, "engine.ep_size=2 has no effect on LlamaForCausalLM, which has no experts; set it to 1"),
        (
            "qwen3_moe",
            {"num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8},
            4,
            "engine.ep_size=4 does not divide the 6 experts of model.layers.0.mlp.experts; use 1, 2, 3 or 6",
        ),
    ],
)
def test_models_whose_experts_cannot_be_shared_say_why(tmp_path, family, options, size, message):
    save_model(family, options, tmp_path)
    with pytest.raises(ConfigError) as error:
        spread_paths(build_on_meta(tmp_path), size)
    assert str(error.value) == message


def build_with_saved(folder, saved):
    lora = LoraConfig(rank=2, target_modules=["q_proj"], modules_to_save=[saved])
    TrainEngine.build(Path(folder), EngineConfig(ep_size=2, lora=lora), device=CPU, optimizer=OptimizerConfig())


@pytest.mark.parametrize("saved", ["mlp.experts", "mlp"])
def test_experts_that_adapters_train_whole_cannot_be_shared(run_ranks, tmp_path, saved):
    folder = tiny_folder("qwen3_moe", tmp_path)
    with pytest.raises(RankError, match=rf"ConfigError: engine\.ep_size=2: .* trains a copy of {PATH}, and ranks"):
        run_ranks(build_with_saved, 2, str(folder), saved)
    run_ranks(build_with_saved, 2, str(folder), "gate")


class Experts(nn.Module):
    """Takes tokens that are sorted by expert already, as Llama 4's."""

    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.zeros(4, 2, 2))


def test_experts_that_are_modules_or_take_sorted_tokens_cannot_be_shared():
    model = nn.Module()
    model.block = nn.Module()
    model.block.experts = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])
    with pytest.raises(ConfigError, match=r"engine\.ep_size=2: the experts of Module are modules of their own"):
        spread_paths(model, 2)
    model.block.experts = Experts()
    with pytest.raises(ConfigError, match=r"block\.experts \(Experts\) does not take tokens with the experts of each"):
        spread_paths(model, 2)

"""Separate experts train on several ranks as on one, though no two ranks call the same ones."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_models import random_samples, tiny_folder
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from shardwise.config import ConfigError, EngineConfig, ModelError, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.engine.expert_guard import check_experts, guard_experts
from shardwise.recipes.losses import sft_loss

NUM_EXPERTS = 6


class SeparateConfig(Qwen3Config):
    model_type = "separate_experts"


class SeparateBlock(nn.Module):
    """As the code beside many checkpoints is: one expert after the other, those that a token chose. They are in a list,
    or in a dict as those of Switch Transformers are."""

    def __init__(self, config, *, is_dict):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, NUM_EXPERTS, bias=False)
        experts = [Qwen3MLP(config) for _ in range(NUM_EXPERTS)]
        named = {f"expert_{place}": expert for place, expert in enumerate(experts)}
        self.experts = nn.ModuleDict(named) if is_dict else nn.ModuleList(experts)

    def forward(self, hidden_states):
        tokens = hidden_states.flatten(0, -2)
        weights, chosen = self.gate(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        experts = list(self.experts.children())
        for place in chosen.unique().tolist():
            (rows,) = torch.where(chosen == place)
            out = out.index_add(0, rows, experts[place](tokens[rows]) * weights[rows, None])
        return out.view_as(hidden_states)


class SeparateForCausalLM(Qwen3ForCausalLM):
    config_class = SeparateConfig

    def __init__(self, config):
        super().__init__(config)
        for place, layer in enumerate(self.model.layers):
            layer.mlp = SeparateBlock(config, is_dict=place == 1)
        self.post_init()


def register():
    AutoConfig.register("separate_experts", SeparateConfig, exist_ok=True)
    AutoModelForCausalLM.register(SeparateConfig, SeparateForCausalLM, exist_ok=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    register()
    torch.manual_seed(0)
    config = SeparateConfig(
        vocab_size=107,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts_per_tok=1,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    model = SeparateForCausalLM(config)
    path = tmp_path_factory.mktemp("separate")
    model.save_pretrained(path)
    return path


UNITS = {"wrap_policy": {"moe_experts": ["Qwen3MLP"]}}
CELLS = [
    {},
    UNITS,
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "full", **UNITS},
    {"reduce_gradients": "last_micro_batch", **UNITS},
]


def build(folder, **keys):
    register()
    return TrainEngine.build(
        Path(folder),
        EngineConfig(apply_expert_patch=True, allow_unproven=True, **keys),
        device=torch.device("cpu"),
        optimizer=OptimizerConfig(),
    )


def gradients_of_cells(folder, cells):
    """Of every cell the loss of this rank, and the whole gradients."""
    found = []
    for keys in cells:
        engine = build(folder, **keys)
        # Short sequences: at most a few of the experts are chosen on a rank.
        step = pack(random_samples([3, 2, 4, 3]), num_shards=dist.get_world_size(), max_tokens=4)
        metrics = engine.forward_backward(step.shards[dist.get_rank()], sft_loss, step.denominators)
        gradients = {
            name.replace("_checkpoint_wrapped_module.", ""): p.grad.full_tensor().clone()
            for name, p in engine._model.hf_model.named_parameters()
        }
        found.append((metrics["train/loss"].result(), gradients))
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_whose_tokens_choose_other_experts_stay_in_step(run_ranks, folder, world_size):
    """Without the guard this hangs, or gradients of one expert are added to those of another."""
    [[(loss, gradients)]] = run_ranks(gradients_of_cells, 1, str(folder), [{}])
    ranks = run_ranks(gradients_of_cells, world_size, str(folder), CELLS)
    for keys, results in zip(CELLS, zip(*ranks, strict=True), strict=True):
        assert sum(part[0] for part in results) == pytest.approx(loss, rel=1e-5), keys
        for _, found in results:
            for name, gradient in gradients.items():
                torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5 * gradient.abs().max().item())


def refusal(folder, keys):
    """What building says, or the hooks of the first block."""
    register()
    try:
        engine = TrainEngine.build(
            Path(folder),
            EngineConfig(allow_unproven=True, **keys),
            device=torch.device("cpu"),
            optimizer=OptimizerConfig(),
        )
    except ConfigError as error:
        return str(error)
    block = engine._model.hf_model.model.layers[0].mlp
    return len(block._forward_pre_hooks) + len(block._forward_hooks)


def test_separate_experts_need_the_guard(run_ranks, folder):
    assert run_ranks(refusal, 1, str(folder), {}) == [
        "model.layers.0.mlp of SeparateForCausalLM has 6 experts that are modules of their own. A rank would call only "
        "those that its tokens chose, and its collectives would not meet those of other ranks; set "
        "engine.apply_expert_patch=true, which calls the others with no tokens"
    ]


def test_fused_experts_take_the_key_and_a_dense_model_does_not(run_ranks, tmp_path):
    """Nothing is put on fused experts."""
    keys = {"apply_expert_patch": True}
    assert run_ranks(refusal, 1, str(tiny_folder("qwen3_moe", tmp_path / "mixture")), keys) == [0]
    [message] = run_ranks(refusal, 1, str(tiny_folder("qwen3", tmp_path / "qwen3")), keys)
    assert message.startswith("engine.apply_expert_patch=true has no effect on Qwen3ForCausalLM, which has no router")


class TwoInputs(nn.Linear):
    def forward(self, hidden, weights):
        return super().forward(hidden) * weights


class ByName(nn.Linear):
    def forward(self, *, hidden):
        return super().forward(hidden)


class WithDefaults(nn.Linear):
    def forward(self, hidden, weights=None, *more, scale=1.0):
        return super().forward(hidden)


@pytest.mark.parametrize("is_patched", [False, True])
@pytest.mark.parametrize(("kind", "signature"), [(TwoInputs, "(hidden, weights)"), (ByName, "(*, hidden)")])
def test_experts_that_need_more_than_hidden_states_are_refused(kind, signature, is_patched):
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4), kind(4, 4)])})})
    with pytest.raises(ModelError) as error:
        check_experts(model, is_patched=is_patched)
    assert str(error.value) == (
        f"mlp.experts.1 is a {kind.__name__}, whose forward takes {signature}; of experts that are modules of their "
        "own only those that need nothing but hidden states [tokens, hidden] are supported, for one that no token "
        "chose is called with none; give other arguments defaults, or use them in the block"
    )


def test_experts_whose_other_arguments_have_defaults_are_taken():
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": nn.ModuleList([WithDefaults(4, 4)])})})
    check_experts(model, is_patched=True)


def test_a_block_that_calls_its_experts_out_of_order_is_refused():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, hidden):
            return self.experts[0](self.experts[2](hidden))

    model = nn.ModuleDict({"block": Backwards()})
    guard_experts(model)
    with pytest.raises(ModelError, match=r"block calls its expert 0 after its expert 2; only blocks that call their"):
        model["block"](torch.zeros(1, 5, 4))

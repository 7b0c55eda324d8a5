"""Separate experts train on several ranks as on one, though no two ranks call the same ones: whatever holds them, and
whether they are FSDP units of their own or not."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tiny_models import random_samples, tiny_folder
from torch import nn
from torch.distributed.tensor import distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, SwitchTransformersConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

from shardwise.config import ConfigError, EngineConfig, ModelError, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.engine.moe.expert_guard import expert_guards
from shardwise.engine.wrap import REDUCES_UNUSED
from shardwise.recipes.losses import sft_loss

NUM_EXPERTS = 6
KINDS = ("experts", "expert_list", "attributes", "tuples", "switch")
QUICK = ("switch",)
some_kinds = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.full) for kind in KINDS]
)


class SeparateConfig(Qwen3Config):
    model_type = "separate_experts"
    kind: str = "experts"


class GivesATuple(Qwen3MLP):
    def forward(self, x):
        return super().forward(x), None


class SeparateBlock(nn.Module):
    """As the code beside many checkpoints is: one expert after the other, those that a token chose."""

    def __init__(self, config, *, is_dict):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, NUM_EXPERTS, bias=False)
        kind = GivesATuple if config.kind == "tuples" else Qwen3MLP
        experts = [kind(config) for _ in range(NUM_EXPERTS)]
        named = {f"expert_{place}": expert for place, expert in enumerate(experts)}
        if config.kind == "attributes":
            for name, expert in named.items():
                self.add_module(name, expert)
        else:
            holder = "expert_list" if config.kind == "expert_list" else "experts"
            self.add_module(holder, nn.ModuleDict(named) if is_dict else nn.ModuleList(experts))

    def forward(self, hidden_states):
        tokens = hidden_states.flatten(0, -2)
        weights, chosen = self.gate(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        experts = [part for part in self.modules() if isinstance(part, Qwen3MLP)]
        for place in chosen.unique().tolist():
            (rows,) = torch.where(chosen == place)
            found = experts[place](tokens[rows])
            found = found[0] if isinstance(found, tuple) else found
            out = out.index_add(0, rows, found * weights[rows, None])
        return out.view_as(hidden_states)


def switch_block(config):
    """transformers' own, with room for every token."""
    return SwitchTransformersSparseMLP(
        SwitchTransformersConfig(
            d_model=config.hidden_size, d_ff=12, num_experts=NUM_EXPERTS, expert_capacity=1000, dropout_rate=0.0
        )
    )


class SeparateForCausalLM(Qwen3ForCausalLM):
    config_class = SeparateConfig

    def __init__(self, config):
        super().__init__(config)
        for place, layer in enumerate(self.model.layers):
            is_switch = config.kind == "switch"
            layer.mlp = switch_block(config) if is_switch else SeparateBlock(config, is_dict=place == 1)
        self.post_init()


def register():
    AutoConfig.register("separate_experts", SeparateConfig, exist_ok=True)
    AutoModelForCausalLM.register(SeparateConfig, SeparateForCausalLM, exist_ok=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    register()
    paths = {}
    for kind in KINDS:
        torch.manual_seed(0)
        config = SeparateConfig(
            kind=kind,
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
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        paths[kind] = tmp_path_factory.mktemp(kind)
        model.save_pretrained(paths[kind])
    return paths


UNITS = {"wrap_policy": {"moe_experts": ["Qwen3MLP"]}, "apply_expert_patch": True}
UNITS_OF = {
    "tuples": UNITS | {"wrap_policy": {"moe_experts": ["GivesATuple"]}},
    "switch": UNITS | {"wrap_policy": {"moe_experts": ["SwitchTransformersDenseActDense"]}},
}
CHECKPOINTED = {"activation_checkpointing": "full"}
CELLS = [
    {},
    CHECKPOINTED,
    {"reduce_gradients": "last_micro_batch"},
    {"fsdp_size": 1},
    UNITS,
    UNITS | CHECKPOINTED,
    UNITS | {"reduce_gradients": "last_micro_batch"},
]
CELLS_OF_FOUR = [{"fsdp_size": 2}, {"ulysses_size": 2}, UNITS | {"fsdp_size": 2}]
ADAPTED = {"lora": {"rank": 2}}
ADAPTED_CELLS = [ADAPTED, ADAPTED | CHECKPOINTED, ADAPTED | UNITS, ADAPTED | UNITS | CHECKPOINTED]


def build(folder, keys):
    register()
    return TrainEngine.build(
        Path(folder),
        EngineConfig(allow_unproven=True, **keys),
        device=torch.device("cpu"),
        optimizer=OptimizerConfig(),
    )


def gradients_of_cells(folder, cells):
    """Of every cell the loss of this rank, and the whole gradients of what is trained; adapters change something."""
    found = []
    for keys in cells:
        engine = build(folder, keys)
        torch.manual_seed(0)
        for name, parameter in engine._model.hf_model.named_parameters():
            if "lora_B" in name:  # they start as 0, and no lora_A would have a gradient
                whole = 0.3 * torch.randn(parameter.shape)
                parameter.data.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
        num_sharing = keys.get("ulysses_size", 1)
        # Short sequences: at most a few of the experts are chosen on a rank.
        step = pack(random_samples([3, 2, 4, 3, 2, 4]), num_shards=dist.get_world_size() // num_sharing, max_tokens=4)
        metrics = engine.forward_backward(step.shards[dist.get_rank() // num_sharing], sft_loss, step.denominators)
        gradients = {
            name.replace("_checkpoint_wrapped_module.", ""): p.grad.full_tensor().clone()
            for name, p in engine._model.hf_model.named_parameters()
            if p.grad is not None
        }
        found.append((metrics["train/loss"].result() / num_sharing, gradients))
    return found


def compare_with_one_rank(run_ranks, folder, keys_of_one, world_size, cells):
    """Returns the gradients by name."""
    [[(loss, gradients)]] = run_ranks(gradients_of_cells, 1, folder, [keys_of_one])
    ranks = run_ranks(gradients_of_cells, world_size, folder, cells, timeout_seconds=120)
    for keys, results in zip(cells, zip(*ranks, strict=True), strict=True):
        assert sum(part[0] for part in results) == pytest.approx(loss, rel=1e-5), keys
        for _, found in results:
            assert found.keys() == gradients.keys(), keys
            for name, gradient in gradients.items():
                error = (found[name] - gradient).abs().max().item()
                assert error <= 1e-5 * gradient.abs().max().item(), (keys, name)
    return gradients


@pytest.mark.skipif(not REDUCES_UNUSED, reason="FSDP of this torch adds up gradients of different weights")
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
@some_kinds
def test_ranks_whose_tokens_choose_other_experts_compute_alike(run_ranks, folders, kind, world_size):
    """Elsewhere gradients of one expert are added to those of another, or ranks die of sums of different lengths; as
    units, they hang."""
    folder = str(folders[kind])
    cells = [
        keys | UNITS_OF.get(kind, UNITS) if "wrap_policy" in keys else keys
        for keys in (CELLS if world_size == 2 else CELLS_OF_FOUR)
    ]
    compare_with_one_rank(run_ranks, folder, {}, world_size, cells)


@pytest.mark.skipif(not REDUCES_UNUSED, reason="FSDP of this torch adds up gradients of different weights")
@some_kinds
def test_adapters_of_experts_that_other_ranks_choose_are_trained_alike(run_ranks, folders, kind):
    """An adapter has a gradient on the ranks whose tokens chose its expert alone."""
    cells = [keys | UNITS_OF.get(kind, UNITS) if "wrap_policy" in keys else keys for keys in ADAPTED_CELLS]
    gradients = compare_with_one_rank(run_ranks, str(folders[kind]), ADAPTED, 2, cells)
    assert all("lora_" in name for name in gradients)
    of_experts = [bool(gradient.any()) for name, gradient in gradients.items() if "expert" in name]
    assert 0.3 < sum(of_experts) / len(of_experts) < 1  # some experts are nobody's


def refusal(folder, keys):
    """What building says, or the hooks of the first block."""
    try:
        engine = build(folder, keys)
    except ConfigError as error:
        return str(error)
    block = engine._model.hf_model.model.layers[0].mlp
    return len(block._forward_pre_hooks) + len(block._forward_hooks)


@pytest.mark.parametrize("kind", KINDS)
def test_separate_experts_need_the_guard_where_they_are_units(run_ranks, folders, kind):
    keys = UNITS_OF.get(kind, UNITS) | {"apply_expert_patch": False}
    assert run_ranks(refusal, 1, str(folders[kind]), keys) == [
        "model.layers.0.mlp of SeparateForCausalLM has 6 experts that are modules and FSDP units of their own "
        "(engine.wrap_policy.moe_experts or engine.module_precision). A rank would gather only those that its tokens "
        "chose, and its collectives would not meet those of other ranks; set engine.apply_expert_patch=true, which "
        "calls the others with no tokens, or make no units of them"
    ]


def test_separate_experts_with_a_dtype_of_their_own_need_the_guard_too(run_ranks, folders):
    """Also parts of them: each is a unit."""
    keys = {"module_precision": [{"module": "model.layers.*.mlp.expert_*.down_proj"}]}
    [message] = run_ranks(refusal, 1, str(folders["attributes"]), keys)
    assert message.startswith("model.layers.0.mlp of SeparateForCausalLM has 6 experts that are modules and FSDP units")


class Chooses(nn.Module):
    """A block of experts that are one linear layer each."""

    def __init__(self, num_experts):
        super().__init__()
        self.gate = nn.Linear(4, num_experts, bias=False)
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_experts))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(num_experts))


@pytest.mark.parametrize(("part", "blocks"), [("parts", ["mlp"]), ("norms", [])])
def test_experts_without_modules_inside_are_experts_where_module_precision_makes_them_units(part, blocks):
    """Norms of the same number are none."""
    model = nn.ModuleDict({"mlp": Chooses(3)})
    units = SimpleNamespace(layers=["mlp"], experts=[], inner=[f"mlp.{part}.1"])
    assert [guard.path for guard in expert_guards(model, units, is_patched=True)] == blocks
    with pytest.raises(ConfigError, match="mlp of ModuleDict has 3 experts") if blocks else nullcontext():
        expert_guards(model, units, is_patched=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_key_changes_nothing_where_no_expert_is_a_unit(run_ranks, folders, kind):
    keys = {"apply_expert_patch": True}
    assert run_ranks(refusal, 1, str(folders[kind]), keys) == run_ranks(refusal, 1, str(folders[kind]), {}) == [0]


def test_fused_experts_take_the_key_and_a_dense_model_does_not(run_ranks, tmp_path):
    """Nothing is put on fused experts."""
    keys = {"apply_expert_patch": True}
    assert run_ranks(refusal, 1, str(tiny_folder("qwen3_moe", tmp_path / "mixture")), keys) == [0]
    [message] = run_ranks(refusal, 1, str(tiny_folder("qwen3", tmp_path / "qwen3")), keys)
    assert message.startswith("engine.apply_expert_patch=true has no effect on Qwen3ForCausalLM, which has no router")


def mlp(width=4):
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))


class Layer(nn.Module):
    """Two blocks, each called in every pass, and two attentions."""

    def __init__(self):
        super().__init__()
        self.mlps = nn.ModuleList([mlp(), mlp()])
        self.attention_1, self.attention_2 = mlp(), mlp()
        self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)


def test_lists_and_numbered_parts_that_nothing_chooses_from_are_no_experts():
    """Nor are the layers themselves, though there are as many as an embedding has rows."""
    model = nn.ModuleDict({"embedding": nn.Embedding(2, 4), "layers": nn.ModuleList([Layer(), Layer()])})
    layers = ["layers.0", "layers.1"]
    inner = [f"{layer}.{part}" for layer in layers for part in ("mlps.0", "mlps.1.1", "attention_1.0", "norm1")]
    units = SimpleNamespace(layers=layers, experts=[], inner=inner)
    assert expert_guards(model, units, is_patched=False) == []
    units.experts = ["layers.0.mlps.0", "layers.0.mlps.1"]  # unless they are named as such
    assert [guard.path for guard in expert_guards(model, units, is_patched=True)] == ["layers.0"]


class TwoInputs(nn.Linear):
    def forward(self, hidden, weights):
        return super().forward(hidden) * weights


class ByName(nn.Linear):
    def forward(self, *, hidden):
        return super().forward(hidden)


class WithDefaults(nn.Linear):
    def forward(self, hidden, weights=None, *more, scale=1.0):
        return super().forward(hidden)


class GivesADict(nn.Linear):
    def forward(self, hidden):
        return {"hidden": super().forward(hidden)}


class InOrder(nn.Module):
    """Calls some of its experts."""

    def __init__(self, experts, chosen):
        super().__init__()
        self.experts, self.chosen = nn.ModuleList(experts), chosen

    def forward(self, hidden):
        for place in map(int, self.chosen):
            hidden = self.experts[place](hidden)
        return hidden


def guards_of(block, num_units=1):
    """Of a model with this block alone, whose first experts are units."""
    model = nn.ModuleDict({"mlp": block})
    inner = [f"mlp.experts.{place}" for place in range(num_units)]
    return expert_guards(model, SimpleNamespace(layers=["mlp"], experts=inner, inner=inner), is_patched=True)


@pytest.mark.parametrize(("kind", "signature"), [(TwoInputs, "(hidden, weights)"), (ByName, "(*, hidden)")])
def test_experts_that_need_more_than_hidden_states_are_refused_where_they_are_units(kind, signature):
    block = InOrder([nn.Linear(4, 4), kind(4, 4)], [0])
    with pytest.raises(ModelError) as error:
        guards_of(block)
    assert str(error.value) == (
        f"mlp.experts.1 is a {kind.__name__}, whose forward takes {signature}; of experts that are modules and FSDP "
        "units of their own only those that need nothing but hidden states [tokens, hidden] are supported, for one "
        "that no token chose is called with none; give other arguments defaults, use them in the block, or make no "
        "units of them"
    )
    assert guards_of(block, num_units=0) == []


def test_experts_whose_other_arguments_have_defaults_are_taken():
    [guard] = guards_of(InOrder([WithDefaults(4, 4), WithDefaults(4, 4)], [0]))
    assert (guard.path, guard.num_experts) == ("mlp", 2)


def attached(block):
    [guard] = guards_of(block)
    guard.attach()
    return block


def test_experts_of_a_block_that_is_a_layer_are_called_before_the_hook_that_ends_its_unit():
    """FSDP's hook, which is there first, gives the weights of the layer back and asks for the gradient of what comes
    out of it."""
    block, seen, called = InOrder([nn.Linear(4, 4) for _ in range(3)], [1]), [], []
    for place, expert in enumerate(block.experts):
        expert.register_forward_hook(lambda *_, place=place: called.append(place))
    block.register_forward_hook(lambda _block, _args, output: seen.append(([*called], output)))
    output = attached(block)(torch.randn(1, 5, 4))
    [(called_by_then, handed_on)] = seen
    assert called_by_then == [0, 1, 2]
    assert handed_on is output


def test_an_expert_that_gives_no_hidden_states_is_named():
    block = attached(InOrder([nn.Linear(4, 4), GivesADict(4, 4)], [0]))
    with pytest.raises(ModelError) as error:
        block(torch.zeros(1, 5, 4))
    assert str(error.value) == (
        "engine.apply_expert_patch=true: mlp.experts.1 (GivesADict) gives dict; only experts that give their hidden "
        "states [tokens, hidden], alone or as the first of a tuple, are supported"
    )


def test_a_block_that_calls_its_experts_out_of_order_is_refused():
    block = attached(InOrder([nn.Linear(4, 4) for _ in range(3)], [2, 0]))
    with pytest.raises(ModelError, match=r"mlp calls its expert 0 after its expert 2; only blocks that call their"):
        block(torch.zeros(1, 5, 4))


def test_hooks_of_the_guard_are_not_compiled():
    """Every expert would be another graph of the same hook, up to torch's limit."""
    num_experts = torch._dynamo.config.recompile_limit + 4
    chosen = torch.arange(num_experts)  # a tensor: what is chosen ends the graph of a block
    block = attached(InOrder([nn.Linear(4, 4) for _ in range(num_experts)], chosen))
    hidden = torch.randn(1, 5, 4)
    expected = block(hidden)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, suppress_errors=False):
        block.compile(dynamic=True)
        found = block(hidden)
    torch.testing.assert_close(found, expected)

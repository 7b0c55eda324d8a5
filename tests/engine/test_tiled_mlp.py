from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from family_table import FAMILIES, save_model
from tiny_models import random_samples, tiny_folder, tiny_model
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.config import ConfigError, EngineConfig, ModelError, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.engine.tiled_mlp import DEFAULT_NUM_SHARDS, TiledMLP, mlp_paths, tile_mlps
from shardwise.recipes.losses import sft_loss

CPU = torch.device("cpu")
HIDDEN, INNER = 6, 40


class GatedMLP(nn.Module):
    """Counts the tokens of each of its forwards."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INNER, dtype=dtype)
        self.up = nn.Linear(HIDDEN, INNER, bias=False, dtype=dtype)
        self.down = nn.Linear(INNER, HIDDEN, dtype=dtype)
        self.sizes = []

    def forward(self, x):
        assert x.dim() == 3
        self.sizes.append(x.shape[1])
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def pair(num_shards, dtype=torch.float64):
    torch.manual_seed(0)
    plain = GatedMLP(dtype)
    return plain, TiledMLP(deepcopy(plain), num_shards)


def run(mlp, hidden):
    """Output and gradients: of the input, then of the trained parameters."""
    hidden = hidden.clone().requires_grad_()
    out = mlp(hidden)
    torch.manual_seed(1)
    (out * torch.randn(out.shape, dtype=torch.float64).to(out.dtype)).sum().backward()
    return [out.detach(), hidden.grad, *(p.grad for p in mlp.parameters() if p.requires_grad)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("num_tokens", "num_shards"), [(16, 4), (17, 4), (5, 4), (3, 4), (1, 8), (7, 2)])
def test_output_and_gradients_equal_the_plain_mlp(num_tokens, num_shards, dtype, bound):
    plain, tiled = pair(num_shards, dtype)
    hidden = torch.randn(1, num_tokens, HIDDEN, dtype=dtype)
    expected, found = run(plain, hidden), run(tiled, hidden)
    assert len(found) == 2 + 5
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 0.05
        torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


def test_trap_06_fewer_tokens_than_shards_lose_no_gradient():
    """torch.chunk cuts 6 tokens for 4 shards into 3 chunks; whoever waits for the fourth to hand on the gradient of the
    weights never does."""
    for num_tokens in range(1, 9):
        plain, tiled = pair(4)
        hidden = torch.randn(1, num_tokens, HIDDEN, dtype=torch.float64)
        for ours, theirs in zip(run(tiled, hidden), run(plain, hidden), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("num_tokens", "num_shards", "sizes"),
    [(16, 4, [4, 4, 4, 4]), (17, 4, [5, 4, 4, 4]), (6, 4, [2, 2, 1, 1]), (3, 4, [1, 1, 1]), (1, 8, [1])],
)
def test_slices_are_as_many_as_there_can_be_and_level(num_tokens, num_shards, sizes):
    _, tiled = pair(num_shards)
    run(tiled, torch.randn(num_tokens, HIDDEN, dtype=torch.float64))
    assert tiled._checkpoint_wrapped_module.sizes == sizes * 2  # forward, and again in backward


@pytest.mark.parametrize("shape", [(11,), (1, 11), (2, 3, 5)])
def test_leading_dims_are_kept(shape):
    plain, tiled = pair(4)
    hidden = torch.randn(*shape, HIDDEN, dtype=torch.float64)
    batched = hidden if len(shape) == 2 else hidden.view(1, -1, HIDDEN)
    torch.testing.assert_close(tiled(hidden), plain(batched).view_as(hidden), rtol=0, atol=1e-12)


@pytest.mark.parametrize("frozen", ["everything", "one matrix", "the input"])
def test_frozen_parts_get_no_gradient_and_the_rest_theirs(frozen):
    plain, tiled = pair(3)
    hidden = torch.randn(1, 8, HIDDEN, dtype=torch.float64)
    for mlp in (plain, tiled._checkpoint_wrapped_module):
        if frozen == "everything":
            mlp.requires_grad_(False)
        if frozen == "one matrix":
            mlp.up.requires_grad_(False)
    if frozen == "the input":
        tiled(hidden).square().sum().backward()
        plain(hidden).square().sum().backward()
    else:
        hidden = [hidden.clone().requires_grad_() for _ in range(2)]
        tiled(hidden[0]).square().sum().backward()
        plain(hidden[1]).square().sum().backward()
        torch.testing.assert_close(hidden[0].grad, hidden[1].grad, rtol=0, atol=1e-12)
    for ours, theirs in zip(tiled.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) == (not theirs.requires_grad)
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


def test_without_gradients_it_is_the_plain_mlp():
    plain, tiled = pair(4)
    hidden = torch.randn(1, 9, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(tiled(hidden), plain(hidden), rtol=0, atol=1e-12)
    assert tiled._checkpoint_wrapped_module.sizes == [3, 2, 2, 2]


def test_gradients_of_64_bfloat16_slices_are_summed_in_float32():
    """Summed in bfloat16, each addition would round to 8 bits."""
    num_shards = 64
    _, tiled = pair(num_shards, torch.bfloat16)
    mlp = tiled._checkpoint_wrapped_module
    exact = deepcopy(mlp).double()
    torch.manual_seed(2)
    hidden = torch.randn(1, num_shards * 4, HIDDEN).bfloat16() + 0.5
    weights = (torch.rand(hidden.shape) + 0.5).bfloat16()
    (tiled(hidden) * weights).sum().backward()
    (exact(hidden.double()) * weights.double()).sum().backward()
    naive = {name: torch.zeros_like(p) for name, p in mlp.named_parameters()}
    for part, weight in zip(hidden.tensor_split(num_shards, 1), weights.tensor_split(num_shards, 1), strict=True):
        grads = torch.autograd.grad((mlp(part) * weight).sum(), list(mlp.parameters()))
        for total, grad in zip(naive.values(), grads, strict=True):
            total += grad
    for (name, parameter), truth in zip(mlp.named_parameters(), exact.parameters(), strict=True):
        error = (parameter.grad.double() - truth.grad).norm() / truth.grad.norm()
        naive_error = (naive[name].double() - truth.grad).norm() / truth.grad.norm()
        assert parameter.grad.dtype == torch.bfloat16
        assert error < 0.005, (name, float(error))
        assert error < naive_error / 2, (name, float(error), float(naive_error))


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.num_elements = max([self.num_elements, *sizes])
        return out


def test_inner_activations_exist_for_one_slice_at_a_time():
    """64 tokens in 8 slices: 8 x 40 inner values and never 64 x 40; only the input waits for backward."""
    plain, tiled = pair(8)
    hidden = torch.randn(1, 64, HIDDEN, dtype=torch.float64)
    largest, kept = {}, {}
    for name, mlp in {"plain": plain, "tiled": tiled}.items():
        saved = []
        leaf = hidden.clone().requires_grad_()
        with LargestTensor() as mode:
            with saved_tensors_hooks(lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t):
                out = mlp(leaf)
            out.sum().backward()
        largest[name], kept[name] = mode.num_elements, saved
    assert largest["plain"] == 64 * INNER
    assert largest["tiled"] == 64 * HIDDEN  # larger than the weights (240) and a slice's inner values (320)
    assert kept["tiled"] == [64 * HIDDEN]
    assert sum(kept["plain"]) > 4 * 64 * INNER


class WithRouterScores(GatedMLP):
    """As GPT-OSS: beside its states, of each token the scores of a router and which experts they choose."""

    def __init__(self, dtype=torch.float64):
        super().__init__(dtype)
        self.router = nn.Linear(HIDDEN, 3, dtype=dtype)

    def forward(self, x):
        scores = self.router(x[0]).softmax(-1)
        return super().forward(x) * scores[None, :, :1], scores, scores.argmax(-1)


@pytest.mark.parametrize("num_tokens", [1, 3, 17])
@pytest.mark.parametrize("used", ["states", "scores", "both"])
def test_other_outputs_of_each_token_are_put_together_with_their_gradients(num_tokens, used):
    torch.manual_seed(0)
    plain = WithRouterScores()
    tiled = TiledMLP(deepcopy(plain), 4)
    results = []
    for mlp in (plain, tiled):
        torch.manual_seed(1)
        hidden = torch.randn(1, num_tokens, HIDDEN, dtype=torch.float64).requires_grad_()
        states, scores, chosen = mlp(hidden)
        loss = 0.0
        if used != "scores":
            loss += (states * torch.randn_like(states)).sum()
        if used != "states":
            loss += (scores * torch.randn_like(scores)).sum()
        loss.backward()
        results.append([states, scores, chosen, hidden.grad, *(p.grad for p in mlp.parameters())])
    for theirs, ours in zip(*results, strict=True):
        if theirs is None:  # the plain one leaves out what nothing needed
            assert ours.abs().max() == 0
            continue
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


class Flattening(GatedMLP):
    """As Llama 4's experts: its states have no batch dimension."""

    def forward(self, x):
        return super().forward(x).flatten(0, 1)


@pytest.mark.parametrize("num_tokens", [1, 3, 17])
def test_states_without_a_batch_dimension_are_put_together_too(num_tokens):
    torch.manual_seed(0)
    plain = Flattening()
    tiled = TiledMLP(deepcopy(plain), 4)
    hidden = torch.randn(1, num_tokens, HIDDEN, dtype=torch.float64)
    for theirs, ours in zip(run(plain, hidden), run(tiled, hidden), strict=True):
        torch.testing.assert_close(ours.view_as(theirs), theirs, rtol=0, atol=1e-12)


class WithLoss(nn.Module):
    def forward(self, x):
        return x, x.sum()


class Pooling(nn.Module):
    def forward(self, x):
        return x[:, :1]


class Naming(nn.Module):
    def forward(self, x):
        return {"states": x}


class Summing(nn.Module):
    def forward(self, x):
        return x.sum((0, 1))


@pytest.mark.parametrize("mlp", [WithLoss(), Pooling(), Naming(), Summing()])
def test_mlp_that_returns_what_is_not_of_each_token_is_refused(mlp):
    with pytest.raises(ModelError) as error:
        TiledMLP(mlp, 2)(torch.ones(1, 4, 3))
    assert str(error.value) == (
        f"engine.apply_tiled_mlp=true: {type(mlp).__name__} returns what does not have a row for each token and cannot "
        "be put together from slices; set it to false for this model"
    )


def test_mlps_are_found_by_name_and_a_layer_without_one_is_refused():
    model = tiny_model("qwen3")
    layers = ["model.layers.0", "model.layers.1"]
    assert mlp_paths(model, layers) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    attention, projection = "model.layers.1.self_attn", "model.layers.1.self_attn.q_proj"
    for path, class_name, parts in [
        (attention, "Qwen3Attention", "q_proj, k_proj, v_proj, o_proj, q_norm, k_norm"),
        (projection, "Linear", "none"),
    ]:
        with pytest.raises(ConfigError) as error:
            mlp_paths(model, [path])
        assert str(error.value) == (
            f"engine.apply_tiled_mlp=true: {path} ({class_name}) has no MLP named mlp, feed_forward, block_sparse_moe, "
            f"shared_mlp, ffn; its parts are {parts}. Set it to false, or name layers that have one in "
            "engine.wrap_policy.transformer_layer_cls_to_wrap"
        )


def test_of_a_layer_with_experts_and_an_mlp_beside_them_both_are_tiled(tmp_path):
    model = save_model("granitemoeshared", FAMILIES["granitemoeshared"], tmp_path)
    assert mlp_paths(model, ["model.layers.1"]) == ["model.layers.1.block_sparse_moe", "model.layers.1.shared_mlp"]


@pytest.mark.parametrize(("given", "used"), [(None, DEFAULT_NUM_SHARDS), (7, 7)])
def test_tiled_mlps_replace_those_of_the_model(given, used):
    model = tiny_model("qwen3")
    names = [name for name, _ in model.named_parameters()]
    tile_mlps(model, ["model.layers.1.mlp"], given)
    assert type(model.model.layers[0].mlp) is not TiledMLP
    assert model.model.layers[1].mlp._num_shards == used
    assert list(model.state_dict()) == [*names, "lm_head.weight"]  # wrappers do not show in a state dict


def gradients(folder, options):
    """The whole gradient of one step."""
    engine = TrainEngine.build(Path(folder), EngineConfig(**options), device=CPU, optimizer=OptimizerConfig())
    step = pack(random_samples([9, 7, 7, 5, 4]), num_shards=dist.get_world_size(), max_tokens=12)
    engine.forward_backward(step.shards[dist.get_rank()], sft_loss, step.denominators)
    return {name: p.grad.full_tensor() for name, p in engine._model.hf_model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "num_shards"),
    [
        *(("qwen3", 3), ("gpt_oss", 3), ("llama4_text", 3)),
        *(pytest.param(*one, marks=pytest.mark.full) for one in (("qwen3", 2), ("qwen3", 64), ("granitemoeshared", 3))),
    ],
)
def test_engine_with_tiled_mlps_has_the_gradients_of_one_without(run_ranks, tmp_path, family, num_shards):
    """Parameters gathered by FSDP, with recomputation around the slices too; experts whose MLP returns its router's
    scores, or states without a batch dimension."""
    if family == "qwen3":
        tiny_folder(family, tmp_path)
    else:
        save_model(family, FAMILIES[family] | {"vocab_size": 131}, tmp_path)
    folder = str(tmp_path)
    expected = run_ranks(gradients, 2, folder, {})[0]
    for options in ({}, {"activation_checkpointing": "full"}):
        tiled = {"apply_tiled_mlp": True, "tiled_num_shards": num_shards} | options
        found = run_ranks(gradients, 2, folder, tiled)[0]
        assert len(found) == len(expected)
        for (name, ours), theirs in zip(found.items(), expected.values(), strict=True):
            assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max(), name

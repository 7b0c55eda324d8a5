import gc
import itertools
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from family_table import FAMILIES, save_model
from stand_in_kernels import flash_backward_over_packs, varlen_over_packs
from tiny_models import random_samples, tiny_folder, tiny_model
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.models.llama import modeling_llama

from shardwise.config import ConfigError, EngineConfig, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine, activations
from shardwise.engine.activations import (
    ATTENTION_OPS,
    MATMUL_OPS,
    _GivesBack,
    _keep_by_operation,
    _Keeps,
    checkpoint_layers,
)
from shardwise.engine.attention import PACKED_ATTENTION, AttentionBackend, PackedCall, register_packed_attention
from shardwise.engine.compile import compile_layers
from shardwise.ops import PackedLayout, plain_name, varlen_attention
from shardwise.recipes.losses import sft_loss

CPU = torch.device("cpu")
NUM_LAYERS, NUM_TOKENS, HIDDEN = 4, 10, 32
PATHS = [f"model.layers.{i}" for i in range(NUM_LAYERS)]
FULL = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}
EVERY_SECOND = SELECTIVE | {"checkpoint_every_layers": 2}


def packed_model(options, num_layers=NUM_LAYERS, family="qwen3"):
    """A model whose layers are compiled and checkpointed as the options say."""
    register_packed_attention()
    model = tiny_model(family, num_hidden_layers=num_layers)
    model.set_attn_implementation(PACKED_ATTENTION)
    config = EngineConfig(**options)
    if config.compile_layers:
        compile_layers(model, PATHS[:num_layers])
    checkpoint_layers(model, PATHS[:num_layers], config)
    return model.train()


def forward(model, lengths=(6, 4)):
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    layout = PackedLayout.from_cu_seqlens(cu_seqlens, device=CPU)
    ids = 3 + torch.arange(sum(lengths))[None] % 100
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    call = PackedCall(layout, AttentionBackend("auto", None))
    return model(input_ids=ids, position_ids=positions, use_cache=False, packed=call).logits


def gradients(model):
    loss = forward(model).log_softmax(-1)[..., 7].sum()
    loss.backward()
    return loss.item(), {plain_name(name): p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("options", "wrapped"),
    [
        ({}, []),
        (FULL, [0, 1, 2, 3]),
        (SELECTIVE, [0, 1, 2, 3]),
        (EVERY_SECOND, [1, 3]),
        (SELECTIVE | {"checkpoint_every_layers": 3}, [2]),
        (SELECTIVE | {"checkpoint_every_layers": 4}, [3]),
    ],
)
def test_chosen_layers_are_wrapped(options, wrapped):
    layers = packed_model(options).model.layers
    assert [i for i, layer in enumerate(layers) if isinstance(layer, CheckpointWrapper)] == wrapped


def test_checkpointing_none_of_the_layers_is_refused():
    with pytest.raises(ConfigError) as error:
        packed_model(SELECTIVE | {"checkpoint_every_layers": 5})
    assert str(error.value) == (
        "engine.checkpoint_every_layers=5 would checkpoint none of the model's 4 layers; use at most 4"
    )


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("options", [FULL, SELECTIVE, EVERY_SECOND], ids=["full", "selective", "every second"])
def test_gradients_are_those_without_checkpoints_to_the_last_bit(options, offload):
    loss, expected = gradients(packed_model({}))
    found_loss, found = gradients(packed_model(options | {"activation_offload": offload}))
    assert found_loss == loss
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
        assert gradient.any(), name


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, [1, 1, 1, 1]), (FULL, [2, 2, 2, 2]), (SELECTIVE, [2, 2, 2, 2]), (EVERY_SECOND, [1, 2, 1, 2])],
    ids=["none", "full", "selective", "every second"],
)
def test_checkpointed_layers_run_forward_twice(options, expected):
    model = packed_model(options)
    runs = Counter()
    for index, path in enumerate(PATHS):
        layer = model.get_submodule(path)
        inner = layer._checkpoint_wrapped_module if isinstance(layer, CheckpointWrapper) else layer
        inner.input_layernorm.register_forward_pre_hook(lambda *_, index=index: runs.update([index]))
    gradients(model)
    assert [runs[index] for index in range(NUM_LAYERS)] == expected


class Operations(TorchDispatchMode):
    """Counts the operations that are really computed."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))

    def of(self, operations):
        return sum(self.counts[operation] for operation in operations)


def test_selective_computes_attention_once_and_half_of_the_matrix_products_again():
    """7 matrix products a layer: query, key, value, output, gate, up, down; one attention call for each of the two
    sequences. Backward needs no result of the last product, so all but that are computed again, or the 2nd, 4th and
    6th."""
    found = {}
    for name, options in {"none": {}, "full": FULL, "selective": SELECTIVE}.items():
        model = packed_model(options)
        with Operations() as operations:
            logits = forward(model)
            forward_matmuls, forward_attention = operations.of(MATMUL_OPS), operations.of(ATTENTION_OPS)
            logits.sum().backward()
        found[name] = operations.of(MATMUL_OPS), operations.of(ATTENTION_OPS)
        assert forward_matmuls - 7 * NUM_LAYERS in (
            1,
            2,
        )  # output projection; rotary frequencies before transformers 5.23
        assert forward_attention == 2 * NUM_LAYERS
    matmuls, attention = found["none"]
    assert found["full"] == (matmuls + 6 * NUM_LAYERS, attention + 2 * NUM_LAYERS)
    assert found["selective"] == (matmuls + 3 * NUM_LAYERS, attention)


@pytest.fixture
def varlen_on_cpu():
    """torch's variable-length attention with loops in place of the kernels that it calls, and all else its own."""

    def forward(query, key, value, *given, scale, window_size_left, window_size_right, **_):
        out, lse = varlen_over_packs(
            *(query, key, value, *given[:4]),
            scale=scale,
            window_size=(window_size_left, window_size_right),
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=True,
        )
        return out, lse, torch.zeros(2, dtype=torch.uint64), query.new_zeros(0), query.new_zeros(0)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", flash_backward_over_packs, "CPU")
        yield


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
def test_selective_computes_variable_length_attention_once(varlen_on_cpu, has_sinks):
    """Its backward is written in Python, so that its kernel runs without gradients, unlike those of torch's own
    operations."""
    torch.manual_seed(0)
    layout = PackedLayout.from_cu_seqlens(torch.tensor([0, 5, 8], dtype=torch.int32), device=CPU)
    states = torch.randn(8, 6, requires_grad=True)
    weights = [torch.randn(heads * 4, 6, requires_grad=True) for heads in (4, 2, 2)]
    sinks = torch.randn(4, requires_grad=True) if has_sinks else None

    def layer(states):
        heads = [(states @ weight.T).unflatten(-1, (-1, 4)).transpose(0, 1) for weight in weights]
        return varlen_attention(*heads, layout, scaling=0.5, window=None, softcap=None, sinks=sinks).tanh()

    ways = {
        "none": layer,
        "full": partial(checkpoint, layer, use_reentrant=False),
        "selective": partial(
            checkpoint, layer, use_reentrant=False, context_fn=partial(_keep_by_operation, ATTENTION_OPS | MATMUL_OPS)
        ),
    }
    wanted = [states, *weights, *([] if sinks is None else [sinks])]
    calls, found = {}, {}
    for name, way in ways.items():
        with Operations() as operations:
            found[name] = torch.autograd.grad(way(states).sum(), wanted)
        calls[name] = operations.counts[torch.ops.torch_attn._varlen_attn.default]
    assert calls == {"none": 1, "full": 2, "selective": 1}
    for name in ("full", "selective"):
        for one, other in zip(found[name], found["none"], strict=True):
            assert torch.equal(one, other)
            assert other.any()


def bytes_kept(model):
    """What a forward pass leaves behind, its logits included."""
    forward(model)  # whatever is allocated once
    gc.collect()
    gc.disable()  # what earlier tests left would count as freed by this one
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            logits = forward(model)
    finally:
        gc.enable()
    assert logits.requires_grad
    return sum(event.self_cpu_memory_usage for event in profiler.key_averages())


@pytest.mark.full
def test_selective_keeps_the_attention_of_compiled_layers():
    """Gradients are those of layers that are not compiled; attention is computed once, all else again. Beside what
    full keeps: the output of attention and the log-sum-exp of its rows, for each layer, token and head."""
    _, expected = gradients(packed_model({}, 2))
    kept, attention, products = {}, {}, {}
    for name, options in {"none": {}, "full": FULL, "selective": SELECTIVE}.items():
        torch.compiler.reset()
        model = packed_model(options | {"compile_layers": True}, 2)
        with Operations() as operations:
            _, found = gradients(model)
        attention[name], products[name] = operations.of(ATTENTION_OPS), operations.of(MATMUL_OPS)
        kept[name] = bytes_kept(model)
        for key, gradient in expected.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item())
    assert attention == {"none": 4, "full": 8, "selective": 4}
    assert set(products.values()) == {3}, "of the output projection; those of layers are inside compiled graphs"
    num_heads, head_dim, float_bytes = 4, 8, 4
    assert kept["selective"] - kept["full"] == 2 * NUM_TOKENS * num_heads * (head_dim + 1) * float_bytes
    assert kept["selective"] < kept["none"]


class UnseenRotation(torch.autograd.Function):
    """Writes over its inputs where no operation of torch shows it, as Liger's kernel does."""

    @staticmethod
    def forward(ctx, query, key, cos, sin):
        ctx.save_for_backward(cos, sin)
        return tuple(UnseenRotation.written(x, cos, sin) for x in (query, key))

    @staticmethod
    def written(heads, cos, sin):
        inside = heads.transpose(1, 2)  # as the projection gave it
        inside.numpy()[:] = rotated(inside, cos[:, :, None], sin[:, :, None]).numpy()
        return inside.transpose(1, 2)

    @staticmethod
    def backward(ctx, *gradients):
        cos, sin = (x[:, None] for x in ctx.saved_tensors)
        return *(rotated(gradient, cos, -sin) for gradient in gradients), None, None


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


@pytest.mark.parametrize("offload", [False, True])
def test_selective_gives_the_gradients_of_kernels_that_write_unseen(monkeypatch, offload):
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", UnseenRotation.apply)
    loss, expected = gradients(packed_model({}, family="llama"))
    options = SELECTIVE | {"use_liger_kernels": True, "activation_offload": offload}
    found_loss, found = gradients(packed_model(options, family="llama"))
    assert found_loss == loss
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def shapes_kept(num_layers):
    """What autograd keeps between forward and backward beside the parameters."""
    model = packed_model(FULL, num_layers)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = Counter()

    def note(tensor):
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in parameters:
            shapes[tuple(tensor.shape)] += 1
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        forward(model)
    return shapes


def test_full_keeps_one_input_for_each_layer():
    """Two layers more: two inputs more."""
    assert shapes_kept(NUM_LAYERS) - shapes_kept(NUM_LAYERS - 2) == {(1, NUM_TOKENS, HIDDEN): 2}


def test_offload_moves_the_inputs_of_checkpointed_layers_and_nothing_else(monkeypatch):
    moved, back = [], []
    to_host, to_device = activations._to_host, activations._to_device
    monkeypatch.setattr(activations, "_to_host", lambda t: moved.append((tuple(t.shape), t.nbytes)) or to_host(t))
    monkeypatch.setattr(activations, "_to_device", lambda p: back.append(tuple(p[1].shape)) or to_device(p))
    gradients(packed_model(EVERY_SECOND | {"activation_offload": True}))
    inputs = [(shape, size) for shape, size in moved if size]
    assert inputs == [((1, NUM_TOKENS, HIDDEN), 4 * NUM_TOKENS * HIDDEN)] * 2
    assert [shape for shape in back if 0 not in shape] == [(1, NUM_TOKENS, HIDDEN)] * 2


def test_offloaded_tensor_is_a_copy_that_returns_to_its_device():
    tensor = torch.randn(3, 4).t()
    packed = activations._to_host(tensor)
    original = tensor.clone()
    tensor.zero_()
    assert packed[0] == CPU
    assert packed[1].untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    returned = activations._to_device(packed)
    assert torch.equal(returned, original)
    assert returned.stride() == original.stride()


def gradients_on_ranks(folder, options):
    """The whole gradient of one step."""
    config = EngineConfig(**options)
    engine = TrainEngine.build(Path(folder), config, device=CPU, optimizer=OptimizerConfig())
    num_shards = dist.get_world_size() // config.ulysses_size
    step = pack(random_samples([9, 7, 7, 5, 4]), num_shards=num_shards, max_tokens=12)
    engine.forward_backward(step.shards[dist.get_rank() // config.ulysses_size], sft_loss, step.denominators)
    return {plain_name(n): p.grad.full_tensor() for n, p in engine._model.hf_model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        FULL,
        FULL | {"activation_offload": True},
        SELECTIVE,
        EVERY_SECOND,
        FULL | {"reshard_after_forward": False},
        SELECTIVE | {"ulysses_size": 2},
        FULL | {"ulysses_size": 2, "activation_offload": True},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_recomputation_inside_fsdp_units_gives_the_same_gradients(run_ranks, tmp_path, options):
    """With Ulysses the exchanges of attention are repeated too, on all ranks alike."""
    folder = str(tiny_folder("gemma2", tmp_path))
    layout = {key: value for key, value in options.items() if key == "ulysses_size"}
    expected = run_ranks(gradients_on_ranks, 2, folder, layout)[0]
    found = run_ranks(gradients_on_ranks, 2, folder, options)[0]
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-7, msg=name)
        assert gradient.any(), name


IN_PLACE = {
    "a clamp that torch's version counters do not see": ("olmo", {"clip_qkv": 2.0}),
    "biases of experts": ("gpt_oss", FAMILIES["gpt_oss"]),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_a_layer_changes_in_place_is_kept_as_it_was(run_ranks, tmp_path, name, num_ranks):
    family, options = IN_PLACE[name]
    save_model(family, options | {"vocab_size": 131}, tmp_path)
    expected = run_ranks(gradients_on_ranks, num_ranks, str(tmp_path), {})[0]
    found = run_ranks(gradients_on_ranks, num_ranks, str(tmp_path), SELECTIVE)[0]
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=0, atol=1e-6 * gradient.abs().max().item(), msg=key)
        assert gradient.any(), key


def test_what_is_computed_without_gradients_is_neither_kept_nor_counted():
    """The scores of an indexer, which are far larger than what they choose."""
    product, results = torch.ops.aten.mm.default, []
    left, right = torch.randn(3, 4), torch.randn(4, 5)
    with _Keeps(frozenset([product]), results):
        with torch.no_grad():
            left @ right
        expected = [left @ right, left @ right]
    assert [result is not None for result in results] == [False, True]
    with _GivesBack(frozenset([product]), results):
        with torch.no_grad():
            left @ right
        found = [left @ right, left @ right]
    assert torch.equal(found[1], expected[1])

import sys
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny_models import FAMILIES, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from shardwise.config import ConfigError, ModelError
from shardwise.engine.attention import (
    PACKED_ATTENTION,
    AttentionBackend,
    PackedCall,
    _packed_attention,
    register_packed_attention,
)
from shardwise.ops import PackedLayout, packed_attention, varlen_attention

LENGTHS = [11, 6, 6, 70, 2, 1]


def layout_of(lengths):
    return PackedLayout.from_cu_seqlens(
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), device=torch.device("cpu")
    )


def packed_model(eager):
    register_packed_attention()
    model = AutoModelForCausalLM.from_config(deepcopy(eager.config), attn_implementation=PACKED_ATTENTION)
    model.load_state_dict(eager.state_dict())
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_and_gradients_equal_each_sequence_alone(family):
    """The registered attention reads scale, window and softcap from each family's layers (traps 4 and 6)."""
    eager = tiny_model(family)
    model = packed_model(eager)
    torch.manual_seed(0)
    sequences = [torch.randint(3, 100, (length,)) for length in LENGTHS]
    call = PackedCall(layout_of(LENGTHS), AttentionBackend("auto", None))
    packed_logits = model(
        input_ids=torch.cat(sequences)[None],
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS])[None],
        use_cache=False,
        packed=call,
    ).logits[0]
    assert call.num_attention_calls == model.config.num_hidden_layers
    alone = torch.cat([eager(input_ids=tokens[None], use_cache=False).logits[0] for tokens in sequences])
    torch.testing.assert_close(packed_logits, alone, rtol=0, atol=2e-5)
    weights = torch.randn_like(alone)
    (packed_logits * weights).sum().backward()
    (alone * weights).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        error = (ours.grad - theirs.grad).abs().max()
        assert error < 2e-5 * theirs.grad.abs().max(), (name, float(error))


def test_forward_without_a_layout_is_an_error_and_not_full_attention():
    model = packed_model(tiny_model("qwen3"))
    with pytest.raises(ModelError, match="Qwen3Attention is not supported: it does not pass keyword arguments on"):
        model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)


def test_a_batch_with_blocks_is_masked_and_one_without_goes_to_the_kernel(monkeypatch):
    """Of the same backend; and so does a layer that shows no image both ways, as those of Gemma 4 without a window."""
    torch.manual_seed(0)
    heads = [torch.randn(1, 2, 5, 4) for _ in range(3)]
    cu_seqlens, blocks = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([-1, -1, -1, 0, 0])
    backend, sizes = AttentionBackend("auto", None), []

    def counting(query, key, value, layout, **settings):
        sizes.append(layout.num_tokens)
        return packed_attention(query, key, value, layout, **settings)

    backend._kernel = counting
    monkeypatch.setattr("shardwise.engine.attention.varlen_problem", lambda *_arguments: None)
    found, causal = [], nn.Module()
    causal.config = SimpleNamespace(model_type="gemma4_text", layer_types=["full_attention"])
    causal.layer_idx = 0
    for module, own in ((nn.Module(), None), (nn.Module(), blocks), (causal, blocks)):
        layout = PackedLayout.from_cu_seqlens(cu_seqlens, device=heads[0].device, blocks=own)
        found.append(_packed_attention(module, *heads, None, packed=PackedCall(layout, backend))[0][0])
    assert sizes == [5, 5]
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=1e-6)
    changed = (found[0] - found[1]).abs().amax((1, 2))
    assert changed[[0, 1, 2, 4]].max() < 1e-6
    assert changed[3] > 1e-2


def test_mask_of_the_model_would_be_ignored_and_is_refused():
    heads = torch.zeros(1, 2, 3, 4)
    call = PackedCall(layout_of([3]), AttentionBackend("auto", None))
    with pytest.raises(ModelError, match=r"^Linear is not supported: it brings an attention mask of its own$"):
        _packed_attention(nn.Linear(1, 1), heads, heads, heads, torch.zeros(3, 3), packed=call)


def test_an_attention_that_is_not_told_what_its_indexer_chose_is_refused():
    heads, module = torch.zeros(1, 2, 3, 4), nn.Linear(1, 1)
    module.config, module.layer_idx = SimpleNamespace(layer_types=["indexed_attention"]), 0
    call = PackedCall(layout_of([3]), AttentionBackend("auto", None))
    with pytest.raises(
        ModelError, match=r"family of Linear is not supported: it does not tell its attention which keys"
    ):
        _packed_attention(module, heads, heads, heads, None, packed=call)


def softmax_with_a_column_for_the_sink(query, key, value, sinks, lengths):
    """Every query of every head: a softmax over the keys it sees and one more score, which points at nothing."""
    out = torch.zeros(query.shape[0], query.shape[1], value.shape[2], dtype=query.dtype)
    for head, kv_head in ((h, h // (query.shape[0] // key.shape[0])) for h in range(query.shape[0])):
        start = 0
        for length in lengths:
            for position in range(start, start + length):
                scores = key[kv_head, start : position + 1] @ query[head, position] / query.shape[2] ** 0.5
                total = scores.exp().sum() + sinks[head].exp()
                out[head, position] = (scores.exp() / total) @ value[kv_head, start : position + 1]
            start += length
    return out


def test_sinks_take_their_share_of_every_softmax():
    torch.manual_seed(0)
    lengths = [5, 2, 2, 1]
    ours = [torch.randn(heads, sum(lengths), 6).requires_grad_() for heads in (4, 2, 2)]
    ours.append(torch.randn(4).requires_grad_())
    theirs = [x.detach().double().requires_grad_() for x in ours]
    call = PackedCall(layout_of(lengths), AttentionBackend("auto", None))
    query, key, value, sinks = ours
    out, _ = _packed_attention(nn.Module(), query[None], key[None], value[None], None, packed=call, s_aux=sinks)
    found = out[0].transpose(0, 1)
    expected = softmax_with_a_column_for_the_sink(*theirs, lengths)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    weights = torch.randn_like(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        assert y.grad.abs().max() > 1e-2
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=0, atol=1e-5)


@dataclass
class OnCuda:
    """What the choice of a kernel looks at."""

    dtype: torch.dtype = torch.bfloat16
    shape: tuple[int, ...] = (4, 11, 8)
    is_cuda: bool = True


AMPERE, TURING = (8, 0), (7, 5)
PROBLEMS = {
    "tensors on a GPU older than Ampere": {"capability": TURING},
    "tensors on the CPU": {"query": OnCuda(is_cuda=False)},
    "float32 (set engine.param_dtype=bfloat16)": {"query": OnCuda(torch.float32)},
    "attention sinks": {"sinks": torch.ones(4)},
    "a value head dim other than the query's": {"value": OnCuda(shape=(4, 11, 10))},
    "soft-capped scores": {"softcap": 50.0},
    "images whose tokens see each other both ways": {"has_blocks": True},
}
IMPLEMENTATIONS = ["auto", "loop", "varlen", "flash_attention_2", "flash_attention_3"]


@pytest.fixture
def flash_modules(monkeypatch):
    """Stand-ins for the two packages, whose function computes one sequence after the other, token by token."""
    for name in ("flash_attn", "flash_attn_interface"):
        module = ModuleType(name)
        module.flash_attn_varlen_func = partial(stand_in_flash, returns_tuple=name == "flash_attn_interface")
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: AMPERE)


def stand_in_flash(
    query,
    key,
    value,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size,
    softcap,
    returns_tuple,
):
    """As flash-attn documents it: [T, H, d]; window_size = (left, right) of the token, -1 no end; softcap 0 none."""
    assert causal
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    assert window_size in ((-1, -1), (window_size[0], 0))
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.empty_like(query)
    for start, end in pairwise(cu_seqlens_q.tolist()):
        for token in range(start, end):
            first = start if window_size[0] < 0 else max(start, token - window_size[0])
            for head in range(query.shape[1]):
                kv_head = head // (query.shape[1] // key.shape[1])
                scores = key[first : token + 1, kv_head] @ query[token, head] * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                out[token, head] = scores.softmax(0) @ value[first : token + 1, kv_head]
    return (out, torch.zeros(1)) if returns_tuple else out


@pytest.mark.parametrize("problem", [None, *PROBLEMS])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_kernel_is_used_where_it_can_and_refused_where_it_was_asked_for_and_cannot(
    flash_modules, monkeypatch, implementation, problem
):
    backend = AttentionBackend(implementation, None)
    arguments = {"query": OnCuda(), "value": OnCuda(), "softcap": None, "sinks": None} | PROBLEMS.get(problem, {})
    capability = arguments.pop("capability", AMPERE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    flash = implementation.startswith("flash")
    if problem is None or problem == ("soft-capped scores" if flash else "attention sinks"):
        kernel = backend.kernel(**arguments)
        assert (kernel is None) == (implementation == "loop")
        assert (kernel is varlen_attention) == (implementation in ("auto", "varlen"))
    elif implementation in ("auto", "loop"):
        assert backend.kernel(**arguments) is None
    else:
        with pytest.raises(ModelError) as error:
            backend.kernel(**arguments)
        assert str(error.value) == (
            f"engine.attention_implementation={implementation} cannot compute {problem}; set it to auto or loop"
        )


@pytest.mark.parametrize("implementation", ["auto", "varlen", "flash_attention_2", "flash_attention_3"])
def test_kernels_compute_values_of_a_smaller_head_dim(flash_modules, implementation):
    """Of multi-head latent attention."""
    kernel = AttentionBackend(implementation, None).kernel
    assert kernel(OnCuda(), OnCuda(shape=(4, 11, 6)), softcap=None, sinks=None) is not None


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3"])
def test_flash_attention_is_the_loop_over_sequences(flash_modules, implementation, window, softcap):
    torch.manual_seed(0)
    query, key, value = (torch.randn(heads, 11, 4, dtype=torch.float64) for heads in (4, 2, 2))
    layout = layout_of([6, 4, 1])
    kernel = AttentionBackend(implementation, None).kernel(OnCuda(), OnCuda(), softcap=softcap, sinks=None)
    for scaling in (None, 0.3):
        settings = {"scaling": scaling, "window": window, "softcap": softcap}
        expected = packed_attention(query, key, value, layout, **settings)
        found = packed_attention(query, key, value, layout, **settings, kernel=kernel)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 if softcap else 1e-12)


@pytest.mark.parametrize(
    ("implementation", "package"), [("flash_attention_2", "flash-attn"), ("flash_attention_3", "flash-attn-3")]
)
def test_implementation_without_its_package_is_refused_when_the_engine_is_built(monkeypatch, implementation, package):
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as error:
        AttentionBackend(implementation, None)
    assert str(error.value) == (
        f"engine.attention_implementation={implementation} needs the package {package}, which is not installed; "
        "install it, or use auto, which takes what is there and fits the device"
    )

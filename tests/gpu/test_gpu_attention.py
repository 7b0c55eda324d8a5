"""Attention kernels in bfloat16 against the loop over sequences in float32: losses and gradients of packed batches."""

import pytest
import torch
from small_gpu_model import LOSSES, loss_and_gradient, relative_error, save_model

from shardwise.engine.attention import FLASH_PACKAGES
from shardwise.ops import (
    VARLEN_READS_CACHES,
    PackedLayout,
    attend,
    packed_attention,
    varlen_attention,
    varlen_decode_attention,
)

BFLOAT16 = "param_dtype=bfloat16"
WINDOW = {
    "use_sliding_window": True,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
MODELS = {
    "grouped": {},
    "ungrouped": {"num_key_value_heads": 8},
    "window": WINDOW,
    "head-dim-128": {"head_dim": 128},
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("implementation", ["auto", "varlen", *FLASH_PACKAGES])
def test_kernels_are_as_close_to_float32_as_the_loop_is(tmp_path, device, implementation, model, loss):
    """bfloat16 alone moves the gradient by about a percent; another kernel may not move it much further."""
    if implementation in FLASH_PACKAGES:
        pytest.importorskip(FLASH_PACKAGES[implementation][0])
    folder = save_model(tmp_path, **MODELS[model])

    def found(*options):
        return loss_and_gradient(folder, device, *options, loss=loss)

    exact_loss, exact = found("attention_implementation=loop")
    loop_loss, loop = found(BFLOAT16, "attention_implementation=loop")
    kernel_loss, kernel = found(BFLOAT16, f"attention_implementation={implementation}")
    assert kernel_loss == pytest.approx(exact_loss, rel=2e-3)
    assert loop_loss == pytest.approx(exact_loss, rel=2e-3)
    assert relative_error(kernel, exact) < max(1.5 * relative_error(loop, exact), 0.01) < 0.1


@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_sinks_are_computed_by_the_kernel_and_without_all_scores(device, kv_heads, window):
    """Output and gradients in bfloat16 against the loop in float32, as near as the loop in bfloat16."""
    torch.manual_seed(0)
    lengths = [2048, 300, 1, 700]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    layout = PackedLayout.from_cu_seqlens(cu_seqlens, device=device)
    inputs = [torch.randn(heads, sum(lengths), 64, device=device) for heads in (8, kv_heads, kv_heads)]
    inputs = [x.bfloat16().float() for x in (*inputs, torch.linspace(-2, 3, 8, device=device))]
    weights = torch.randn(8, sum(lengths), 64, device=device).bfloat16().float()

    def found(dtype, kernel):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        settings = {"scaling": 0.3, "window": window, "softcap": None, "sinks": leaves[3]}
        out = packed_attention(*leaves[:3], layout, **settings, kernel=kernel)
        (out * weights.to(dtype)).sum().backward()
        peak = torch.accelerator.max_memory_allocated(device) - before
        return [x.float() for x in (out.detach(), *(leaf.grad for leaf in leaves))], peak

    exact, _ = found(torch.float32, None)
    loop, _ = found(torch.bfloat16, None)
    kernel, peak = found(torch.bfloat16, varlen_attention)
    for ours, theirs, right in zip(kernel, loop, exact, strict=True):
        assert relative_error(ours, right) < max(1.5 * relative_error(theirs, right), 0.01) < 0.1
    assert peak < 2 * 8 * 2048 * 2048  # of one sequence's scores in bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_keys", [5, 129, 300])
@pytest.mark.parametrize("num_queries", [1, 5])
def test_masks_that_are_broadcast_are_read_right_whatever_kernel_torch_takes(device, num_queries, num_keys, dtype):
    """A decode step's mask of each row, for all heads and queries; widths that no kernel divides evenly."""
    torch.manual_seed(0)
    shapes = ((4, 8, num_queries, 64), (4, 2, num_keys, 64), (4, 2, num_keys, 64))
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    seen = torch.rand(4, 1, 1, num_keys) < 0.5
    seen[..., 0] = True
    expected = attend(*(tensor.double() for tensor in tensors), scaling=0.2, mask=seen)
    found = attend(*(tensor.to(device) for tensor in tensors), scaling=0.2, mask=seen.to(device))
    bound = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found.double().cpu(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 512)])
def test_grouped_queries_are_attended_to_without_all_scores(device, dtype, dim):
    length = 4096
    query, key, value = (torch.randn(1, heads, length, dim, device=device, dtype=dtype) for heads in (8, 2, 2))
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    attend(query, key, value, scaling=None, causal=True)
    peak = torch.accelerator.max_memory_allocated(device) - before
    assert peak < 0.75 * 8 * length * length * query.itemsize


@pytest.mark.skipif(not VARLEN_READS_CACHES, reason="this torch cannot tell its kernel how many keys a row has")
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 32])
@pytest.mark.parametrize(("kv_heads", "dim"), [(8, 64), (2, 128)])
def test_a_decode_step_reads_the_tokens_of_each_row(device, window, kv_heads, dim, has_sinks):
    torch.manual_seed(0)
    query = torch.randn(5, 8, 1, dim, device=device)
    keys, values = (torch.randn(5, 300, kv_heads, dim, device=device).transpose(1, 2) for _ in range(2))
    lengths = torch.tensor([1, 300, 17, 64, 257], dtype=torch.int32, device=device)
    places = torch.arange(300, device=device)
    seen = (places < lengths[:, None]) & (places >= lengths[:, None] - (window or 300))
    sinks = torch.linspace(-2, 3, 8, device=device) if has_sinks else None
    expected = attend(query, keys, values, scaling=0.1, mask=seen[:, None, None], sinks=sinks)
    half = [tensor.bfloat16() for tensor in (query, keys, values)]
    found = varlen_decode_attention(*half, lengths, longest=300, scaling=0.1, window=window, sinks=sinks)
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.02)

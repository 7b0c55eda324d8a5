"""Attention kernels in bfloat16 against the loop over sequences in float32: losses and gradients of packed batches."""

import pytest
from small_gpu_model import LOSSES, loss_and_gradient, relative_error, save_model

from shardwise.engine.attention import FLASH_PACKAGES

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

"""Memory and speed options change no number beyond rounding. Backward passes of attention add in any order on a GPU."""

import pytest
import torch
from small_gpu_model import LOSSES, build, loss_and_gradient, loss_of, packed, relative_error, save_model, train

BFLOAT16 = "param_dtype=bfloat16"
FULL = "activation_checkpointing=full"
SELECTIVE = "activation_checkpointing=selective"
RECOMPUTING = {
    "full": [FULL],
    "selective": [SELECTIVE],
    "every-2nd": [SELECTIVE, "checkpoint_every_layers=2"],
    "full-offload": [FULL, "activation_offload=true"],
    "selective-offload": [SELECTIVE, "activation_offload=true"],
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("options", RECOMPUTING.values(), ids=RECOMPUTING.keys())
def test_recomputing_gives_the_same_loss_and_gradient(folder, device, options, loss):
    """The forward pass is the same to the bit; gradients differ by the order in which attention adds them."""
    expected_loss, expected = loss_and_gradient(folder, device, BFLOAT16, loss=loss)
    found_loss, found = loss_and_gradient(folder, device, BFLOAT16, *options, loss=loss)
    assert found_loss == expected_loss
    assert relative_error(found, expected) < 5e-3


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("options", [[], [FULL]], ids=["alone", "with-checkpointing"])
def test_a_tiled_mlp_gives_the_same_gradient(folder, device, options, loss):
    expected_loss, expected = loss_and_gradient(folder, device, BFLOAT16, loss=loss)
    tiled_loss, tiled = loss_and_gradient(folder, device, BFLOAT16, "apply_tiled_mlp=true", *options, loss=loss)
    assert tiled_loss == pytest.approx(expected_loss, rel=1e-3)
    assert relative_error(tiled, expected) < 1e-2


@pytest.mark.parametrize(
    ("options", "loss"),
    [([], "sft"), ([FULL], "sft"), ([SELECTIVE], "sft"), ([FULL], "policy"), ([SELECTIVE], "value")],
    ids=["alone", "full", "selective", "full-policy", "selective-value"],
)
def test_compiled_layers_give_the_same_gradient(folder, device, options, loss):
    """Fused kernels round less often to bfloat16, so they may be closer to float32 but not far from eager ones."""
    torch.compiler.reset()  # past a number of engines a layer would quietly stay as it is
    exact_loss, exact = loss_and_gradient(folder, device, loss=loss)
    _, eager = loss_and_gradient(folder, device, BFLOAT16, loss=loss)
    compiled_loss, compiled = loss_and_gradient(folder, device, BFLOAT16, "compile_layers=true", *options, loss=loss)
    assert compiled_loss == pytest.approx(exact_loss, rel=2e-3)
    assert relative_error(compiled, exact) < max(1.5 * relative_error(eager, exact), 0.01)


def test_compiled_layers_train_on_batches_of_other_sizes(folder, device):
    engine = build(folder, device, BFLOAT16, "compile_layers=true", FULL)
    step = packed(num_batches=2)
    first = loss_of(engine, step)
    engine.optim_step()
    assert train(engine, 5)[-1] < first


def test_liger_kernels_give_the_same_gradient(folder, device):
    pytest.importorskip("liger_kernel")
    exact_loss, exact = loss_and_gradient(folder, device)
    _, plain = loss_and_gradient(folder, device, BFLOAT16)
    loss, liger = loss_and_gradient(folder, device, BFLOAT16, "use_liger_kernels=true")
    assert loss == pytest.approx(exact_loss, rel=2e-3)
    assert relative_error(liger, exact) < max(1.5 * relative_error(plain, exact), 0.01)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_liger_kernels_give_the_same_gradient_when_computed_again(tmp_path, device, family):
    """Without norms of keys its rotary embedding writes over what the key projection gave."""
    pytest.importorskip("liger_kernel")
    folder = save_model(tmp_path, family)
    expected_loss, expected = loss_and_gradient(folder, device, BFLOAT16, "use_liger_kernels=true")
    loss, found = loss_and_gradient(folder, device, BFLOAT16, "use_liger_kernels=true", SELECTIVE)
    assert loss == expected_loss
    assert relative_error(found, expected) < 5e-3


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reducing_once_gives_the_gradient_of_reducing_each_time(folder, device, dtype, loss):
    """Both sum in float32; reduced once, bfloat16 gradients are summed before they leave their dtype's layer."""

    def found(*options):
        return loss_and_gradient(folder, device, f"param_dtype={dtype}", *options, num_batches=3, loss=loss)

    each_loss, each = found()
    once_loss, once = found("reduce_gradients=last_micro_batch")
    assert once_loss == pytest.approx(each_loss, rel=1e-6)
    assert relative_error(once, each) < (1e-4 if dtype == "float32" else 1e-2)


def test_weights_in_host_memory_train_equally(folder, device):
    """FSDP's CPUOffloadPolicy: the sharded weights and the optimizer stay on the host, and numbers stay the same."""
    resident = train(build(folder, device), 4)
    engine = build(folder, device, "offload_policy=true")
    assert {parameter.device.type for parameter in engine._model.parameters()} == {"cpu"}
    assert train(engine, 4) == pytest.approx(resident, rel=1e-4)


def test_float16_with_loss_scaling_learns(folder, device):
    engine = build(folder, device, "param_dtype=float16")
    losses = train(engine, 30)
    assert torch.isfinite(torch.tensor(losses)).all()
    assert losses[-1] < 0.7 * losses[0]


def test_bfloat16_masters_learn(folder, device):
    """Stochastic rounding: a step much smaller than the last bit of a weight still moves it on average."""
    losses = train(build(folder, device, BFLOAT16, "master_dtype=bfloat16"), 30)
    assert losses[-1] < 0.7 * losses[0]


def test_adapters_learn(folder, device):
    pytest.importorskip("peft", minversion="0.21")
    losses = train(build(folder, device, BFLOAT16, "lora.rank=16", learning_rate=1e-2), 30)
    assert losses[-1] < 0.9 * losses[0]

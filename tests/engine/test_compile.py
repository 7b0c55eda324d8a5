import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from ranks import RankError
from sharded_lora import needs_integer_shards
from tiny_models import random_samples, tiny_folder, tiny_model

from shardwise.config import ConfigError, EngineConfig, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.engine.compile import compile_layers, use_liger_kernels
from shardwise.ops import plain_name
from shardwise.recipes.losses import sft_loss

CPU = torch.device("cpu")


def train(folder, options):
    """Loss and whole gradient of a step of packs of several lengths; how many layers are compiled."""
    config = EngineConfig(**options)
    engine = TrainEngine.build(Path(folder), config, device=CPU, optimizer=OptimizerConfig())
    num_shards = dist.get_world_size() // config.ulysses_size
    step = pack(random_samples([9, 7, 5]), num_shards=num_shards, max_tokens=12)
    shard = step.shards[dist.get_rank() // config.ulysses_size]
    metrics = engine.forward_backward(shard, sft_loss, step.denominators)
    named = {plain_name(name): p for name, p in engine._model.hf_model.named_parameters()}
    gradients = {name: p.grad.full_tensor() for name, p in named.items() if p.grad is not None}
    compiled = sum(module._compiled_call_impl is not None for module in engine._model.modules())
    loss = torch.tensor(metrics["train/loss"].result() / config.ulysses_size)  # ranks that share sequences have it all
    dist.all_reduce(loss)
    return loss.item(), gradients, compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "num_ranks", "options"),
    [
        pytest.param("llama", 1, {}, id="llama", marks=pytest.mark.full),
        pytest.param(
            "qwen3_moe",
            2,
            {
                "activation_checkpointing": "selective",
                "activation_offload": True,
                "forward_prefetch": 1,
                "wrap_policy": {"moe_experts": ["Qwen3MoeExperts"]},
                "module_precision": [{"module": "model.layers.*.self_attn"}],
            },
            id="selective with units inside the layers",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "qwen3",
            2,
            {
                "ulysses_size": 2,
                "apply_tiled_mlp": True,
                "tiled_num_shards": 2,
                "offload_policy": True,
                "activation_checkpointing": "full",
                "reduce_gradients": "last_micro_batch",
            },
            id="ulysses, tiles and weights on the host",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "llama",
            1,
            {"lora": {"rank": 3, "alpha": 3, "quantize_base": "nf4"}},
            id="adapters on 4 bits",
            marks=[pytest.mark.full, needs_integer_shards],
        ),
        pytest.param(
            "qwen3_moe",
            2,
            {"lora": {"rank": 3, "alpha": 3, "target_parameters": ["gate_up_proj", "down_proj"]}},
            id="adapters on experts",
            marks=pytest.mark.full,
        ),
    ],
)
def test_compiled_layers_compute_the_same(run_ranks, tmp_path, family, num_ranks, options):
    """Over packed sequences, whose layout changes from batch to batch."""
    num_layers = 1 + options.get("forward_prefetch", 0)  # weights are gathered ahead of further layers
    folder = str(tiny_folder(family, tmp_path, num_hidden_layers=num_layers))
    of_model = {key: value for key, value in options.items() if key == "lora"}
    expected_loss, expected, _ = run_ranks(train, num_ranks, folder, of_model)[0]
    found = run_ranks(train, num_ranks, folder, options | {"compile_layers": True}, timeout_seconds=600)
    loss, gradients, num_compiled = found[0]
    assert num_compiled == num_layers
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-6, msg=name)


def test_only_the_layers_named_are_compiled():
    model = tiny_model("llama")
    compile_layers(model, ["model.layers.1"])
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    assert compiled == ["model.layers.1"]


def build_with_liger(folder):
    TrainEngine.build(Path(folder), EngineConfig(use_liger_kernels=True), device=CPU, optimizer=OptimizerConfig())


def test_liger_kernels_are_refused_on_a_cpu(run_ranks, tmp_path):
    with pytest.raises(
        RankError, match=r"ConfigError: engine\.use_liger_kernels=true needs a CUDA device, and this rank runs on cpu\n"
    ):
        run_ranks(build_with_liger, 1, str(tiny_folder("llama", tmp_path)))


def test_liger_kernels_without_the_package_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError) as error:
        use_liger_kernels(tiny_model("llama"), torch.device("cuda", 0))
    assert str(error.value) == "engine.use_liger_kernels=true needs the package liger-kernel, which is not installed"


def test_families_without_liger_kernels_are_refused_and_others_get_them(monkeypatch):
    """The package itself only logs that it has none, and computes as before."""
    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch"):
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
    module.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": None, "gemma2": None}
    applied = []
    monkeypatch.setattr("transformers.integrations.liger.apply_liger_kernel", lambda *given: applied.append(given))
    with pytest.raises(ConfigError, match="liger-kernel has no kernels for llama; it has them for gemma2, qwen3"):
        use_liger_kernels(tiny_model("llama"), torch.device("cuda", 0))
    assert applied == []
    model = tiny_model("qwen3")
    use_liger_kernels(model, torch.device("cuda", 0))
    assert applied == [(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})]

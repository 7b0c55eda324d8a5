"""Layouts and options that cannot work: every rank says so, with what was given and what would do, before a step."""

import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import RankError
from tiny_models import tiny_folder
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from shardwise.config import ConfigError, EngineConfig, ModelError, OptimizerConfig, UserError
from shardwise.engine import TrainEngine


def build_and_barrier(folder, keys):
    try:
        TrainEngine.build(Path(folder), EngineConfig(**keys), device=torch.device("cpu"), optimizer=OptimizerConfig())
    except ConfigError as error:
        dist.barrier()  # every rank is here, so none waits in a collective for another
        return str(error)
    return None


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    families = ("qwen3", "llama", "qwen3_moe")
    return {family: str(tiny_folder(family, tmp_path_factory.mktemp(family))) for family in families}


@pytest.mark.parametrize(
    ("family", "world_size", "keys", "message"),
    [
        (
            "qwen3",
            4,
            {"fsdp_size": 3},
            "engine.fsdp_size=3 does not divide the world size 4; use 1, 2 or 4 (4 = shard over all ranks)",
        ),
        (
            "qwen3",
            2,
            {"ulysses_size": 4},
            "engine.ulysses_size=4 does not divide the 2 ranks that share one copy of the model (the world size); use "
            "engine.ulysses_size=1 or 2",
        ),
        (
            "qwen3",
            4,
            {"fsdp_size": 2, "ulysses_size": 4},
            "engine.ulysses_size=4 does not divide the 2 ranks that share one copy of the model (engine.fsdp_size); "
            "use engine.ulysses_size=1 or 2, or engine.fsdp_size=4",
        ),
        (
            "qwen3_moe",
            4,
            {"ep_size": 3},
            "engine.ep_size=3 does not divide the 4 ranks that share one copy of the model (the world size); use 1, 2 "
            "or 4",
        ),
        (
            "qwen3_moe",
            4,
            {"ep_size": 4},
            "engine.ep_size=4 does not divide the 6 experts of model.layers.0.mlp.experts; use 1, 2, 3 or 6",
        ),
        (
            "qwen3",
            2,
            {"ep_size": 2},
            "engine.ep_size=2 has no effect on Qwen3ForCausalLM, which has no experts; set it to 1",
        ),
        (
            "qwen3_moe",
            2,
            {"ep_size": 2, "apply_tiled_mlp": True},
            "engine.apply_tiled_mlp=true computes model.layers.0.mlp piece by piece, but model.layers.0.mlp.experts "
            "inside it is an FSDP unit of its own (engine.ep_size) and would be gathered for every piece; remove one "
            "of the two",
        ),
        (
            "llama",
            2,
            {"ulysses_size": 2},
            "engine.ulysses_size=2 does not divide num_attention_heads=3; on 2 ranks that share one copy of the "
            "model use 1",
        ),
        (
            "qwen3",
            2,
            {"experts_implementation": "batched_mm"},
            "engine.experts_implementation=batched_mm has no effect on Qwen3ForCausalLM, which has no experts that can "
            "be computed in several ways; remove it",
        ),
        (
            "qwen3",
            4,
            {"reshard_after_forward": 3},
            "engine.reshard_after_forward=3 does not divide the 4 ranks that weights are sharded over; use true, "
            "false, 2, 4",
        ),
        (
            "qwen3",
            2,
            {"backward_prefetch": 5},
            "engine.backward_prefetch=5 would gather the weights of 5 layers beside the one that computes, and the "
            "model has 2 layers; use at most 1",
        ),
        (
            "qwen3",
            2,
            {"wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayr"]}},
            "engine.wrap_policy.transformer_layer_cls_to_wrap: Qwen3DecoderLayr matches no module of Qwen3ForCausalLM; "
            "its modules are of Qwen3DecoderLayer, ",
        ),
        (
            "qwen3",
            2,
            {"wrap_policy": {"moe_experts": ["Qwen3MoeExperts"]}},
            "engine.wrap_policy.moe_experts: Qwen3MoeExperts matches no module of Qwen3ForCausalLM; its modules are of "
            "Qwen3",
        ),
        (
            "qwen3",
            2,
            {"freeze_module_prefix": ["model.embed_token_"]},
            "engine.freeze_module_prefix: 'model.embed_token_' names no module or parameter of "
            "Qwen3ForCausalLM; its modules have names such as model.embed_tokens",
        ),
        (
            "qwen3",
            2,
            {"freeze_module_prefix": ["model"]},
            "engine.freeze_module_prefix=['model'] freezes the whole model; nothing would be trained",
        ),
        (
            "qwen3",
            2,
            {"module_precision": [{"module": "model.layers.*.mpl"}]},
            "engine.module_precision: model.layers.*.mpl matches no module of Qwen3ForCausalLM; its modules have names "
            "such as model.layers.1.mlp",
        ),
        (
            "qwen3",
            2,
            {"wrap_policy": {"wrap_embeddings": True}},
            "engine.wrap_policy.wrap_embeddings=true: the embedding and the output projection of Qwen3ForCausalLM are "
            "one weight (tie_word_embeddings), which stays in the root unit; set it to false",
        ),
        (
            "qwen3",
            2,
            {"wrap_policy": {"wrap_lm_output": True}},
            "engine.wrap_policy.wrap_lm_output=true: the embedding and the output projection of Qwen3ForCausalLM are "
            "one weight (tie_word_embeddings), which stays in the root unit; set it to false",
        ),
        (
            "llama",
            2,
            {"module_precision": [{"module": "lm_head"}]},
            "engine.module_precision=lm_head makes an FSDP unit of lm_head, which holds the output projection; a head "
            "of its own applies that in float32. Name others; engine.wrap_policy.wrap_lm_output=true makes it a unit",
        ),
        (
            "qwen3",
            2,
            {"apply_tiled_mlp": True, "module_precision": [{"module": "model.layers.1.mlp.down_proj"}]},
            "engine.apply_tiled_mlp=true computes model.layers.1.mlp piece by piece, but model.layers.1.mlp.down_proj "
            "inside it is an FSDP unit of its own (engine.module_precision=model.layers.1.mlp.down_proj) and would be "
            "gathered for every piece; remove one of the two",
        ),
        (
            "qwen3",
            2,
            {"use_liger_kernels": True},
            "engine.use_liger_kernels=true needs a CUDA device, and this rank runs on cpu",
        ),
        (
            "qwen3",
            2,
            {"attention_implementation": "flash_attention_2"},
            "engine.attention_implementation=flash_attention_2 needs the package flash-attn, which is not installed; "
            "install it, or use auto, which takes what is there and fits the device",
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_every_rank_refuses_what_cannot_work(run_ranks, folders, family, world_size, keys, message):
    """`message` is the whole of it, or all up to a list of names that begins with the right one."""
    errors = run_ranks(build_and_barrier, world_size, folders[family], keys, timeout_seconds=20)
    assert errors == [errors[0]] * world_size
    assert errors[0] is not None
    assert errors[0].startswith(message) if message.endswith((" ", "Qwen3", "mlp", "tokens")) else errors[0] == message


def build_own(own):
    """`own` by rank: its folder, and its keys of engine and trainer. Returns the class and text of what is raised."""
    folder, keys, optimizer = own[dist.get_rank()]
    with pytest.raises(UserError) as error:
        TrainEngine.build(
            Path(folder), EngineConfig(**keys), device=torch.device("cpu"), optimizer=OptimizerConfig(**optimizer)
        )
    dist.barrier()  # every rank is here, so none waits in a collective for another
    return error.type, str(error.value)


def test_what_one_rank_alone_cannot_build_is_raised_on_every_rank(run_ranks, folders, tmp_path):
    whole, broken = (folders["qwen3"], {}, {}), tmp_path / "broken"
    shutil.copytree(folders["qwen3"], broken)
    (broken / "config.json").write_text("{")
    flash = {"attention_implementation": "flash_attention_2"}
    rates = {"module_learning_rates": {"nowhere": 1.0}}
    for other, error_class, message in [
        ((str(broken), {}, {}), ModelError, f"rank 1: {broken}/config.json is not a model config: "),
        ((folders["qwen3"], flash, {}), ConfigError, "rank 1: engine.attention_implementation=flash_attention_2 "),
        ((folders["qwen3"], {}, rates), ConfigError, "rank 1: trainer.module_learning_rates"),
    ]:
        errors = run_ranks(build_own, 2, [whole, other], timeout_seconds=20)
        assert errors == [errors[0]] * 2
        assert errors[0][0] is error_class
        assert errors[0][1].startswith(message)


def score_with_varlen(folder):
    from tiny_models import random_samples

    from shardwise.data.packing import pack

    engine = TrainEngine.build(
        Path(folder),
        EngineConfig(attention_implementation="varlen"),
        device=torch.device("cpu"),
        optimizer=OptimizerConfig(),
    )
    engine.forward(pack(random_samples([5]), num_shards=1, max_tokens=8).shards[0])


def test_attention_that_cannot_compute_the_tensors_is_refused_and_never_replaced(run_ranks, folders):
    with pytest.raises(RankError) as error:
        run_ranks(score_with_varlen, 2, folders["qwen3"])
    message = (
        "ModelError: engine.attention_implementation=varlen cannot compute tensors on the CPU; set it to auto or loop\n"
    )
    assert str(error.value).count(message) == 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention_implementation": "sdpa"}, "attention_implementation='sdpa': input should be 'auto', 'loop', "),
        ({"param_dtype": "bf16"}, "param_dtype='bf16': input should be 'float32', 'bfloat16' or 'float16'"),
        ({"master_dtype": "float16"}, "master_dtype='float16': input should be 'float32' or 'bfloat16'"),
        ({"experts_implementation": "fused"}, "experts_implementation='fused': input should be 'grouped_mm', "),
        ({"reshard_after_forward": 1}, "reshard_after_forward"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unknown_names_are_refused_with_the_known_ones(keys, message):
    with pytest.raises(ConfigError) as error:
        EngineConfig.parse(keys, origin="test")
    assert str(error.value).startswith(f"test: {message}")


def build_with_routers_that_give_no_logits(folder, keys):
    """As those of other releases of transformers do."""
    choose = Qwen3MoeTopKRouter.forward
    with patch.object(Qwen3MoeTopKRouter, "forward", lambda *args: (None, *choose(*args)[1:])):
        build_and_barrier(folder, {"param_dtype": "float32", **keys})


@pytest.mark.parametrize("keys", [{"router_metrics": "layers"}, {"router_aux_loss_coef": 0.1}])
def test_routers_that_cannot_be_read_are_refused_before_any_step_that_would_read_them(run_ranks, folders, keys):
    message = (
        "ModelError: model.layers.0.mlp.gate cannot be read: Qwen3MoeTopKRouter does not give its logits; "
        "router_metrics=summary"
    )
    with pytest.raises(RankError) as error:
        run_ranks(build_with_routers_that_give_no_logits, 2, folders["qwen3_moe"], keys)
    assert str(error.value).count(message) == 2

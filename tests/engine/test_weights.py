from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hub_weights import hub_weights
from live_bytes import LiveBytes
from safetensors.torch import load_file
from tiny_models import FAMILIES, MOE_FAMILIES, empty_model, tiny_folder, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.engine.files.loading import load_weights
from shardwise.engine.files.model_folder import SINGLE_NAME
from shardwise.engine.runtime_state import runtime_state
from shardwise.engine.weights import num_parameters, stream_weights
from shardwise.region import Region


def gathered(folder, dtype_name):
    """Runtime and hub tensors of a sharded model, cloned while they stream by."""
    model = empty_model(Path(folder), dim=0)
    load_weights(model, Path(folder))
    dtype = getattr(torch, dtype_name)
    runtime, hub = (
        {name: tensor.clone() for name, tensor in stream(model, dtype)} for stream in (stream_weights, hub_weights)
    )
    return list(runtime), runtime, list(hub), hub


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES + MOE_FAMILIES)
@pytest.mark.parametrize(("world_size", "dtype"), [(2, "float32"), (4, "bfloat16")])
def test_trap_12_weights_arrive_whole_and_once_as_if_cast_after_gathering(
    run_ranks, tmp_path, family, world_size, dtype
):
    """The tied projection is not sent twice. Runtime names are the model's, hub names the files'."""
    tiny_folder(family, tmp_path)
    stored = load_file(tmp_path / SINGLE_NAME)
    results = run_ranks(gathered, world_size, str(tmp_path), dtype)
    model = tiny_model(family).to(getattr(torch, dtype))
    tied = set(model.get_expanded_tied_weights_keys())
    for order, runtime, hub_order, hub in results:
        assert order == results[0][0], "the same order on every rank"
        assert hub_order == results[0][2]
        assert_equal(runtime, {name: tensor for name, tensor in model.state_dict().items() if name not in tied})
        assert_equal(hub, {name: tensor.to(getattr(torch, dtype)) for name, tensor in stored.items()})
    assert (family in MOE_FAMILIES) == (runtime.keys() != hub.keys())


def cut(shape, rank, size) -> Region:
    """Of columns a share for every rank, of rows every other third."""
    if len(shape) < 2:
        return Region.whole(shape)
    columns, third = shape[-1] // size, -(-shape[0] // 3)
    rows = ((third, 2 * third),) if rank % 2 else ((0, third), (2 * third, shape[0]))
    return Region((rows, *Region.whole(shape[1:-1]).spans, ((rank * columns, (rank + 1) * columns),)))


def gathered_parts(folder, dtype_name):
    """Of each tensor what this rank needs, where only some ranks name projections of queries, and none names norms."""
    model = empty_model(Path(folder), dim=0)
    load_weights(model, Path(folder))
    ranks = range(dist.get_world_size())
    needed = [
        {
            name: cut(tensor.shape, rank, len(ranks))
            for name, tensor in runtime_state(model).items()
            if "norm" not in name and (rank or "q_proj" not in name)
        }
        for rank in ranks
    ]
    streamed = stream_weights(model, getattr(torch, dtype_name), needed)
    return needed[dist.get_rank()], {name: tensor.clone() for name, tensor in streamed}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(("world_size", "dtype"), [(2, "float32"), (4, "bfloat16")])
def test_each_rank_is_given_what_it_needs_of_the_weights(run_ranks, tmp_path, family, world_size, dtype):
    tiny_folder(family, tmp_path)
    model = tiny_model(family).to(getattr(torch, dtype))
    tied = set(model.get_expanded_tied_weights_keys())
    wholes = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    for needed, found in run_ranks(gathered_parts, world_size, str(tmp_path), dtype):
        assert any(needed[name] != Region.whole(tensor.shape) for name, tensor in wholes.items() if name in needed)
        expected = {name: needed[name].of(whole) if name in needed else whole for name, whole in wholes.items()}
        assert_equal(found, expected)


def test_weights_that_a_family_keeps_in_float32_are_sent_in_float32(run_ranks, tmp_path):
    """A rollout engine built by from_pretrained(dtype=bfloat16) serves them in float32."""
    config = AutoConfig.for_model(
        "dots1",
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.data.copy_(torch.rand(4))
    model.save_pretrained(tmp_path)
    served = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    for _, runtime, _, hub in run_ranks(gathered, 2, str(tmp_path), "bfloat16"):
        assert_equal(runtime, served)
        assert torch.equal(hub[name], bias)


def test_shared_weights_are_counted_once():
    model = tiny_model("qwen3")
    assert num_parameters(model) == sum(tensor.numel() for tensor in dict(model.named_parameters()).values())
    assert num_parameters(tiny_model("qwen3", tie_word_embeddings=False)) == num_parameters(model) + 131 * 32


def peak_while_streaming(folder):
    """Bytes, beyond the shards; and how many were streamed."""
    model = empty_model(Path(folder), dim=0)
    load_weights(model, Path(folder))
    with LiveBytes(model) as live:
        streamed = sum(tensor.nbytes for _, tensor in hub_weights(model, torch.float32))
    return live.peak, streamed


def test_streaming_holds_the_experts_of_one_layer_at_a_time(run_ranks, tmp_path):
    """A fused parameter (two thirds of them) and this rank's share of it; and the other one (a third), for gloo lets a
    collective's tensors go when the next one begins."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 16, "num_hidden_layers": 3}
    folder = tiny_folder("qwen3_moe", tmp_path, **sizes)
    block_bytes = 16 * 3 * 512 * 512 * 4
    for peak, streamed in run_ranks(peak_while_streaming, 2, str(folder)):
        assert streamed > 3 * block_bytes
        assert peak < 1.4 * block_bytes

"""The exchanges of Ulysses sequence parallelism, on real ranks, against the tensors before they were cut."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankError
from tiny_models import random_samples, tiny_folder
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode

from shardwise.config import ConfigError, EngineConfig, FrozenEngineConfig, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.engine.attention import AttentionBackend, PackedCall, _packed_attention
from shardwise.engine.ulysses import Ulysses, check_heads
from shardwise.ops import PackedLayout, packed_attention
from shardwise.recipes.losses import sft_loss

CPU = torch.device("cpu")
LENGTHS = [5, 3, 3, 1]
DIM, VALUE_DIM = 6, 4
HEADS = {
    "as many key heads as queries": (4, 4),
    "ranks divide the key heads": (8, 4),
    "fewer key heads than ranks": (8, 1),
    "ranks do not divide 3 key heads": (12, 3),
    "ranks do not divide 6 key heads": (12, 6),
    "a copy of each of 2 for 4 ranks": (4, 2),
}


def whole(num_heads, num_kv_heads, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_heads, DIM), (num_kv_heads, DIM), (num_kv_heads, VALUE_DIM)]
    return [torch.randn(h, sum(LENGTHS), d, generator=generator, dtype=torch.float64).to(dtype) for h, d in shapes]


def own_tokens(tensor):
    """[heads, T, d] -> this rank's tokens, a leaf."""
    return tensor.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].clone().requires_grad_()


def exchange(num_heads, num_kv_heads):
    ulysses = Ulysses(dist.group.WORLD)
    parts = ulysses.heads_of_all_tokens(*map(own_tokens, whole(num_heads, num_kv_heads)))
    return [part.detach() for part in parts]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS.values(), ids=HEADS.keys())
def test_each_rank_gets_its_query_heads_and_the_key_heads_they_need(run_ranks, world_size, num_heads, num_kv_heads):
    query, key, value = whole(num_heads, num_kv_heads)
    queries_per_rank, queries_per_key = num_heads // world_size, num_heads // num_kv_heads
    for rank, (own_query, own_key, own_value) in enumerate(run_ranks(exchange, world_size, num_heads, num_kv_heads)):
        assert torch.equal(own_query, query[rank * queries_per_rank : (rank + 1) * queries_per_rank])
        group = queries_per_rank // own_key.shape[0]
        for place in range(queries_per_rank):
            needed = (rank * queries_per_rank + place) // queries_per_key
            assert torch.equal(own_key[place // group], key[needed])
            assert torch.equal(own_value[place // group], value[needed])
        # The fewest that ranks can hold alike.
        assert own_key.shape[0] == math.lcm(num_kv_heads, world_size) // world_size


def round_trip(num_heads):
    ulysses = Ulysses(dist.group.WORLD)
    query, key, value = whole(num_heads, num_heads)
    mine = own_tokens(value)
    back = ulysses.tokens_of_all_heads(ulysses.heads_of_all_tokens(own_tokens(query), own_tokens(key), mine)[2])
    weights = torch.randn(back.shape, dtype=back.dtype)
    (back * weights).sum().backward()
    return torch.equal(back, mine), torch.equal(mine.grad, weights)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_there_and_back_is_the_identity_forward_and_backward(run_ranks, world_size):
    assert run_ranks(round_trip, world_size, 4) == [(True, True)] * world_size


def attend_on_ranks(num_heads, num_kv_heads, settings):
    """This rank's tokens of the output, and of the gradients of query, key, value, and the gradient of the sinks."""
    ulysses = Ulysses(dist.group.WORLD)
    call = PackedCall(layout(), AttentionBackend("auto", ulysses))
    parts = list(map(own_tokens, whole(num_heads, num_kv_heads)))
    sinks = sink_of_each_head(num_heads).requires_grad_() if settings.pop("with_sinks", False) else None
    out, _ = _packed_attention(torch.nn.Module(), *(p[None] for p in parts), None, packed=call, s_aux=sinks, **settings)
    out = out[0].transpose(0, 1)
    (out * own_tokens(output_weights(num_heads)).detach()).sum().backward()
    return out.detach(), [part.grad for part in parts], None if sinks is None else sinks.grad


def layout():
    return PackedLayout.from_cu_seqlens(torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32), device=CPU)


def sink_of_each_head(num_heads):
    return torch.linspace(-1, 2, num_heads, dtype=torch.float64)


def output_weights(num_heads):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_heads, sum(LENGTHS), VALUE_DIM, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize(
    "settings", [{}, {"with_sinks": True, "sliding_window": 3, "scaling": 0.7}], ids=["plain", "sinks and window"]
)
def test_attention_over_ranks_and_its_gradients_are_those_of_one_rank(
    run_ranks, world_size, num_heads, num_kv_heads, settings
):
    """Trap 4. Repeated key heads collect the gradients of all copies; sinks those of their own head alone."""
    leaves = [x.requires_grad_() for x in whole(num_heads, num_kv_heads)]
    sinks = sink_of_each_head(num_heads).requires_grad_() if "with_sinks" in settings else None
    window, scaling = settings.get("sliding_window"), settings.get("scaling")
    expected = packed_attention(*leaves, layout(), scaling=scaling, window=window, sinks=sinks)
    (expected * output_weights(num_heads)).sum().backward()
    ranks = run_ranks(attend_on_ranks, world_size, num_heads, num_kv_heads, dict(settings))
    bound = 1e-12 if sinks is None else 2e-6  # scores with sinks pass through float32
    torch.testing.assert_close(torch.cat([out for out, _, _ in ranks], dim=1), expected, rtol=0, atol=bound)
    for place, leaf in enumerate(leaves):
        found = torch.cat([grads[place] for _, grads, _ in ranks], dim=1)
        torch.testing.assert_close(found, leaf.grad, rtol=0, atol=10 * bound)
    if sinks is not None:
        torch.testing.assert_close(sum(grad for *_, grad in ranks), sinks.grad, rtol=0, atol=10 * bound)


def attend_without_values(read):
    """Forward and backward on tensors that have shapes and no values."""
    ulysses = Ulysses(dist.group.WORLD)
    packed, own = PackedCall(layout(), AttentionBackend("auto", ulysses)), sum(LENGTHS) // ulysses.size
    with FakeTensorMode(allow_non_fake_inputs=True):
        parts = [torch.randn(1, heads, own, dim, requires_grad=True) for heads, dim in ((4, DIM), (1, DIM), (1, 4))]
        sinks = torch.randn(4, requires_grad=True)
        out, _ = _packed_attention(torch.nn.Module(), *parts, None, packed=packed, s_aux=sinks, sliding_window=3)
        out.sum().backward()
        read(out)


def nothing(_out):
    pass


def a_number(out):
    out.sum().item()


def a_decision(out):
    return 1 if out.sum() > 0 else 0


def a_count(out):
    out.nonzero()


def test_a_layer_waits_for_no_value_on_the_host(run_ranks):
    run_ranks(attend_without_values, 2, nothing)
    for read in (a_number, a_decision, a_count):  # as what waited for one would fail
        with pytest.raises(RankError, match=r"DataDependentOutputException|DynamicOutputShapeException"):
            run_ranks(attend_without_values, 2, read)


def own_rows():
    return Ulysses(dist.group.WORLD).own_heads(torch.arange(8)).tolist()


def test_own_heads_are_those_that_the_exchange_brings(run_ranks):
    assert run_ranks(own_rows, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def gather(own_width):
    """Every rank weights the gathered values as the whole loss does."""
    ulysses = Ulysses(dist.group.WORLD)
    mine = (torch.arange(own_width) + 10.0 * ulysses.rank).requires_grad_()
    gathered = ulysses.gather_tokens(mine)
    (gathered * torch.arange(1.0, 1 + len(gathered))).sum().backward()
    return gathered.tolist(), mine.grad.tolist()


def test_gather_tokens_is_in_the_order_of_the_ranks_and_backward_is_this_ranks_slice(run_ranks):
    """Not a sum over ranks: each computes the whole loss, and the gradient would be P times too large (trap 5)."""
    everything = [0.0, 1.0, 10.0, 11.0, 20.0, 21.0, 30.0, 31.0]
    assert run_ranks(gather, 4, 2) == [(everything, [2 * rank + 1.0, 2 * rank + 2.0]) for rank in range(4)]


def too_few_heads():
    exchange(3, 3)


def test_heads_that_ranks_do_not_divide_are_refused(run_ranks):
    with pytest.raises(RankError, match=r"engine\.ulysses_size=2 does not divide the 3 query heads of this model's"):
        run_ranks(too_few_heads, 2)
    with pytest.raises(ConfigError) as error:
        check_heads(12, 8, 16)
    assert str(error.value) == (
        "engine.ulysses_size=8 does not divide num_attention_heads=12; on 16 ranks that share one copy of the "
        "model use 1, 2 or 4"
    )
    check_heads(12, 6, 6)


def collectives_of_a_pass(folder, train):
    """How many collectives of each kind a pass over one micro-batch makes, with Ulysses and without."""
    counts = []
    for ulysses_size in (2, 1):
        config = (EngineConfig if train else FrozenEngineConfig)(ulysses_size=ulysses_size)
        optimizer = OptimizerConfig() if train else None
        engine = TrainEngine.build(Path(folder), config, device=CPU, optimizer=optimizer)
        step = pack(random_samples([6, 5, 7, 4]), num_shards=2 // ulysses_size, max_tokens=32)
        batches = step.shards[dist.get_rank() // ulysses_size]
        assert len(batches) == 1
        with CommDebugMode() as mode:
            if train:
                engine.forward_backward(batches, sft_loss, step.denominators)
            else:
                engine.forward(batches)
        counts.append({operation.__name__: count for operation, count in mode.comm_counts.items()})
    return counts


@pytest.mark.parametrize(("train", "num_passes"), [(False, 1), (True, 2)], ids=["forward", "forward and backward"])
def test_a_layer_makes_four_exchanges_and_no_other_collective(run_ranks, tmp_path, train, num_passes):
    """Counted in a model of two layers, beside the same pass without Ulysses: query, key, value and output of each
    layer, once more in backward; and, after the last layer, one gather of the logprobs."""
    folder = tiny_folder("qwen3", tmp_path)
    for counts, without in run_ranks(collectives_of_a_pass, 2, str(folder), train):
        added = {name: count - without.get(name, 0) for name, count in counts.items()}
        assert {name: count for name, count in added.items() if count} == {
            "alltoall_base_": 2 * 4 * num_passes,
            "allgather_": 1,
        }

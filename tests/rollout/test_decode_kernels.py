"""The kernels alone, against float64."""

import pytest
import torch

from shardwise.config import ConfigError
from shardwise.ops import attend
from shardwise.rollout.decode_kernels import DecodeKernels

ROWS, CAPACITY = 6, 40
PLAIN = {"scaling": None, "window": None, "chunk": None, "softcap": None, "sinks": None}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Of numbers near 1, whose last bits are 1.2e-7, 8e-3 and 1e-3."""


@pytest.fixture(scope="module")
def kernels() -> DecodeKernels:
    return DecodeKernels()


def step(
    dtype: torch.dtype, *, kv_heads: int, queries: int, dim: int, value_dim: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the model hands over, caches with room for one row more, and positions that differ from row to row."""
    draw = torch.Generator().manual_seed(kv_heads + queries + dim)
    keys, values = (
        torch.randn(ROWS + 1, kv_heads, CAPACITY, size, generator=draw).to(dtype) for size in (dim, value_dim)
    )
    new = {
        name: torch.randn(ROWS, heads, 1, size, generator=draw).to(dtype)
        for name, heads, size in (
            ("query", kv_heads * queries, dim),
            ("key", kv_heads, dim),
            ("value", kv_heads, value_dim),
        )
    }
    return new, keys, values, torch.tensor([0, CAPACITY - 1, 15, 16, 7, 33])


def expected(new, keys, values, positions, *, window, chunk, sinks, **options) -> torch.Tensor:
    """[B, H, 1, dv] float64."""
    rows = torch.arange(ROWS)
    keys, values = keys[:ROWS].double(), values[:ROWS].double()
    keys[rows, :, positions] = new["key"][:, :, 0].double()
    values[rows, :, positions] = new["value"][:, :, 0].double()
    places = torch.arange(CAPACITY)
    distance = positions[:, None] - places
    seen = (distance >= 0) & (distance < (window or CAPACITY))
    if chunk is not None:
        seen &= places // chunk == positions[:, None] // chunk
    heads, kv_heads = new["query"].shape[1], keys.shape[1]
    out = attend(
        new["query"].double().view(ROWS, kv_heads, heads // kv_heads, -1),
        keys,
        values,
        mask=seen[:, None, None],
        sinks=None if sinks is None else sinks.double().view(kv_heads, -1),
        **options,
    )
    return out.reshape(ROWS, heads, 1, -1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (96, 80), (8, 8), (24, 5)])
def test_every_row_attends_over_its_own_tokens(kernels, dtype, queries, dim, value_dim):
    new, keys, values, positions = step(dtype, kv_heads=2, queries=queries, dim=dim, value_dim=value_dim)
    wanted = expected(new, keys, values, positions, **PLAIN)
    found = kernels.attend(**new, keys=keys, values=values, positions=positions, **PLAIN)
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"scaling": 0.3},
        {"window": 1},
        {"window": 9},
        {"chunk": 8},
        {"chunk": 8, "window": 3},
        {"softcap": 1.5},
        {"sinks": torch.linspace(-2, 3, 6)},
        {"scaling": 0.7, "window": 17, "softcap": 2.0, "sinks": torch.linspace(3, -2, 6)},
    ],
    ids=lambda options: "+".join(options),
)
def test_what_families_ask_of_attention(kernels, options):
    new, keys, values, positions = step(torch.float32, kv_heads=2, queries=3, dim=20, value_dim=16)
    wanted = expected(new, keys, values, positions, **{**PLAIN, **options})
    found = kernels.attend(**new, keys=keys, values=values, positions=positions, **{**PLAIN, **options})
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=0)


def test_the_cache_gets_the_new_tokens_and_nothing_else_changes(kernels):
    new, keys, values, positions = step(torch.bfloat16, kv_heads=2, queries=2, dim=24, value_dim=16)
    wanted_keys, wanted_values, rows = keys.clone(), values.clone(), torch.arange(ROWS)
    wanted_keys[rows, :, positions] = new["key"][:, :, 0]
    wanted_values[rows, :, positions] = new["value"][:, :, 0]
    kernels.attend(**new, keys=keys, values=values, positions=positions, **PLAIN)
    assert torch.equal(keys, wanted_keys)
    assert torch.equal(values, wanted_values)


def test_a_row_gives_the_same_bits_beside_others_and_whatever_lies_behind_it(kernels):
    new, keys, values, positions = step(torch.float32, kv_heads=2, queries=3, dim=24, value_dim=16)
    together = kernels.attend(**new, keys=keys.clone(), values=values.clone(), positions=positions, **PLAIN)
    for row, position in enumerate(positions.tolist()):
        own = slice(row, row + 1)
        alone_keys, alone_values = keys[own].clone(), values[own].clone()
        alone_keys[:, :, position + 1 :] = alone_values[:, :, position + 1 :] = torch.nan
        alone = kernels.attend(
            **{name: tensor[own] for name, tensor in new.items()},
            keys=alone_keys,
            values=alone_values,
            positions=positions[own],
            **PLAIN,
        )
        assert torch.equal(alone, together[own])


def test_the_layout_of_the_models_tensors_does_not_matter(kernels):
    """Models hand over heads that lie behind tokens, and rows that are no piece of memory of their own."""
    new, keys, values, positions = step(torch.float32, kv_heads=3, queries=2, dim=24, value_dim=16)
    wanted = kernels.attend(**new, keys=keys.clone(), values=values.clone(), positions=positions, **PLAIN)
    strided = {name: torch.stack([tensor, tensor], dim=-1)[..., 0] for name, tensor in new.items()}
    assert not any(tensor.is_contiguous() for tensor in strided.values())
    assert torch.equal(kernels.attend(**strided, keys=keys, values=values, positions=positions, **PLAIN), wanted)


@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_memory_is_never_read_as_another_dtype(kernels, part):
    new, keys, values, positions = step(torch.bfloat16, kv_heads=1, queries=1, dim=16, value_dim=16)
    with pytest.raises(AssertionError, match="mixed dtypes"):
        kernels.attend(**(new | {part: new[part].float()}), keys=keys, values=values, positions=positions, **PLAIN)


@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_what_is_no_number_is_not_hidden(kernels, part):
    new, keys, values, positions = step(torch.float32, kv_heads=1, queries=1, dim=16, value_dim=16)
    new[part][2, 0, 0, 3] = torch.nan
    found = kernels.attend(**new, keys=keys, values=values, positions=positions, **PLAIN)
    assert found[2].isnan().any()
    assert not found[[0, 1, 3, 4, 5]].isnan().any()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "size", "words"), [(1, 64, 48), (4, 37, 30), (7, 5, 3), (64, 96, 257)])
def test_logits_are_exact_products_added_in_float32(kernels, dtype, rows, size, words):
    draw = torch.Generator().manual_seed(rows)
    states, weight = (torch.randn(count, size, generator=draw).to(dtype) for count in (rows, words))
    found = kernels.project(states, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), states.double() @ weight.double().T, atol=1e-5, rtol=0)
    for row in range(rows):
        assert torch.equal(kernels.project(states[row : row + 1], weight)[0], found[row])


def test_a_state_that_is_no_number_gives_logits_that_are_none(kernels):
    states, weight = torch.ones(3, 20), torch.ones(9, 20)
    states[1, 17] = torch.nan
    assert kernels.project(states, weight).isnan().any(dim=1).tolist() == [False, True, False]


def test_no_compiler_says_what_to_install():
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ConfigError, match=r"compile_decode=true needs a C\+\+ compiler on a CPU.*install g\+\+"),
    ):
        DecodeKernels()

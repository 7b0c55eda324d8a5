import math
from pathlib import Path

import pytest
import torch

from shardwise.config import ConfigError, ExportError, ModelError
from shardwise.engine.files.foreign.tensors import Piece, ShardedTensor, ShardedTensors
from shardwise.engine.files.safetensors_file import TensorSpec

WHOLE = torch.arange(35.0).reshape(7, 5)


def piece(rows, columns, value=None):
    box = (slice(*rows), slice(*columns))
    part = WHOLE[box] if value is None else torch.full_like(WHOLE[box], value)
    return Piece((rows[0], columns[0]), tuple(part.shape), lambda: part)


def tensor(*pieces):
    return ShardedTensor.of("w", TensorSpec.of(WHOLE), pieces, origin=Path("folder"))


def test_pieces_in_any_order_make_up_the_whole():
    grid = [piece((r, min(r + 3, 7)), c) for r in (0, 3, 6) for c in ((0, 2), (2, 5))]
    assert torch.equal(tensor(*reversed(grid)).read(), WHOLE)
    assert torch.equal(tensor(piece((0, 7), (0, 5))).read(), WHOLE)


def test_of_replicas_the_first_is_taken_and_empty_shards_are_left_out():
    found = tensor(piece((0, 4), (0, 5)), piece((4, 7), (0, 5)), piece((0, 4), (0, 5), value=9), piece((7, 7), (0, 5)))
    assert len(found.pieces) == 2
    assert torch.equal(found.read(), WHOLE)


@pytest.mark.parametrize(
    "pieces",
    [
        [piece((0, 4), (0, 5))],
        [piece((0, 4), (0, 5)), piece((3, 7), (0, 5))],
        [piece((0, 4), (0, 5)), piece((3, 6), (0, 5))],
        [
            piece((0, 4), (0, 3)),
            piece((0, 4), (3, 5)),
            piece((4, 7), (0, 4)),
            piece((5, 7), (3, 4)),
            piece((0, 1), (1, 2)),
        ],
    ],
    ids=["a hole", "too much", "a hole and an overlap", "an overlap in a row"],
)
def test_pieces_that_do_not_make_up_the_tensor_are_refused(pieces):
    with pytest.raises(ModelError, match=r"^folder: the ranks hold \d+ of the 35 elements of w \[7, 5\], or some of"):
        tensor(*pieces)


def test_a_scalar_is_one_piece():
    one = Piece((), (), lambda: torch.tensor(3.0))
    found = ShardedTensor.of("step", TensorSpec(torch.float32, ()), [one, one], origin=Path("folder"))
    assert found.read().item() == 3


def names(*given):
    return ShardedTensors(Path("folder"), dict.fromkeys(given, tensor(piece((0, 7), (0, 5)))))


def test_the_prefix_is_what_stands_before_most_of_the_names():
    wanted = {"model.a.w", "model.b.w", "lm_head.w"}
    assert names("model.a.w", "model.b.w").prefix_of(wanted) == ""
    assert names("app.model.model.a.w", "app.model.lm_head.w", "x.lm_head.w").prefix_of(wanted) == "app.model."
    assert names("o.state.model.a.w.exp_avg", "model.a.w").prefix_of(wanted, suffix=".exp_avg") == "o.state."
    assert names("c", "a.w").prefix_of(wanted) is None
    with pytest.raises(
        ConfigError, match=r"folder holds 2 models that fit config.json, under 'x\.', 'y\.'; .*--prefix"
    ):
        names("x.model.a.w", "y.model.a.w").prefix_of(wanted)
    assert list(names("x.a.w", "y.b").under("x.").tensors) == ["a.w"]


def sharded(**values):
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    pieces = {name: Piece((0,), tuple(value.shape), lambda value=value: value) for name, value in tensors.items()}
    return ShardedTensors(
        Path("folder"),
        {n: ShardedTensor.of(n, TensorSpec.of(t), [pieces[n]], origin=Path("folder")) for n, t in tensors.items()},
    )


@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e39])
def test_numbers_that_are_none_in_a_dtype_are_refused_when_they_are_read(value):
    found = sharded(good=[1.0, 3e38], bad=[1.0, value])
    finite = found.finite_in(torch.float32)
    assert finite.specs == found.specs
    assert torch.equal(finite.read("good"), found.read("good"))
    with pytest.raises(ExportError, match=r"^bad holds NaN or infinities as float32: "):
        finite.read("bad")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("app.model", "app.model."), ("app.model.", "app.model."), ("app.mod", "app.mod"), ("", ""), ("a_", "a_")],
)
def test_a_prefix_gets_its_last_dot_where_names_begin_so(given, meant):
    found = sharded(**{"app.model.norm": [1.0], "app.model_ema.norm": [1.0], "a_model.norm": [1.0]})
    assert found.meant_prefix(given) == meant

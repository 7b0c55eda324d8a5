import ast
import io
import json
import math
import pickle
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import shardwise.codec as codec
from shardwise.codec import decode, encode
from shardwise.types import (
    Completion,
    Denominators,
    Example,
    GenerateRequest,
    MetricValue,
    RolloutGroup,
    Sample,
    SampledSpan,
    TokenBatch,
    TokenOutputs,
)

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def same(left, right) -> bool:
    """Equal to the last bit, with NaN equal to NaN, 0.0 unlike -0.0, 1 unlike 1.0 and True; tuples came as lists."""
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and left.contiguous().view(-1).view(torch.uint8).tolist() == right.view(-1).view(torch.uint8).tolist()
        )
    if isinstance(left, (list, tuple)):
        return (
            type(right) is list
            and len(left) == len(right)
            and all(same(a, b) for a, b in zip(left, right, strict=True))
        )
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, float) and math.isnan(left):
        return isinstance(right, float) and math.isnan(right)
    if isinstance(left, float):
        return type(right) is float and left == right and math.copysign(1, left) == math.copysign(1, right)
    if hasattr(left, "__dataclass_fields__"):
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name)) for name in left.__dataclass_fields__
        )
    return type(left) is type(right) and left == right


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    if dtype == torch.bool:
        raw = raw % 2
    tensor = raw.view(dtype).view(shape)
    return tensor.transpose(0, 1) if len(shape) > 1 and draw(st.booleans()) else tensor


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | tensors()
long_lists = (
    st.lists(st.integers(), min_size=33, max_size=40)
    | st.lists(st.integers(0, 2**63 - 1), min_size=33, max_size=40)
    | st.lists(st.floats(), min_size=33, max_size=40)
    | st.lists(st.integers() | st.floats() | st.booleans(), min_size=33, max_size=40)
)
keys = st.text().filter(lambda key: not key.startswith("$"))
values = st.recursive(
    leaves | long_lists,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=4)
        | st.builds(MetricValue, st.sampled_from(["sum", "mean", "max"]), inner, inner)
    ),
    max_leaves=12,
)


@given(values)
@settings(max_examples=300, deadline=None)
def test_any_supported_value_comes_back_to_the_last_bit(value):
    assert same(value, decode(encode(value)))


L, B = torch.tensor([5, 9, 2]), torch.tensor([False, True, True])
F = torch.tensor([0.0, -0.5, float("-inf")])
NOUNS = [
    Example(uid="a:1", prompt_ids=list(range(100)), prompt="2+3=", data_source="s", ground_truth={"x": [1, None]}),
    GenerateRequest(uid="é", prompt_ids=[1], max_tokens=3, temperature=0.5),
    Completion(
        token_ids=list(range(50)),
        logprobs=[-0.1] * 50,
        finish_reason="stop",
        policy_version=3,
        spans=[SampledSpan(start=0, end=50, digest=2**64 - 1)],
    ),
    Sample(uid="a", token_ids=L, loss_mask=B, advantages=F, reward=float("nan")),
    TokenBatch(
        input_ids=L,
        position_ids=torch.arange(3),
        cu_seqlens=torch.tensor([0, 3], dtype=torch.int32),
        loss_mask=B,
        sample_index=[],
        ref_logprobs=F,
    ),
    TokenOutputs(logprobs=F, entropy=torch.zeros(0)),
    Denominators(num_tokens=2**40, num_sequences=0),
    MetricValue.mean(torch.tensor(2.5, dtype=torch.float64), 3),
]


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: type(noun).__name__)
def test_every_noun_of_a_run_comes_back(noun):
    assert same(noun, decode(encode(noun)))
    group = RolloutGroup(
        example=NOUNS[0],
        completions=[NOUNS[2]],
        texts=["5"],
        answers=["5"],
        rewards=[1.0],
        reward_parts=[{"acc": 1.0}],
        failures=[None],
    )
    assert same({"groups": [group, noun]}, decode(encode({"groups": [group, noun]})))


class Point:
    x = 1


class Completion2(MetricValue):
    """A class that is not ours, however it is called."""


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Point(), "Point"),
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (1j, "complex"),
        (torch.float32, "dtype"),
        (Path("/"), "Path"),
        (print, "builtin_function_or_method"),
        (Completion2("sum", 1.0), "Completion2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [1, {"key": (v,)}]], ids=["bare", "nested"])
def test_other_values_are_refused_by_name(value, name, wrap):
    with pytest.raises(TypeError, match=f"cannot send a .*{name}"):
        encode(wrap(value))


@pytest.mark.parametrize("key", [1, None, "$tensor", "$"])
def test_dicts_with_other_keys_are_refused(key):
    with pytest.raises(TypeError, match="cannot send a dict with the key"):
        encode({"fine": 1, key: 2})


def test_long_lists_travel_as_raw_numbers():
    """8 bytes a number and a short header, not digits."""
    tokens, logprobs = list(range(100_000, 101_000)), [-1 / (i + 1) for i in range(1000)]
    assert len(encode([tokens, logprobs])) < 2 * 8000 + 200


def test_decoded_tensors_own_their_memory():
    message = encode(torch.arange(4))
    decoded = decode(message)
    message.zero_()
    assert decoded.tolist() == [0, 1, 2, 3]


class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was executed')",))


def test_bytes_of_a_pickle_are_plain_data():
    """The pickle would raise if anything loaded it."""
    payload = pickle.dumps(Bomb())
    with pytest.raises(SystemExit):
        pickle.loads(payload)
    as_text, as_tensor = payload.decode("latin-1"), torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    decoded = decode(encode({"text": as_text, "tensor": as_tensor}))
    assert decoded["text"] == as_text
    assert bytes(decoded["tensor"].tolist()) == payload


def test_a_message_that_is_a_pickle_is_refused_and_not_executed():
    raw = io.BytesIO()
    torch.save({"x": Bomb()}, raw)
    for payload in (pickle.dumps(Bomb()), raw.getvalue()):
        framed = torch.cat(
            [torch.tensor([len(payload)]).view(torch.uint8), torch.frombuffer(bytearray(payload), dtype=torch.uint8)]
        )
        with pytest.raises((json.JSONDecodeError, UnicodeDecodeError)):
            decode(framed)


def test_neither_codec_nor_controller_imports_pickle():
    loaders = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    file = Path(codec.__file__)
    for path in [file, *file.with_name("controller").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not loaders & {name.split(".")[0] for name in names}, f"{path.name} line {node.lineno}"
            if isinstance(node, ast.Attribute):  # collectives and loaders that pickle inside
                assert not node.attr.endswith(("_object", "_object_list")), path.name
                assert node.attr not in {"save", "load"} or ast.unparse(node.value) == "json", path.name

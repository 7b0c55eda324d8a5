import json
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, tiny_folder
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, BertConfig, GPT2Config, T5Config

from shardwise.config import EngineConfig, ModelError
from shardwise.engine import ParallelDims
from shardwise.engine.model import build_on_meta, build_sharded, initialize_buffers


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return tiny_folder(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initialized_buffers_equal_those_of_from_pretrained(folder, dtype):
    """Rotary frequencies and Gemma's embedding scale, in the same dtypes; parameters stay as they are."""
    model = build_on_meta(folder, dtype)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7.0)
    initialize_buffers(model)
    expected = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).named_buffers())
    buffers = dict(model.named_buffers())
    assert buffers.keys() == expected.keys()
    assert len(buffers) >= 2
    for name, buffer in buffers.items():
        assert buffer.dtype == expected[name].dtype, name
        assert torch.equal(buffer, expected[name]), name
    assert all((parameter == 7.0).all() for parameter in model.parameters())


def describe(folder, trainable, engine_config):
    config = EngineConfig(**engine_config)
    mesh = ParallelDims.from_sizes(world_size=2, fsdp_size=config.fsdp_size, ulysses_size=1).build("cpu").fsdp
    model, _ = build_sharded(Path(folder), config, mesh, device=torch.device("cpu"), trainable=trainable)
    units = [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]
    rows = {name: (p.shape[0], p.to_local().shape[0]) for name, p in model.named_parameters()}
    return units, rows, {p.dtype for p in model.parameters()}, {p.requires_grad for p in model.parameters()}


def test_every_layer_and_the_root_are_units_and_every_parameter_is_sharded(run_ranks, folder):
    first, second = run_ranks(describe, 2, str(folder), True, {"param_dtype": "bfloat16"})
    assert first[0] == ["", "causal_lm.model.layers.0", "causal_lm.model.layers.1"]
    for name, (whole, local) in first[1].items():
        assert local == -(-whole // 2), name
        assert second[1][name][1] == whole - local, name
    assert first[2:] == ({torch.float32}, {True})


def test_frozen_model_is_held_in_the_compute_dtype(run_ranks, folder):
    for _, _, dtypes, requires_grad in run_ranks(describe, 2, str(folder), False, {"param_dtype": "bfloat16"}):
        assert (dtypes, requires_grad) == ({torch.bfloat16}, {False})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be built as a causal language model"),
        (json.dumps({"model_type": "no-such-model"}), "cannot be built as a causal language model"),
        (T5Config(num_layers=1).to_json_string(), "cannot be built as a causal language model"),
        (BertConfig(num_hidden_layers=1, is_decoder=True).to_json_string(), "bias on its output projection"),
        (GPT2Config(n_layer=1).to_json_string(), r"dropout.*transformer\.drop=0\.1, .*set it to 0"),
    ],
    ids=["broken", "unknown", "encoder-decoder", "projection-bias", "dropout"],
)
def test_models_that_cannot_be_trained_are_refused(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        build_on_meta(tmp_path, torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_dropout_is_refused_before_the_first_step(tmp_path, family):
    tiny_folder(family, tmp_path, attention_dropout=0.1)
    with pytest.raises(ModelError, match=r"attention_dropout=0\.1 is active\); set it to 0 in config\.json$"):
        build_on_meta(tmp_path, torch.float32)

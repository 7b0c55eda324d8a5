"""Tensors of other trainers written as a folder; how they are read is tested in foreign/."""

from pathlib import Path

import pytest
import torch
from foreign_checkpoints import in_halves
from ranks import RankError
from safetensors.torch import load_file
from tiny_models import tiny_folder, tiny_model

from shardwise.config import ModelError
from shardwise.engine.files.foreign.tensors import Piece
from shardwise.engine.files.importing import RuntimeWeights, import_weights
from shardwise.engine.files.rewrite_folder import on_meta


class NoTokenizer:
    def save_pretrained(self, folder):
        pass


def stored(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def write(config_folder, target, dtype, names_of, max_shard_size):
    dtype = getattr(torch, dtype)
    source = stored(Path(config_folder)) if names_of == "hub" else tiny_model(names_of).state_dict()
    log = []
    model = on_meta(Path(config_folder), dtype)
    import_weights(model, in_halves(source, log), NoTokenizer(), Path(target), dtype, max_shard_size=max_shard_size)
    return log


@pytest.mark.parametrize(
    ("family", "names"),
    [("qwen3", "runtime"), ("llama", "runtime"), ("qwen3_moe", "runtime"), ("qwen3_moe", "hub"), ("mixtral", "hub")],
)
def test_the_files_are_those_that_transformers_saves(run_ranks, tmp_path, family, names):
    """Under runtime names experts are fused and a tied projection is there twice; under hub names neither."""
    source = tiny_folder(family, tmp_path / "source")
    names_of = "hub" if names == "hub" else family
    log = run_ranks(write, 1, str(source), str(tmp_path / "out"), "bfloat16", names_of, "8KB")[0]
    tiny_model(family).to(torch.bfloat16).save_pretrained(tmp_path / "expected", max_shard_size="8KB")
    expected = sorted(path.name for path in (tmp_path / "expected").glob("model*"))
    assert len(expected) > 2
    assert sorted(path.name for path in (tmp_path / "out").glob("model*")) == expected
    for name in expected:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes(), name
    assert len(log) == len(set(log)), "a tensor was read twice"


def test_a_tied_copy_that_differs_is_refused(tmp_path):
    folder = tiny_folder("qwen3", tmp_path / "source")
    tensors = dict(tiny_model("qwen3").state_dict())
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 1.5
    weights = RuntimeWeights(on_meta(folder, torch.float32), in_halves(tensors))
    with pytest.raises(ModelError, match=r"source holds a lm_head\.weight that differs from model\.embed_tokens"):
        weights["model.embed_tokens.weight"]


@pytest.fixture
def llama(tmp_path):
    folder = tiny_folder("llama", tmp_path / "source")
    return on_meta(folder, torch.float32), tiny_model("llama").state_dict()


def test_what_does_not_fit_is_listed(llama):
    model, tensors = llama
    tensors["model.extra.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    with pytest.raises(ModelError) as error:
        RuntimeWeights(model, in_halves(tensors))
    assert str(error.value) == (
        "source does not fit its config.json (LlamaForCausalLM): 1 tensor is missing (model.layers.1.mlp.up_proj."
        "weight); 1 tensor is of the wrong shape (model.norm.weight is [29], expected [30]); 1 tensor is not part "
        "of the model (model.extra.weight). Take the config.json that was saved with these weights"
    )


def fail_midway(config_folder, target):
    tensors = in_halves(tiny_model("llama").state_dict())

    def read():
        raise ModelError("source/f.pt is damaged")

    broken = tensors.tensors["model.norm.weight"]
    broken.pieces[0] = Piece(broken.pieces[0].offsets, broken.pieces[0].sizes, read)
    model = on_meta(Path(config_folder), torch.float32)
    import_weights(model, tensors, NoTokenizer(), Path(target), torch.float32, max_shard_size="8KB")


def test_a_source_that_turns_out_damaged_leaves_nothing_behind(run_ranks, tmp_path):
    source = tiny_folder("llama", tmp_path / "source")
    with pytest.raises(RankError, match=r"ModelError: source/f\.pt is damaged"):
        run_ranks(fail_midway, 1, str(source), str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]

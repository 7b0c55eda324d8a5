import json
from pathlib import Path

import pytest
import torch
from family_table import FAMILIES as FAMILY_TABLE
from family_table import save_model
from ranks import RankError
from tiny_models import FAMILIES, random_samples, tiny_folder
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    CLIPConfig,
    GenerationConfig,
    GPT2Config,
    Qwen3MoeConfig,
    RobertaConfig,
    T5Config,
)

from shardwise.config import ConfigError, EngineConfig, FrozenEngineConfig, ModelError
from shardwise.data.packing import pack
from shardwise.engine import ParallelDims, TrainEngine
from shardwise.engine.heads import make_head
from shardwise.engine.model import ScoringModel, build_on_meta, build_sharded, materialize

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return tiny_folder(request.param, tmp_path_factory.mktemp(request.param))


def test_materialized_buffers_equal_those_of_from_pretrained(folder, monkeypatch):
    """Rotary frequencies and Gemma's embedding scale, in the same dtypes; parameters stay as they are."""
    hf_model = build_on_meta(folder)
    assert all(tensor.is_meta for tensor in (*hf_model.parameters(), *hf_model.buffers()))
    model = ScoringModel(hf_model, make_head(hf_model, "logprobs"))
    to_empty = torch.nn.Module.to_empty

    def to_sevens(module, **options):
        with torch.no_grad():
            for tensor in (*to_empty(module, **options).parameters(), *module.buffers()):
                tensor.fill_(7.0)

    monkeypatch.setattr(torch.nn.Module, "to_empty", to_sevens)
    materialize(model, CPU, params_on_host=False)
    expected = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_buffers())
    buffers = dict(hf_model.named_buffers())
    assert buffers.keys() == expected.keys()
    assert len(buffers) >= 2
    for name, buffer in buffers.items():
        assert buffer.dtype == expected[name].dtype, name
        assert torch.equal(buffer, expected[name]), name
    assert all((parameter == 7.0).all() for parameter in model.parameters())


def describe(folder, config):
    mesh = ParallelDims.from_sizes(world_size=2, fsdp_size=config.fsdp_size, ulysses_size=1).build("cpu")
    sharded, _ = build_sharded(Path(folder), config, mesh, device=CPU)
    model = sharded.model
    units = [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]
    assert sharded.units == [*(model.get_submodule(name) for name in units[1:]), model]
    rows = {name: (p.shape[0], p.to_local().shape[0]) for name, p in model.named_parameters()}
    return units, rows, {p.dtype for p in model.parameters()}, {p.requires_grad for p in model.parameters()}


def test_every_layer_and_the_root_are_units_and_every_parameter_is_sharded(run_ranks, folder):
    first, second = run_ranks(describe, 2, str(folder), EngineConfig(param_dtype="bfloat16"))
    assert first[0] == ["", "hf_model.model.layers.0", "hf_model.model.layers.1"]
    for name, (whole, local) in first[1].items():
        assert local == -(-whole // 2), name
        assert second[1][name][1] == whole - local, name
    assert first[2:] == ({torch.float32}, {True})


def test_frozen_model_is_held_in_the_compute_dtype(run_ranks, folder):
    for _, _, dtypes, requires_grad in run_ranks(describe, 2, str(folder), FrozenEngineConfig(param_dtype="bfloat16")):
        assert (dtypes, requires_grad) == ({torch.bfloat16}, {False})


class TwiceInOneLayer(torch.nn.Module):
    """A layer that attends twice: its first attention's output is thrown away."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, **inputs):
        self.attention(**inputs)
        return self.attention(**inputs)


def score_with_a_layer_that_attends_twice(folder):
    engine = TrainEngine.build(Path(folder), FrozenEngineConfig(), device=CPU)
    layer = engine._model.hf_model.model.layers[1]
    layer.self_attn = TwiceInOneLayer(layer.self_attn)
    engine.forward(pack(random_samples([5, 3]), num_shards=1, max_tokens=8).shards[0])


def test_number_of_attention_calls_is_checked_in_every_forward(run_ranks, folder):
    with pytest.raises(
        RankError, match=r"ForCausalLM is not supported: its 2 layers called the packed attention 3 times instead of"
    ):
        run_ranks(score_with_a_layer_that_attends_twice, 1, str(folder))


def test_what_is_not_saved_again_needs_no_generation_config_that_could_be(tmp_path):
    """As many folders have it: a temperature without do_sample."""
    folder = tiny_folder("qwen3", tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    assert build_on_meta(folder, is_saved_again=False).config.model_type == "qwen3"
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read, or not be saved again as it is"):
        build_on_meta(folder)


def test_experts_implementation_needs_experts(tmp_path):
    with pytest.raises(ConfigError) as error:
        build_on_meta(tiny_folder("qwen3", tmp_path), experts_implementation="eager")
    assert str(error.value) == (
        "engine.experts_implementation=eager has no effect on Qwen3ForCausalLM, which has no experts that can be "
        "computed in several ways; remove it"
    )


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_experts_implementation_reaches_the_config_that_the_experts_read(tmp_path, implementation):
    Qwen3MoeConfig(num_hidden_layers=1, hidden_size=32, num_experts=2, vocab_size=32, head_dim=8).save_pretrained(
        tmp_path
    )
    model = build_on_meta(tmp_path, experts_implementation=implementation)
    assert model.model.layers[0].mlp.experts.config._experts_implementation == implementation


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_experts_of_a_language_model_alone_are_set_there(tmp_path, implementation):
    """The class around it refuses what its language model computes by default."""
    save_model("kimi_k25", FAMILY_TABLE["kimi_k25"], tmp_path)
    model = build_on_meta(tmp_path, experts_implementation=implementation)
    experts = [part for name, part in model.named_modules() if name.endswith("mlp.experts")]
    assert {part.config._experts_implementation for part in experts} == {implementation}


QWEN3 = {"model_type": "qwen3", "num_hidden_layers": 1, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"config\.json is not a model config: OSError: "),
        (json.dumps({"model_type": "no-such-model"}), r"config\.json is not a model config: [^\n]+model_type=no-such"),
        (T5Config(num_layers=1).to_json_string(), r"for CausalLM; look into its config\.json\. ValueError: "),
        (QWEN3 | {"num_attention_heads": 4, "num_key_value_heads": 3},
         r"num_key_value_heads=3 does not divide num_attention_heads=4; correct its config\.json"),
        (QWEN3 | {"num_attention_heads": 0}, "num_key_value_heads=2 does not divide num_attention_heads=0"),
        (QWEN3 | {"hidden_act": "swoosh"}, r"config\.json\. hidden_act=swoosh is not known to transformers$"),
        (QWEN3 | {"num_hidden_layers": "two"}, r"config\.json is not a model config: \w+: .*num_hidden_layers"),
        (BertConfig(num_hidden_layers=1, is_decoder=True).to_json_string(), "bias on its output projection"),
        (GPT2Config(n_layer=1).to_json_string(), r"dropout.*transformer\.drop=0\.1, .*set it to 0"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_trained_are_refused(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ModelError, match=message):
        build_on_meta(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            RobertaConfig(num_hidden_layers=1, is_decoder=True),
            "RobertaForSequenceClassification is not supported: it has no layer called score or classifier as its head",
        ),
        (CLIPConfig(), r"cannot be built as a model for SequenceClassification; .* ValueError: Unrecognized config"),
    ],
    ids=["of several layers", "no language model"],
)
def test_families_without_a_value_head_are_refused(tmp_path, config, message):
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        build_on_meta(tmp_path, "sequence_scores")


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_dropout_is_refused_before_the_first_step(tmp_path, family):
    tiny_folder(family, tmp_path, attention_dropout=0.1)
    with pytest.raises(ModelError, match=r"attention_dropout=0\.1 is active\); set it to 0 in config\.json$"):
        build_on_meta(tmp_path)


def test_dropout_of_what_no_word_reaches_is_no_hindrance(tmp_path):
    """Granite Vision's projector has some as it is published."""
    options = FAMILY_TABLE["granite4_vision"]
    save_model("granite4_vision", options, tmp_path)
    model = build_on_meta(tmp_path)
    assert model.model.layerwise_projectors[0].dropout.p == 0.1
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["attention_dropout"] = 0.1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"\(attention_dropout=0\.1 is active\)"):
        build_on_meta(tmp_path)


class Block(torch.nn.Module):
    """One whose family sets its parts from here, as Qwen3-Omni does the experts of a block."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2))  # wrapped since


def test_modules_without_buffers_are_not_initialised(folder, monkeypatch):
    """transformers would look for weights where they were before something was wrapped around them."""
    hf_model = build_on_meta(folder)
    with torch.device("meta"):
        hf_model.block = Block()
    initialise, seen = type(hf_model)._init_weights, []

    def init_weights(model, module):
        seen.append(type(module))
        if isinstance(module, Block):
            assert module.inner.weight is not None
        initialise(model, module)

    monkeypatch.setattr(type(hf_model), "_init_weights", init_weights)
    materialize(ScoringModel(hf_model, make_head(hf_model, "logprobs")), CPU, params_on_host=False)
    assert Block not in seen
    assert seen


def test_the_generation_config_beside_the_model_is_kept(tmp_path):
    """Qwen's holds two tokens that end a completion; config.json knows one of them."""
    folder = tiny_folder("qwen3", tmp_path)
    GenerationConfig(eos_token_id=[1, 7]).save_pretrained(folder)
    assert build_on_meta(folder).generation_config.eos_token_id == [1, 7]


@pytest.mark.parametrize("head", ["token_values", "sequence_scores"])
def test_what_does_not_generate_has_no_generation_config(tmp_path, head):
    folder = tiny_folder("qwen3", tmp_path)
    GenerationConfig(eos_token_id=[1, 7]).save_pretrained(folder)
    assert not hasattr(build_on_meta(folder, head), "generation_config")


def test_a_generation_config_that_could_not_be_saved_again_is_refused_at_once(tmp_path):
    folder = tiny_folder("qwen3", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read, or not .*do_sample"):
        build_on_meta(folder)


def test_a_generation_config_that_cannot_be_read_is_refused(tmp_path):
    folder = tiny_folder("qwen3", tmp_path)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read, or not be saved again as it is"):
        build_on_meta(folder)

"""A folder in, a folder out, over ranks; the command around it is tested with the recipes."""

import json
from pathlib import Path

import pytest
import torch
from family_table import FAMILIES as FAMILY_TABLE
from family_table import random_model, save_model
from ranks import RankError
from safetensors.torch import load_file
from tiny_models import tiny_folder, tiny_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from shardwise.engine.files.rewrite_folder import rewrite_folder
from shardwise.engine.model_classes import model_from_config


class NoTokenizer:
    pad_token_id = eos_token_id = None

    def save_pretrained(self, folder):
        pass


def convert(source, target, dtype, max_shard_size, adapter):
    rewrite_folder(
        Path(source),
        Path(target),
        NoTokenizer(),
        getattr(torch, dtype),
        max_shard_size=max_shard_size,
        device=torch.device("cpu"),
        adapter=None if adapter is None else Path(adapter),
    )


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_converted_folder_is_what_transformers_saves_in_the_other_dtype(run_ranks, tmp_path, family, world_size):
    source = tiny_folder(family, tmp_path / "source")
    run_ranks(convert, world_size, str(source), str(tmp_path / "out"), "bfloat16", "8KB", None)
    tiny_model(family).to(torch.bfloat16).save_pretrained(tmp_path / "expected", max_shard_size="8KB")
    names = sorted(path.name for path in (tmp_path / "expected").glob("model*"))
    assert len(names) > 2
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes(), name


def test_a_router_bias_that_its_class_builds_in_float32_stays_so(run_ranks, tmp_path):
    save_model("lfm2_moe", FAMILY_TABLE["lfm2_moe"], tmp_path / "source")
    run_ranks(convert, 1, str(tmp_path / "source"), str(tmp_path / "out"), "bfloat16", "1GB", None)
    AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.bfloat16).save_pretrained(tmp_path / "saved")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "saved"))
    assert found["model.layers.1.feed_forward.expert_bias"].dtype == torch.float32
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_how_weights_were_packed_is_not_said_of_plain_ones(run_ranks, tmp_path):
    """Folders that a script has unpacked often say it still; bitsandbytes and FP8 kernels would pack them again."""
    source = tiny_folder("llama", tmp_path / "source") / "config.json"
    packed = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    source.write_text(json.dumps(json.loads(source.read_text()) | {"quantization_config": packed}))
    run_ranks(convert, 1, str(source.parent), str(tmp_path / "out"), "float32", "1GB", None)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(
        loaded.model.layers[0].mlp.up_proj.weight, tiny_model("llama").model.layers[0].mlp.up_proj.weight
    )


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_buffer_may_be_infinite_and_no_nan(run_ranks, tmp_path, value):
    """Such as the bounds of Gemma 4's audio tower, until somebody has measured what they should be."""
    model = random_model("gemma4", FAMILY_TABLE["gemma4"])
    bounds = {name: buffer for name, buffer in model.named_buffers() if name.endswith(("_min", "_max"))}
    for bound in bounds.values():
        bound.fill_(value)
    model.save_pretrained(tmp_path / "source")
    names = {name for name in load_file(tmp_path / "source" / "model.safetensors") if name in bounds}
    assert len(names) > 4
    if value == float("inf"):
        run_ranks(convert, 2, str(tmp_path / "source"), str(tmp_path / "out"), "float32", "1GB", None)
        found = load_file(tmp_path / "out" / "model.safetensors")
        assert all(found[name].isinf().all() for name in names)
    else:
        with pytest.raises(RankError, match=r"put_m(in|ax) holds NaN or infinities, so nothing could be computed"):
            run_ranks(convert, 2, str(tmp_path / "source"), str(tmp_path / "out"), "float32", "1GB", None)


def test_a_critic_of_a_family_without_such_a_class_is_converted_with_its_code(run_ranks, tmp_path):
    config = tiny_model("granite").config
    config.num_labels = 1
    critic = model_from_config(config, "token_values", dtype=torch.float32)
    critic.save_pretrained(tmp_path / "source")
    run_ranks(convert, 1, str(tmp_path / "source"), str(tmp_path / "out"), "bfloat16", "8KB", None)
    found = AutoModelForTokenClassification.from_pretrained(tmp_path / "out", trust_remote_code=True, dtype="auto")
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.state_dict(), critic.to(torch.bfloat16).state_dict(), rtol=0, atol=0)


@pytest.fixture
def adapter(tmp_path):
    """Of peft, with weights that are not zero and a module trained whole."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(tiny_model("llama"), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_adapter_is_merged_as_peft_merges_it_and_the_index_counts_the_merged_model(
    run_ranks, tmp_path, adapter, world_size
):
    from peft import PeftModel

    source = tiny_folder("llama", tmp_path / "source")
    run_ranks(convert, world_size, str(source), str(tmp_path / "out"), "float32", "20KB", str(adapter))
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=0, atol=1e-6)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == found.num_parameters()


@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": r".*self_attn\.(q|v)_proj"},
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
        {"target_modules": r".*\.0\.self_attn\.q_proj", "target_parameters": ["mlp.experts.down_proj"]},
    ],
    ids=["a pattern", "some layers", "a pattern beside experts"],
)
def test_an_adapter_whose_modules_peft_finds_in_another_way_is_merged(run_ranks, tmp_path, targets):
    from peft import LoraConfig, PeftModel, get_peft_model

    family = "qwen3_moe" if "target_parameters" in targets else "llama"
    model = get_peft_model(tiny_model(family), LoraConfig(r=3, lora_alpha=12, **targets))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    model.save_pretrained(tmp_path / "adapter")
    source = tiny_folder(family, tmp_path / "source")
    run_ranks(convert, 1, str(source), str(tmp_path / "out"), "float32", "1GB", str(tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    assert sum(not torch.equal(tensor, plain[name]) for name, tensor in found.items()) >= 2


def test_a_folder_without_an_adapter_is_refused(run_ranks, tmp_path):
    source = tiny_folder("llama", tmp_path / "source")
    with pytest.raises(RankError, match=r"ModelError: .*source cannot be read as a LoRA adapter"):
        run_ranks(convert, 2, str(source), str(tmp_path / "out"), "float32", "20KB", str(source))


@pytest.mark.parametrize(
    ("task_type", "auto_class"),
    [("TOKEN_CLS", AutoModelForTokenClassification), ("SEQ_CLS", AutoModelForSequenceClassification)],
)
def test_an_adapter_with_its_head_is_merged_as_peft_merges_it_on_a_language_model(
    run_ranks, tmp_path, task_type, auto_class
):
    """As peft writes it, which names layers in modules_to_save that no model of this family has."""
    from peft import LoraConfig, PeftModel, get_peft_model

    source = tiny_folder("llama", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"pad_token_id": 3}))
    torch.manual_seed(0)
    head = auto_class.from_pretrained(source, num_labels=1, dtype=torch.float32)
    model = get_peft_model(head, LoraConfig(task_type=task_type, r=3, target_modules=["q_proj"]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)
    model.save_pretrained(tmp_path / "adapter")
    assert model.peft_config["default"].modules_to_save == ["classifier", "score"]
    run_ranks(convert, 2, str(source), str(tmp_path / "out"), "float32", "20KB", str(tmp_path / "adapter"))
    base = auto_class.from_pretrained(source, num_labels=1, dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    found = auto_class.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert (found.config.num_labels, found.config.pad_token_id) == (1, 3)  # the tokenizer here has none
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=1e-6)

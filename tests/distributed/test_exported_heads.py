"""Reward models and critics that were trained and exported: transformers loads the folder as its own classifier, which
gives the values that the engine gave, and so does a frozen engine. Of a family without such a class (granite) too."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import FAMILIES, families, random_samples, tiny_folder, tiny_vision_model
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from shardwise.config import EngineConfig, FrozenEngineConfig, ModelError, OptimizerConfig
from shardwise.data.packing import pack, unpack
from shardwise.data.synthetic import train_tokenizer
from shardwise.engine import TrainEngine

CPU = torch.device("cpu")
PAD = 0
CLASSES = {"token_values": AutoModelForTokenClassification, "sequence_scores": AutoModelForSequenceClassification}
HEADED = (*FAMILIES, "granite")


def samples():
    """Of many lengths; the third ends in padding, the fourth holds some inside, the fifth is nothing else."""
    found = random_samples([9, 4, 7, 8, 2, 12], prompt_tokens=2)
    for index, tokens in ((2, [5, 9, 7, 4, 8, PAD, PAD]), (3, [5, 9, PAD, 4, PAD, PAD, 7, 6]), (4, [PAD, PAD])):
        found[index] = replace(found[index], token_ids=torch.tensor(tokens))
    return found


def values_of(engine, num_sharing):
    step = pack(samples(), num_shards=dist.get_world_size() // num_sharing, max_tokens=20)
    own = [out.values for out in engine.forward(step.shards[dist.get_rank() // num_sharing])]
    shards = [None] * dist.get_world_size()
    dist.all_gather_object(shards, own)
    return unpack(step, shards[::num_sharing])


def push_up(outputs, batch, denominators):
    """Moves every weight: the head's by much, the backbone's by little."""
    return -outputs.values.sum() / denominators.num_sequences, {}


def train_and_export(folder, out, head, keys):
    """Two steps from a fresh or saved head. Returns the values of every sample after them."""
    engine = TrainEngine.build(
        Path(folder),
        EngineConfig(**keys),
        device=CPU,
        optimizer=OptimizerConfig(learning_rate=0.02),
        head=head,
        pad_token_id=PAD,
    )
    num_sharing = keys.get("ulysses_size", 1)
    step = pack(samples(), num_shards=dist.get_world_size() // num_sharing, max_tokens=20)
    for _ in range(2):
        engine.forward_backward(step.shards[dist.get_rank() // num_sharing], push_up, step.denominators)
        engine.optim_step()
    engine.export_hf(Path(out), train_tokenizer(["2+3=5"], vocab_size=261))
    if "lora" in keys:
        engine.export_adapter(Path(out) / "adapter", str(folder))
    return values_of(engine, num_sharing)


def freeze_and_score(folder, head):
    return values_of(TrainEngine.build(Path(folder), FrozenEngineConfig(), device=CPU, head=head), 1)


def classified(folder, head, dtype=torch.float32):
    """[L] of every sample by transformers, all of them in one batch padded at the right, laid out as the engine's."""
    model = CLASSES[head].from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        trust_remote_code=(Path(folder) / "modeling_head.py").is_file(),
    )
    return values_by(model.eval(), head)


@torch.no_grad()
def values_by(model, head):
    found = samples()
    width = max(len(sample.token_ids) for sample in found)
    input_ids = torch.full((len(found), width), PAD)
    attention_mask = torch.zeros(len(found), width, dtype=torch.int64)
    for row, sample in enumerate(found):
        input_ids[row, : len(sample.token_ids)] = sample.token_ids
        attention_mask[row, : len(sample.token_ids)] = 1
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits.float()
    expected = []
    for row, sample in enumerate(found):
        values = torch.zeros(len(sample.token_ids))
        if head == "sequence_scores":
            values[-1] = logits[row, 0]
        else:
            places = sample.loss_mask.nonzero()[:, 0]
            values[places] = logits[row, places - 1, 0]  # from the state before the token
        expected.append(values)
    return expected


def assert_values(found, expected, *, atol, rtol=0.0):
    assert all(values.isfinite().all() for values in expected)
    assert max(float(values.abs().max()) for values in expected) > 0.05
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("head", CLASSES)
@pytest.mark.parametrize("family", families("llama", "granite", of=HEADED))
def test_an_exported_head_gives_transformers_the_values_of_the_engine(run_ranks, tmp_path, family, head, world_size):
    folder, out = tiny_folder(family, tmp_path / "in"), tmp_path / "out"
    expected = None
    for found in run_ranks(train_and_export, world_size, str(folder), str(out), head, {}):
        expected = classified(out, head)
        assert_values(found, expected, atol=1e-5)
    for found in run_ranks(freeze_and_score, world_size, str(out), head):
        assert_values(found, expected, atol=1e-5)


@pytest.mark.parametrize("head", CLASSES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_computed_in_bfloat16_is_exported_in_it(run_ranks, tmp_path, family, head):
    """Both compute in bfloat16, with other kernels; from the same rounded weights float32 agrees to 1e-5."""
    folder, out = tiny_folder(family, tmp_path / "in"), tmp_path / "out"
    found = run_ranks(train_and_export, 2, str(folder), str(out), head, {"param_dtype": "bfloat16"})
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert_values(found[0], classified(out, head, torch.bfloat16), atol=0.05, rtol=0.05)
    (exact,) = run_ranks(freeze_and_score, 1, str(out), head)
    assert_values(exact, classified(out, head), atol=1e-5)


@pytest.mark.parametrize("keys", [{"lora": {"rank": 4}}, {"ulysses_size": 2}], ids=["lora", "ulysses"])
@pytest.mark.parametrize("head", CLASSES)
def test_heads_beside_adapters_and_on_shared_sequences_are_exported_too(run_ranks, tmp_path, head, keys):
    """The head is trained whole beside adapters, which are merged. State and result of a sequence that ends in padding
    may lie on two ranks."""
    folder, out = tiny_folder("qwen3", tmp_path / "in"), tmp_path / "out"
    first, second = run_ranks(train_and_export, 2, str(folder), str(out), head, keys)
    torch.testing.assert_close(first, second, atol=0, rtol=0)
    assert_values(first, classified(out, head), atol=1e-5)


@pytest.mark.parametrize(
    "variant", [pytest.param({}, id="lora", marks=pytest.mark.full), pytest.param({"use_dora": True}, id="dora")]
)
@pytest.mark.parametrize("head", CLASSES)
def test_peft_puts_an_exported_adapter_with_its_head_onto_the_base_model(run_ranks, tmp_path, head, variant):
    """The head of the base is drawn anew, and the adapter's takes its place."""
    folder, out = tiny_folder("qwen3", tmp_path / "in"), tmp_path / "out"
    found, _ = run_ranks(train_and_export, 2, str(folder), str(out), head, {"lora": {"rank": 4} | variant})
    base = CLASSES[head].from_pretrained(folder, num_labels=1, pad_token_id=PAD, attn_implementation="eager")
    model = PeftModel.from_pretrained(base, out / "adapter").eval()
    assert type(model).__name__ == CLASSES[head].__name__.replace("AutoModel", "PeftModel")
    assert_values(found, values_by(model, head), atol=1e-5)


@pytest.mark.parametrize("head", CLASSES)
@pytest.mark.parametrize("family", ["granite", "qwen2_5_vl"])
def test_peft_puts_an_adapter_onto_a_base_with_the_class_beside_the_merged_model(run_ranks, tmp_path, family, head):
    """Qwen2.5-VL's weights have other names in files than in the model, by rules that the class brings."""
    folder, out = tmp_path / "in", tmp_path / "out"
    if family == "granite":
        tiny_folder(family, folder)
    else:
        model = tiny_vision_model(family)
        for place, kind in enumerate(("image", "video", "vision_start", "vision_end")):
            setattr(model.config, f"{kind}_token_id", 110 + place)  # no token of the samples
        model.save_pretrained(folder)
    (found,) = run_ranks(train_and_export, 1, str(folder), str(out), head, {"lora": {"rank": 4}})
    (reference,) = AutoConfig.from_pretrained(out).auto_map.values()
    made = get_class_from_dynamic_module(reference, out)
    base = made.from_pretrained(folder, num_labels=1, attn_implementation="eager")
    model = PeftModel.from_pretrained(base, out / "adapter").eval()
    assert_values(found, values_by(model, head), atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "granite"])
@pytest.mark.parametrize("head", CLASSES)
def test_the_exported_folder_is_one_that_transformers_would_write(run_ranks, tmp_path, head, family):
    folder, out, again = tiny_folder(family, tmp_path / "in", pad_token_id=None), tmp_path / "out", tmp_path / "again"
    assert AutoConfig.from_pretrained(folder).pad_token_id is None
    run_ranks(train_and_export, 2, str(folder), str(out), head, {})
    model = CLASSES[head].from_pretrained(out, trust_remote_code=True)
    assert (model.config.num_labels, model.config.pad_token_id) == (1, PAD)
    assert AutoTokenizer.from_pretrained(out).pad_token_id == PAD
    model.save_pretrained(again)
    for path in again.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    assert (again / "modeling_head.py").exists() == (family == "granite")
    assert not (out / "generation_config.json").exists()


@pytest.mark.parametrize("head", CLASSES)
def test_no_code_of_a_folder_is_run_when_an_engine_loads_it_or_writes_it_again(run_ranks, tmp_path, head):
    """The family itself says which class it takes."""
    folder, middle, out = tiny_folder("granite", tmp_path / "in"), tmp_path / "middle", tmp_path / "out"
    run_ranks(train_and_export, 1, str(folder), str(middle), head, {})
    code = (middle / "modeling_head.py").read_text()
    (middle / "modeling_head.py").write_text("raise RuntimeError")
    (found,) = run_ranks(train_and_export, 1, str(middle), str(out), head, {})
    assert (out / "modeling_head.py").read_text() == code
    assert_values(found, classified(out, head), atol=1e-5)


def test_training_goes_on_from_the_saved_head(run_ranks, tmp_path):
    folder, middle, out = tiny_folder("qwen3", tmp_path / "in"), tmp_path / "middle", tmp_path / "out"
    run_ranks(train_and_export, 1, str(folder), str(middle), "sequence_scores", {})
    (found,) = run_ranks(train_and_export, 1, str(middle), str(out), "sequence_scores", {})
    assert_values(found, classified(out, "sequence_scores"), atol=1e-5)
    heads = [load_file(path / "model.safetensors")["score.weight"] for path in (middle, out)]
    step = (heads[1] - heads[0]).abs()
    assert 0.01 < float(step.mean()) < 0.041, "two steps of 0.02 from there, not from a fresh head"


@pytest.mark.parametrize("head", ["token_values", "sequence_scores"])
def test_a_critic_may_start_from_a_reward_model_whose_head_has_no_bias(run_ranks, tmp_path, head):
    folder, middle, out = tiny_folder("qwen3", tmp_path / "in"), tmp_path / "middle", tmp_path / "out"
    run_ranks(train_and_export, 1, str(folder), str(middle), "sequence_scores", {})
    (found,) = run_ranks(train_and_export, 1, str(middle), str(out), head, {})
    assert_values(found, classified(out, head), atol=1e-5)


def build_error(folder, head, trained):
    kind = {"config": EngineConfig(), "optimizer": OptimizerConfig()} if trained else {"config": FrozenEngineConfig()}
    try:
        TrainEngine.build(Path(folder), device=CPU, head=head, **kind)
        return "built"
    except ModelError as error:
        return str(error)


@pytest.mark.parametrize("head", CLASSES)
def test_a_frozen_engine_needs_a_head_that_was_trained(run_ranks, tmp_path, head):
    folder = tiny_folder("llama", tmp_path)
    expected = (
        f"{folder} has no value head (score.weight), and one that starts at random would never be trained in a frozen "
        "engine; give the folder of a trained critic or reward model"
    )
    assert run_ranks(build_error, 2, str(folder), head, False) == [expected] * 2
    assert run_ranks(build_error, 2, str(folder), head, True) == ["built"] * 2


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("head", CLASSES)
def test_a_head_for_several_labels_is_refused(run_ranks, tmp_path, head, trained):
    folder = tiny_folder("llama", tmp_path / "in")
    CLASSES[head].from_pretrained(folder, num_labels=3).save_pretrained(tmp_path / "three")
    (found,) = run_ranks(build_error, 1, str(tmp_path / "three"), head, trained)
    assert found == (
        f"{tmp_path / 'three'} has a head for 3 labels (score.weight is [3, 30]), and a critic or reward model has "
        "one; give a model with num_labels=1"
    )


def test_a_critic_is_not_taken_for_a_reward_model_that_has_no_place_for_its_bias(run_ranks, tmp_path):
    folder = tiny_folder("llama", tmp_path / "in")
    AutoModelForTokenClassification.from_pretrained(folder, num_labels=1).save_pretrained(tmp_path / "critic")
    (found,) = run_ranks(build_error, 1, str(tmp_path / "critic"), "sequence_scores", True)
    assert found.startswith(f"{tmp_path / 'critic'} holds a LlamaForTokenClassification, a critic, which values every ")

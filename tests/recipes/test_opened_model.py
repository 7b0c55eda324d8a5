import json
import shutil
from dataclasses import replace

import pytest
from PIL import Image
from tiny_models import tiny_vision_model
from transformers import AutoTokenizer, GenerationConfig
from vision_folders import vision_folder

from shardwise.config import ConfigError, DataError, ModelConfig, ModelError, SamplingConfig, SFTConfig
from shardwise.data import Vision
from shardwise.data.sources import Row
from shardwise.data.synthetic import build_model_folder, train_tokenizer
from shardwise.recipes import opened_model
from shardwise.recipes.checkpointing.manifest import hash_share, write_manifest
from shardwise.recipes.opened_model import OpenedModel, open_companion, open_model
from shardwise.recipes.sft import train


def edit(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def folder(model_folder, tmp_path):
    return shutil.copytree(model_folder, tmp_path / "model")


def open_folder(folder, **options):
    return open_model(ModelConfig(path=str(folder), **options))


def test_an_opened_model_knows_its_tokenizer_and_context(folder):
    model = open_folder(folder)
    assert model.folder == folder
    assert model.context.num_tokens == 96
    assert model.tokenizer.encode("12") == model.tokenizer.convert_tokens_to_ids(["1", "2"])
    model.context.require("data.max_sequence_tokens=96", 96)
    message = r"data.max_sequence_tokens=97 tokens, more than the 96 of the model's context \(max_position_embeddings"
    with pytest.raises(ConfigError, match=message):
        model.context.require("data.max_sequence_tokens=97", 97)


@pytest.mark.parametrize("part", ["resolve_folder", "read_model_config", "load_tokenizer", "verify_weights"])
def test_a_checkpoint_that_a_run_removes_while_it_is_opened_is_told_as_that(whole_run, prune, part):
    prune(opened_model, part)
    hf = whole_run / "checkpoints" / "step_3" / "hf"
    with pytest.raises(ModelError) as refused:
        open_folder(whole_run)
    assert str(refused.value) == (
        f"{hf} was removed while it was read: a run goes on there and keeps fewer checkpoints (trainer.keep_last); "
        f"start again with {whole_run}, of which the newest is read"
    )


@pytest.mark.parametrize(
    ("rope", "limit", "key"),
    [
        ({"rope_type": "longrope", "original_max_position_embeddings": 48}, 48, "original_max_position_embeddings, as"),
        ({"rope_type": "longrope", "original_max_position_embeddings": 96}, 96, "max_position_embeddings in"),
        ({"rope_type": "dynamic", "factor": 2.0}, 96, "max_position_embeddings in"),
    ],
)
def test_the_context_ends_where_rotary_frequencies_depend_on_the_batch(folder, rope, limit, key):
    factors = {"short_factor": [1.0], "long_factor": [2.0], "factor": 2.0}
    edit(folder / "config.json", rope_parameters={"rope_theta": 1e4, **factors, **rope})
    model = open_folder(folder)
    assert model.context.num_tokens == limit
    model.context.require(f"k={limit}", limit)
    with pytest.raises(ConfigError, match=rf"={limit + 1} tokens, more than the {limit} .*\({key} .*config.json\)"):
        model.context.require(f"k={limit + 1}", limit + 1)


def test_a_tokenizer_larger_than_the_embedding_is_refused_with_both_numbers(folder):
    edit(folder / "config.json", vocab_size=200)
    with pytest.raises(ModelError, match="the tokenizer has token ids up to 260, the model's vocabulary ends at 199"):
        open_folder(folder)


def test_weights_of_a_checkpoint_that_have_changed_are_refused_and_a_copy_elsewhere_is_taken(
    group_of_one, folder, tmp_path, monkeypatch
):
    checkpoint = tmp_path / "checkpoints" / "step_3"
    shutil.copytree(folder, checkpoint / "hf")
    write_manifest(checkpoint, [hash_share(checkpoint)], step=3)
    assert open_folder(tmp_path).folder == open_folder(checkpoint).folder == checkpoint / "hf"
    weights = checkpoint / "hf" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for path in (tmp_path, checkpoint, checkpoint / "hf"):
        with pytest.raises(
            ModelError, match=r"model.safetensors.* take another checkpoint, or a copy of .* in another"
        ):
            open_folder(path)
    assert open_folder(shutil.copytree(checkpoint / "hf", tmp_path / "own")).folder == tmp_path / "own"
    (tmp_path / "link").symlink_to(checkpoint / "hf")
    monkeypatch.chdir(checkpoint / "hf")
    for path in (tmp_path / "link", "."):
        with pytest.raises(ModelError, match="is damaged"):
            open_folder(path)


def test_weights_of_a_critic_are_compared_and_a_manifest_of_others_is_none(group_of_one, folder, tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step_3"
    critic = shutil.copytree(folder, checkpoint / "critic" / "hf")
    write_manifest(checkpoint, [hash_share(checkpoint)], step=3)
    assert open_folder(critic).folder == critic
    (critic / "model.safetensors").write_bytes((critic / "model.safetensors").read_bytes()[:-1] + b"x")
    with pytest.raises(ModelError, match="is damaged"):
        open_folder(critic)
    (folder.parent / "manifest.json").write_text('{"a": 1}')
    assert open_folder(folder).folder == folder


@pytest.mark.parametrize(("key", "value"), [("dtype", "foo"), ("text_config", {"a": 1})])
def test_a_config_that_is_wrong_is_named_before_a_tokenizer_is_missed(folder, key, value):
    edit(folder / "config.json", **{key: value})
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"model/config\.json is not a model config: "):
        open_folder(folder)


def test_images_are_refused_with_their_row_where_vllm_is_not_given_those_of_the_family(tmp_path):
    tiny_vision_model("exaone4_5").config.save_pretrained(tmp_path)
    vision = Vision(None, None, None, None)
    opened = OpenedModel(ModelConfig(path=str(tmp_path)), tmp_path, None, vision, None)
    assert opened.vision_in(SamplingConfig(engine={"type": "embedded"})) is vision
    assert opened.vision_in(SamplingConfig(engine="sglang")) is None
    assert opened.vision_in(SamplingConfig(environment="a.py:Game")) is None
    assert replace(opened, vision=None).vision_in(SamplingConfig(engine="vllm")) is None
    placed = Vision(None, None, None, lambda: None)
    assert replace(opened, vision=placed).vision_in(SamplingConfig(engine="vllm")) is placed
    shown = opened.vision_in(SamplingConfig(engine={"type": "vllm"}))
    assert replace(opened, vision=shown).vision_in(SamplingConfig(engine="vllm")) is shown
    row = Row({"images": ["a.png"]}, "a.jsonl line 1", "a", tmp_path)
    with pytest.raises(
        DataError, match=r"^a\.jsonl line 1: .* not given images of the family exaone4_5; use rollout\."
    ):
        shown.take([{"role": "user", "content": "<image>"}], row, "images")
    assert shown.take([{"role": "user", "content": "2+3="}], replace(row, values={}), "images")[1] == []


UNUSABLE = {
    "of another kind": json.dumps({"image_processor_type": "CLIPImageProcessor"}),
    "unknown": json.dumps({"image_processor_type": "OtherImageProcessor"}),
    "damaged": "{",
}


@pytest.mark.parametrize("text", UNUSABLE.values(), ids=UNUSABLE)
def test_words_alone_are_learnt_from_as_before_where_the_image_processor_cannot_be_used(
    group_of_one, write_jsonl, tmp_path, capsys, text
):
    """The losses are those of a folder that is whole; a row with an image is refused with what is wrong."""
    vision_folder("qwen3_vl", tmp_path / "whole")
    path = shutil.copytree(tmp_path / "whole", tmp_path / "model") / "preprocessor_config.json"
    path.write_text(text)
    rows = write_jsonl("rows.jsonl", [{"prompt": f"{n}+{n}=", "response": str(2 * n)} for n in range(4)])

    def learn(name, files=rows):
        tree = {
            "model": {"path": str(tmp_path / name)},
            "data": {"train_files": files, "max_sequence_tokens": 64},
            "trainer": {
                "output_dir": str(tmp_path / f"run of {name}"),
                "batch_size": 2,
                "total_steps": 2,
                "learning_rate": 1e-2,
            },
        }
        train(SFTConfig.parse(tree, origin="test"), group_of_one)
        group_of_one.call("close")
        metrics = (tmp_path / f"run of {name}" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["train/loss"] for line in metrics]

    expected = learn("whole")
    assert str(path.name) not in capsys.readouterr().err
    assert learn("model") == expected
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if path.name in line]
    assert warning.startswith(f"warning: {path}")
    assert warning.endswith("; until then rows with images are refused")
    Image.new("RGB", (16, 8)).save(tmp_path / "a.png")
    seen = write_jsonl("seen.jsonl", [{"prompt": "<image>Which?", "response": "5", "images": ["a.png"]}])
    with pytest.raises(DataError, match=rf'^seen\.jsonl line 1: the row has images in its column "images", and {path}'):
        learn("model", seen)


def test_a_command_that_reads_no_rows_says_nothing_of_those_with_images(tmp_path, capsys):
    """Only where rows are read would any be refused: an export or a prompt of words has none."""
    vision_folder("qwen3_vl", tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text("{")
    capsys.readouterr()
    opened = open_folder(tmp_path / "model")
    assert capsys.readouterr().err == ""
    opened.warn_of_refused_images()
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {tmp_path / 'model' / 'preprocessor_config.json'}")
    assert warning.endswith("; until then rows with images are refused")


def test_spare_rows_of_the_embedding_are_fine(folder):
    edit(folder / "config.json", vocab_size=320)
    assert len(open_folder(folder).tokenizer) == 261


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("model.safetensors", "has a config.json but no .*safetensors weights; save the model with save_pretrained"),
        ("config.json", "config.json does not exist; a model folder needs one"),
        ("tokenizer.json", "the tokenizer in .* has no vocabulary: its tokenizer.json is missing|no tokenizer can be"),
    ],
)
def test_a_folder_without_a_part_is_refused_and_the_part_named(folder, remove, message):
    (folder / remove).unlink()
    with pytest.raises(ModelError, match=message) as caught:
        open_folder(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "a/b/c"])
def test_a_path_that_is_no_folder_is_refused_without_asking_the_hub(path):
    with pytest.raises(ModelError, match=f"{path} is not a folder"):
        open_model(ModelConfig(path=path))


def test_a_config_that_is_no_model_is_refused(folder):
    edit(folder / "config.json", model_type="no_such_family")
    with pytest.raises(ModelError, match=r"(no_such_family|not a model config)"):
        open_folder(folder)


@pytest.fixture(scope="module")
def other_words(tmp_path_factory):
    """A model whose tokenizer knows a longer word, and with half the context of the other."""
    folder = tmp_path_factory.mktemp("models") / "other"
    tokenizer = train_tokenizer(["the the the the"] * 9, vocab_size=262)
    build_model_folder(folder, tokenizer=tokenizer, hidden_size=32, num_layers=1, max_position_embeddings=48)
    return folder


def test_a_companion_reads_the_same_tokens_and_as_many(model_folder, other_words):
    main, other = (open_model(ModelConfig(path=str(folder))) for folder in (model_folder, other_words))
    same = open_companion(main.config, main, said="k", num_tokens=96)
    assert same.folder == main.folder
    with pytest.raises(ModelError, match=r"differ in 1 entries \(only that of .*other has '.*' as token 26\d\)"):
        open_companion(ModelConfig(path=str(other_words)), main, said="k", num_tokens=8)
    with pytest.raises(ConfigError, match="k=49 tokens, more than the 48 of the model's context"):
        open_companion(ModelConfig(path=str(other_words)), other, said="k=49", num_tokens=49)


@pytest.fixture
def base_folder(model_folder, tmp_path):
    """As many base models are: the chat template ends turns with a token that ends no text."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.eos_token = "<|pad|>"
    folder = shutil.copytree(model_folder, tmp_path / "base")
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        edit(folder / name, eos_token_id=tokenizer.eos_token_id)
    return folder


def test_a_turn_end_that_ends_no_completion_is_known_and_warned_of(base_folder, folder, capsys):
    end = AutoTokenizer.from_pretrained(folder).eos_token_id
    assert open_folder(folder).turn_end_id is None
    model = open_folder(base_folder)
    assert model.turn_end_id == end
    model.warn_of_endless_turns(SamplingConfig(stop_token_ids=[end]))
    assert capsys.readouterr().err == ""
    model.warn_of_endless_turns(SamplingConfig())
    assert f"ends no completion; rollout.stop_token_ids=[{end}] makes it\n" in capsys.readouterr().err
    edit(base_folder / "generation_config.json", eos_token_id=[0, end])
    assert open_folder(base_folder).turn_end_id is None


def test_stop_strings_that_no_completion_can_show_are_refused(folder):
    model = open_folder(folder)
    end = model.tokenizer.eos_token
    model.require_visible_stops(SamplingConfig(stop=["5", "\n\n", " =", "é"]))
    instead = rf"is a special token, .*use rollout\.stop_token_ids=\[{model.tokenizer.eos_token_id}\]$"
    with pytest.raises(ConfigError, match=instead):
        model.require_visible_stops(SamplingConfig(stop=["5", end]))
    with pytest.raises(ConfigError, match=r"has a special token, .*give its ordinary text alone$"):
        model.require_visible_stops(SamplingConfig(stop=[f"{end}\n5"]))


@pytest.mark.parametrize("apply_chat_template", [True, False])
def test_what_was_trained_to_end_turns_ends_completions_there(base_folder, group_of_one, tmp_path, apply_chat_template):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2+3=", "response": "5"}\n')
    end = AutoTokenizer.from_pretrained(base_folder).convert_tokens_to_ids("<|end|>")
    config = SFTConfig.parse(
        {
            "model": {"path": str(base_folder)},
            "data": {"train_files": str(rows), "apply_chat_template": apply_chat_template, "max_sequence_tokens": 64},
            "trainer": {"output_dir": str(tmp_path / "run"), "total_steps": 1, "batch_size": 1, "async_save": False},
        },
        origin="test",
    )
    train(config, group_of_one)
    saved = GenerationConfig.from_pretrained(tmp_path / "run" / "checkpoints" / "step_1" / "hf").eos_token_id
    before = GenerationConfig.from_pretrained(base_folder).eos_token_id
    assert saved == ([before, end] if apply_chat_template else before)

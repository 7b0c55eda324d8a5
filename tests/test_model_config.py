import json

import pytest
import transformers
from tiny_models import IMAGE, VIDEO, tiny_folder, tiny_model, tiny_vision_model
from transformers import AutoModelForSequenceClassification, CLIPConfig, Qwen3Config

from shardwise.config import ModelError
from shardwise.engine.model import build_on_meta
from shardwise.model_config import blaming_config, media_token_ids, read_model_config, require_generates


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "foo"),
        ("rms_norm_eps", "a"),
        ("vocab_size", "x"),
        ("max_position_embeddings", None),
        ("tie_word_embeddings", "maybe"),
        ("rope_parameters", []),
        ("num_hidden_layers", 3),
        ("layer_types", ["foo", "bar"]),
        ("head_dim", 7),
        ("text_config", {"a": 1}),
        ("intermediate_size", -3),
        ("pad_token_id", 999),
    ],
)
def test_a_wrong_value_in_config_json_is_an_error_of_that_file_in_one_line(tmp_path, key, value):
    file = tiny_folder("qwen3", tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ModelError) as error:
        build_on_meta(tmp_path)
    reading, building = f"{file} is not a model config: ", "for CausalLM; look into its config.json. "
    assert str(error.value).startswith((reading, f"{tmp_path} cannot be built as a model {building}"))
    assert "\n" not in str(error.value)


def test_code_beside_a_config_is_not_run(tmp_path):
    (tmp_path / "code.py").write_text("raise SystemExit")
    content = {"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError) as error:
        read_model_config(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}/config.json is not a model config: transformers {transformers.__version__} has no "
        "model_type=unheard_of, and code beside weights (auto_map) is never run; correct it, install a release of "
        "transformers that has it, or register its classes in Python (AutoConfig.register, "
        "AutoModelForCausalLM.register) before you build a TrainEngine"
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"model_type": "unheard_of"}, "has no model_type=unheard_of; correct it, install a release"),
        ({"auto_map": {"AutoConfig": "code.Config"}}, "it names no model_type, and code beside weights (auto_map) is"),
        ({}, "it names no model_type; correct it"),
        ([], "is not a model config: AttributeError: "),
    ],
)
def test_a_config_of_no_known_type_says_so_and_never_speaks_of_trust_remote_code(tmp_path, content, told):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError) as error:
        read_model_config(tmp_path)
    assert told in str(error.value)
    assert "trust_remote_code" not in str(error.value)


def test_code_that_a_config_of_a_known_type_names_is_forgotten(tmp_path):
    """Else transformers asks at the terminal whether to run it, where it has no class of its own for the purpose."""
    file = tiny_folder("qwen3", tmp_path) / "config.json"
    places = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": places}))
    config = read_model_config(tmp_path)
    assert type(config) is Qwen3Config
    assert "auto_map" not in config.to_dict()


def test_of_a_long_message_the_beginning_is_quoted(tmp_path):
    """transformers' list of the classes that it has takes kilobytes."""
    with pytest.raises(ModelError) as error, blaming_config(tmp_path, "CausalLM"):
        AutoModelForSequenceClassification.from_config(CLIPConfig())
    beginning = f"{tmp_path} cannot be built as a model for CausalLM; look into its config.json. ValueError: Unrecogn"
    assert str(error.value).startswith(beginning)
    assert "AutoModelForSequenceClassification" in str(error.value)
    assert str(error.value).endswith("...")
    assert len(str(error.value)) < len(beginning) + 300
    with pytest.raises(ModelError, match=r"ValueError: short$"), blaming_config(tmp_path, "CausalLM"):
        raise ValueError("short")


def test_a_value_that_a_table_lacks_is_named_with_its_key(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"hidden_act": "swoosh"}}))
    with (
        pytest.raises(ModelError, match=r"config\.json\. hidden_act=swoosh is not known to transformers$"),
        blaming_config(tmp_path, "CausalLM"),
    ):
        raise KeyError("swoosh")


def test_an_error_that_is_in_words_already_stays_as_it_is(tmp_path):
    with pytest.raises(ModelError, match=r"^no experts$"), blaming_config(tmp_path, "CausalLM"):
        raise ModelError("no experts")


@pytest.mark.parametrize("name", ["Qwen3ForSequenceClassification", "LlamaForTokenClassification"])
def test_reward_models_and_critics_are_not_taken_for_language_models(tmp_path, name):
    with pytest.raises(ModelError, match=f"{tmp_path} holds a {name}, a reward model or critic, which"):
        require_generates(tmp_path, Qwen3Config(architectures=[name]))
    for others in (["Qwen3ForCausalLM"], [], None):
        require_generates(tmp_path, Qwen3Config(architectures=others))


def test_a_critic_is_not_taken_for_a_reward_model(tmp_path):
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForTokenClassification"]}))
    with pytest.raises(ModelError, match=f"{tmp_path} holds a Qwen3ForTokenClassification, a critic, which values"):
        build_on_meta(tmp_path, "sequence_scores")
    build_on_meta(tmp_path, "token_values")
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForSequenceClassification"]}))
    for head in ("sequence_scores", "token_values"):  # critics may start from reward models
        build_on_meta(tmp_path, head)


def test_the_tokens_of_images_and_videos_are_those_that_the_config_names(tmp_path):
    assert media_token_ids(Qwen3Config()) == []
    tiny_vision_model("qwen3_vl").config.save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    assert media_token_ids(config) == [IMAGE, VIDEO]
    config.text_config.vocab_size = VIDEO  # the last token is the one before
    assert media_token_ids(config) == [IMAGE]

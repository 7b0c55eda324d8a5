import json

import pytest

from shardwise.config import ModelConfig, ModelError
from shardwise.data.synthetic import build_model_folder, train_tokenizer
from shardwise.data.tokenizer import check_vocabulary, load_tokenizer


@pytest.fixture
def model_folder(tmp_path, tokenizer):
    build_model_folder(tmp_path / "model", tokenizer=tokenizer, hidden_size=16, num_layers=1, intermediate_size=16)
    return tmp_path / "model"


def test_load_tokenizer_takes_the_given_folder_and_template(tmp_path, model_folder):
    train_tokenizer(["abc abc"], vocab_size=262).save_pretrained(tmp_path / "other")
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}!")
    config = ModelConfig(path=str(model_folder))
    assert len(load_tokenizer(config)) == 261
    own = {"tokenizer_path": str(tmp_path / "other"), "chat_template": str(tmp_path / "chat.jinja")}
    other = load_tokenizer(ModelConfig(path=str(model_folder), **own))
    assert len(other) == 262
    assert other.chat_template == "{{ messages[0].content }}!"


def test_a_template_of_an_older_folder_is_read_where_the_tokenizer_has_none(model_folder, tokenizer):
    """Beside it, as a file of the processor."""
    (model_folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}?"}))
    config = ModelConfig(path=str(model_folder))
    assert load_tokenizer(config).chat_template == tokenizer.chat_template
    (model_folder / "chat_template.jinja").unlink()
    assert load_tokenizer(config).chat_template == "{{ messages[0].content }}?"
    (model_folder / "chat_template.json").write_text("{")
    with pytest.raises(ModelError, match=r"chat_template\.json cannot be read"):
        load_tokenizer(config)
    (model_folder / "chat_template.json").unlink()
    assert load_tokenizer(config).chat_template is None


def test_load_tokenizer_does_not_need_a_pad_token(tmp_path, tokenizer):
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(ModelConfig(path=str(tmp_path))).pad_token is None


def test_missing_tokenizer_is_refused(tmp_path, model_folder):
    with pytest.raises(ModelError, match=r"tokenizer folder \S+gone does not exist; set model\.path"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "gone")))
    (tmp_path / "bare").mkdir()
    with pytest.raises(ModelError, match=r"no tokenizer can be loaded from \S+bare .* set model\.tokenizer_path"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "bare")))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model_folder / name).unlink()
    with pytest.raises(ModelError, match=r"has no vocabulary: its tokenizer\.json is missing"):
        load_tokenizer(ModelConfig(path=str(model_folder)))


def test_a_config_that_is_broken_is_not_taken_for_a_missing_tokenizer(model_folder):
    (model_folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read: Expecting property name .* copy it again$"):
        load_tokenizer(ModelConfig(path=str(model_folder)))


def test_broken_tokenizer_is_refused(model_folder):
    (model_folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="no tokenizer can be loaded from"):
        load_tokenizer(ModelConfig(path=str(model_folder)))


def test_tokenizer_without_end_token_is_refused(tmp_path, tokenizer):
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has no end-of-sequence token.*set eos_token in its tokenizer_config\.json"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_missing_template_file_is_refused(tmp_path, model_folder):
    config = ModelConfig(path=str(model_folder), chat_template=str(tmp_path / "gone.jinja"))
    with pytest.raises(ModelError, match=r"model\.chat_template=\S+gone\.jinja cannot be read"):
        load_tokenizer(config)


def test_trap_33_a_tokenizer_larger_than_the_model_is_refused_with_both_numbers(tokenizer):
    check_vocabulary(tokenizer, 261)
    check_vocabulary(tokenizer, 320)
    with pytest.raises(ModelError, match="the tokenizer has token ids up to 260, the model's vocabulary ends at 259"):
        check_vocabulary(tokenizer, 260)


def test_trap_33_a_token_added_for_other_models_is_fine_until_the_chat_template_brings_it(tokenizer):
    """As Gemma 3's tokenizer has one for images, and its text models no row for it."""
    tokenizer.add_tokens(["<image_soft_token>"], special_tokens=True)
    tokenizer.chat_template = "{{ messages[0].content }}"
    check_vocabulary(tokenizer, 261)
    tokenizer.chat_template = "{{ messages[0].content }}<image_soft_token>"
    with pytest.raises(ModelError, match="token ids up to 261, the model's vocabulary ends at 260"):
        check_vocabulary(tokenizer, 261)


def test_trap_33_a_token_id_outside_the_models_vocabulary_is_refused_however_few_tokens_there_are(tokenizer, tmp_path):
    """Ids need not be without gaps: 262 tokens, one of which is number 400."""
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["far"] = 400
    file.write_text(json.dumps(content))
    with_gap = load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert len(with_gap) < 300
    check_vocabulary(with_gap, 401)
    with pytest.raises(ModelError, match="the tokenizer has token ids up to 400, the model's vocabulary ends at 299"):
        check_vocabulary(with_gap, 300)

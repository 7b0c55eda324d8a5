"""Which class of transformers a family takes with each head, and the one that is made where there is none."""

import pytest
import torch
from tiny_models import tiny_model, tiny_vision_model
from transformers import AutoModelForTokenClassification, CLIPConfig
from transformers.modeling_layers import GenericForTokenClassification
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3PreTrainedModel

from shardwise.engine.model_classes import auto_map, class_code, class_named, model_from_config

TOKENS = torch.tensor([[5, 9, 7, 4, 8]])
SMALL = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
HEADS = ["token_values", "sequence_scores"]


def headed(family, head):
    """Of the weights of a tiny language model, and a random head."""
    language_model = tiny_model(family).eval()
    language_model.config.num_labels = 1
    torch.manual_seed(3)
    model = model_from_config(language_model.config, head, dtype=torch.float32, attn_implementation="eager")
    model.base_model.load_state_dict(language_model.base_model.state_dict())
    return language_model, model.eval()


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "LlamaForTokenClassification"), ("granite", "GraniteForTokenClassification")],
)
def test_a_class_is_made_only_where_transformers_has_none(family, name):
    _, model = headed(family, "token_values")
    assert type(model).__name__ == name
    assert type(model).__module__.startswith("transformers.") == (family == "llama")
    assert auto_map(model) == (
        {} if family == "llama" else {"AutoModelForTokenClassification": f"modeling_head.{name}"}
    )


@pytest.mark.parametrize("head", HEADS)
def test_a_made_class_puts_the_head_on_what_the_language_model_computes(head):
    language_model, model = headed("granite", head)
    with torch.no_grad():
        states = language_model.base_model(input_ids=TOKENS).last_hidden_state
        expected = states @ model.score.weight.T + (model.score.bias if head == "token_values" else 0)
        found = model(input_ids=TOKENS).logits
    assert found.abs().max() > 0.01
    torch.testing.assert_close(found, expected if head == "token_values" else expected[:, -1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("head", HEADS)
def test_its_code_is_the_same_class_by_transformers_alone(head):
    _, model = headed("granite", head)
    written = {"__name__": "written"}
    exec(class_code(model), written)
    other = written[type(model).__name__](model.config).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(other(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


@pytest.mark.parametrize("head", HEADS)
def test_its_code_reads_the_language_models_folder_where_names_go_by_the_class(head, tmp_path):
    """Without the rule transformers would fill the decoder of Qwen2.5-VL at random, and say so in a warning only."""
    language_model = tiny_vision_model("qwen2_5_vl")
    language_model.save_pretrained(tmp_path)
    written = {"__name__": "written"}
    exec(class_code(model_from_config(language_model.config, head)), written)
    made = next(value for name, value in written.items() if name.startswith("Qwen2_5_VLFor"))
    loaded, told = made.from_pretrained(tmp_path, num_labels=1, output_loading_info=True)
    assert {name.partition(".")[0] for name in told["missing_keys"]} == {"score"}
    expected = language_model.model.state_dict()
    torch.testing.assert_close(loaded.model.state_dict(), expected, rtol=0, atol=0)


def test_a_made_class_belongs_to_the_config_of_the_text_model():
    """The base of Gemma 3's classes is the one that sees images too."""
    model = model_from_config(Gemma3TextConfig(**SMALL, num_labels=1), "token_values", dtype=torch.float32)
    assert type(model).__name__ == "Gemma3TextForTokenClassification"
    assert isinstance(model, Gemma3PreTrainedModel)
    assert type(model).config_class is Gemma3TextConfig
    assert model.score.weight.shape == (1, 16)


def test_a_made_class_is_found_by_its_name():
    config = Gemma3TextConfig(**SMALL)
    made = class_named("Gemma3TextForTokenClassification", config)
    assert made.__bases__ == (GenericForTokenClassification, Gemma3PreTrainedModel)
    assert class_named("Gemma3TextForSequenceClassification", config) is None  # transformers has it
    assert class_named("LlamaForTokenClassification", config) is None


def test_a_class_that_a_folder_brought_into_the_process_is_not_taken(monkeypatch):
    """transformers remembers it after `trust_remote_code=True`; an export would not know its code."""
    _, model = headed("granite", "token_values")
    written = {"__name__": "written"}
    exec(class_code(model), written)
    known = AutoModelForTokenClassification._model_mapping._extra_content
    monkeypatch.setitem(known, type(model.config), written["GraniteForTokenClassification"])
    assert auto_map(model_from_config(model.config, "token_values")) == auto_map(model) != {}


def test_a_family_without_a_language_model_has_no_head():
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        model_from_config(CLIPConfig(), "token_values")

import io
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.cli import main
from shardwise.config import ConfigError, DataError, ModelError
from shardwise.recipes.generate import DEFAULT_TOKENS, converse
from shardwise.recipes.opened_model import OpenedModel
from shardwise.rollout import EmbeddedEngine

OPTIONS = {
    "prompts": ["47+85=", "1+1="],
    "max_tokens": 6,
    "temperature": 0.0,
    "num_completions": 1,
    "apply_chat_template": True,
    "seed": 0,
}


def expected(folder, prompts, *, chat):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    texts = []
    for prompt in prompts:
        ids = tokenizer.encode(f"<|user|>{prompt}<|end|><|assistant|>" if chat else prompt)
        output = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)
        texts.append(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))
    return "".join(text + "\n" for text in texts)


def test_a_checkpoint_that_a_run_removes_before_a_conversation_is_told_as_that(whole_run, prune):
    prune(EmbeddedEngine, "from_folder")
    with pytest.raises(ModelError, match=rf"step_3/hf was removed while .*; start again with {whole_run}, of which"):
        converse(str(whole_run), **OPTIONS)


@pytest.mark.parametrize("chat", [True, False])
def test_printed_completions_are_those_of_transformers(model_folder, capsys, chat):
    converse(str(model_folder), **{**OPTIONS, "apply_chat_template": chat})
    assert capsys.readouterr().out == expected(model_folder, OPTIONS["prompts"], chat=chat)


def test_prompts_come_from_standard_input_where_none_are_given(model_folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("47+85=\n\n1+1=\n"))
    converse(str(model_folder), **{**OPTIONS, "prompts": None})
    assert capsys.readouterr().out == expected(model_folder, OPTIONS["prompts"], chat=True)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_that_is_not_utf8_is_refused(model_folder, monkeypatch, errors):
    """Python reads it either way, as the locale says."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"47+\xff="), encoding="utf-8", errors=errors))
    with pytest.raises(ConfigError, match="standard input is not UTF-8; convert it"):
        converse(str(model_folder), **{**OPTIONS, "prompts": None})


def test_the_newest_checkpoint_of_a_run_folder_is_used(model_folder, tmp_path, capsys):
    (tmp_path / "checkpoints" / "step_3").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_3" / "hf").symlink_to(model_folder)
    converse(str(tmp_path), **OPTIONS)
    assert capsys.readouterr().out == expected(model_folder, OPTIONS["prompts"], chat=True)


def test_sampling_gives_as_many_lines_as_asked_and_the_same_for_the_same_seed(model_folder, capsys):
    printed = []
    for seed in (1, 1, 2):
        options = {**OPTIONS, "prompts": ["5"], "temperature": 0.5, "num_completions": 3, "seed": seed}
        converse(str(model_folder), **options)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[0] != printed[2]


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"max_tokens": 0}, "--max-tokens=0; a completion has at least 1, or leave it out"),
        ({"num_completions": 0}, "--num-completions=0; give at least 1"),
        ({"temperature": -0.5}, "--temperature=-0.5; give a number of at least 0, which is greedy"),
        ({"temperature": math.nan}, "--temperature=nan; give a number"),
    ],
)
def test_a_number_out_of_range_is_refused_by_its_name_alone(model_folder, bad, told):
    with pytest.raises(ConfigError, match=f"^{told}"):
        converse(str(model_folder), **{**OPTIONS, "max_tokens": None, **bad})


def test_without_a_number_completions_fill_what_the_context_leaves(model_folder, capsys, monkeypatch):
    asked = []
    generate = EmbeddedEngine.generate

    def recorded(engine, requests):
        asked.append(requests[0].max_tokens)
        return generate(engine, requests)

    monkeypatch.setattr(EmbeddedEngine, "generate", recorded)
    options = {**OPTIONS, "max_tokens": None, "prompts": ["12345"], "apply_chat_template": False}
    converse(str(model_folder), **options)
    assert asked == [96 - 5]
    monkeypatch.setattr("shardwise.recipes.generate.DEFAULT_TOKENS", 7)
    converse(str(model_folder), **options)
    assert asked[1:] == [7]
    told = r"^the prompt's 103 tokens \+ the one token of a completion = 104 tokens, more than the 96"
    with pytest.raises(ConfigError, match=told):
        converse(str(model_folder), **options | {"prompts": ["1" * 103]})
    assert capsys.readouterr().err == ""


def test_the_help_names_the_default_number_of_tokens(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert f"default: {DEFAULT_TOKENS}, or" in capsys.readouterr().out


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(model_folder):
    with pytest.raises(ConfigError, match=r"^the prompt's 103 tokens \+ --max-tokens = 109 tokens, more than the 96"):
        converse(str(model_folder), **{**OPTIONS, "prompts": ["1" * 100], "max_tokens": 6})


def test_a_prompt_may_not_spell_what_stands_for_images(model_folder, monkeypatch):
    media = AutoTokenizer.from_pretrained(model_folder).convert_tokens_to_ids("7")
    monkeypatch.setattr(OpenedModel, "media_token_ids", [media])
    with pytest.raises(
        DataError, match=r"^the prompt: the text spells '7', by which the model knows a part of an image"
    ):
        converse(str(model_folder), **OPTIONS)

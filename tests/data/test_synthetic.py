import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.config import ModelConfig
from shardwise.data.chat import render_conversation
from shardwise.data.synthetic import (
    arithmetic_problems,
    build_model_folder,
    train_tokenizer,
    worked_addition,
)
from shardwise.data.tokenizer import check_vocabulary, load_tokenizer


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_problems_are_all_additions_once_and_their_answers_are_right(tmp_path):
    files = arithmetic_problems(tmp_path, seed=0, num_held_out=1000)
    train, held_out = read(files.rl_train), read(files.rl_validation)
    assert (len(train), len(held_out)) == (9000, 1000)
    seen = set()
    for row in train + held_out:
        a, b = row["extra_info"]["a"], row["extra_info"]["b"]
        assert row["prompt"] == f"{a}+{b}="
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(a + b)}
        assert row["data_source"] == "addition"
        seen.add((a, b))
    assert seen == {(a, b) for a in range(100) for b in range(100)}


def test_sft_and_rl_files_hold_the_same_problems(tmp_path):
    files = arithmetic_problems(tmp_path, seed=0, num_held_out=10)
    for sft, rl in ((files.sft_train, files.rl_train), (files.sft_validation, files.rl_validation)):
        expected = [{"prompt": row["prompt"], "response": row["reward_model"]["ground_truth"]} for row in read(rl)]
        assert read(sft) == expected


def test_held_out_operands_cover_the_whole_range(tmp_path):
    rows = read(arithmetic_problems(tmp_path, seed=0, num_held_out=2000).rl_validation)
    assert {row["extra_info"]["a"] for row in rows} == set(range(100))
    assert 45 < sum(row["extra_info"]["a"] for row in rows) / len(rows) < 54


def test_problems_depend_on_the_seed_alone(tmp_path):
    def contents(name, seed):
        files = arithmetic_problems(tmp_path / name, seed=seed, num_held_out=50)
        return [path.read_bytes() for path in (files.sft_train, files.sft_validation, files.rl_train)]

    assert contents("a", 7) == contents("b", 7)
    assert contents("a", 7) != contents("c", 8)


def test_held_out_count_is_checked(tmp_path):
    for count in (0, 10_000):
        with pytest.raises(ValueError, match=f"num_held_out={count} of 10000 problems; use 1 to 9999"):
            arithmetic_problems(tmp_path, seed=0, num_held_out=count)


@pytest.mark.parametrize(
    ("a", "b", "worked"),
    [
        (47, 85, "12 132"),
        (3, 5, "08 8"),
        (99, 99, "18 198"),
        (0, 0, "00 0"),
    ],
)
def test_worked_addition_by_hand(a, b, worked):
    assert worked_addition(a, b) == worked


def test_worked_responses_end_in_the_answer(tmp_path):
    files = arithmetic_problems(tmp_path, seed=0, num_held_out=500, worked=True)
    for sft, rl in zip(read(files.sft_train), read(files.rl_train), strict=True):
        assert sft["response"].rsplit(" ", 1)[1] == rl["reward_model"]["ground_truth"]


def test_digits_stay_single_tokens_and_any_text_round_trips():
    tokenizer = train_tokenizer(["1212121212 the cat sat on the mat"] * 50, vocab_size=300)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("1212+12=")) == [*"1212+12="]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the")) == ["the"]
    for text in ("47+85=132", "Grüße, 世界 🙂\n\tend", "  two  spaces ."):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match="vocab_size=260 has no room"):
        train_tokenizer(["x"], vocab_size=260)


def test_chat_template_is_prefix_stable_over_turns(tokenizer):
    messages = [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user", "assistant")]
    token_ids, _ = render_conversation(tokenizer, messages, "row")
    assert tokenizer.decode(token_ids) == (
        "<|system|>x<|end|><|user|>x<|end|><|assistant|>x<|end|><|user|>x<|end|><|assistant|>x<|end|>"
    )


def test_model_folder_loads_as_any_hugging_face_model(tmp_path, tokenizer):
    state = torch.get_rng_state()
    build_model_folder(tmp_path, tokenizer=tokenizer, hidden_size=32, num_layers=2, intermediate_size=64, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.lm_head.weight is model.model.embed_tokens.weight
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(ModelConfig(path=str(tmp_path)))
    for other in (loaded, ours):
        assert other.encode("47+85=132 hello") == tokenizer.encode("47+85=132 hello")
        assert (other.eos_token, other.pad_token, other.chat_template) == (
            "<|end|>",
            "<|pad|>",
            tokenizer.chat_template,
        )
    check_vocabulary(ours, model.config.vocab_size)


def test_model_weights_depend_on_the_seed_alone(tmp_path, tokenizer):
    def weights(name, seed):
        build_model_folder(tmp_path / name, tokenizer=tokenizer, hidden_size=32, num_layers=1, seed=seed)
        return (tmp_path / name / "model.safetensors").read_bytes()

    assert weights("a", 1) == weights("b", 1)
    assert weights("a", 1) != weights("c", 2)

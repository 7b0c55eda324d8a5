import json
import math
import re

import pyarrow
import pytest
import torch
from pyarrow import parquet
from tokenizers.processors import TemplateProcessing

from shardwise.config import DataError, EvalDataConfig, PromptDataConfig, SupervisedDataConfig
from shardwise.data.rows import Loaded, prompt_examples, supervised_samples
from shardwise.types import Example, Sample


@pytest.fixture
def write(tmp_path):
    def write_rows(*rows, name="train.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return [str(tmp_path / name)]

    return write_rows


def supervised(tokenizer, files, *, max_rows=None, **settings):
    return supervised_samples(SupervisedDataConfig(**settings), files, tokenizer, max_rows=max_rows)


def prompts(tokenizer, files, *, max_rows=None, **settings):
    return prompt_examples(PromptDataConfig(**settings), files, tokenizer, max_rows=max_rows)


def trained_text(tokenizer, sample):
    return tokenizer.decode(sample.token_ids[sample.loss_mask])


PLAIN = {"apply_chat_template": False}
RL_ROW = {"prompt": "2+3=", "reward_model": {"ground_truth": "5"}}


def test_trap_08_plain_rows_become_samples_that_train_their_end_token(tokenizer, write):
    files = write({"prompt": "2+3=", "response": "5"}, {"prompt": "40+2=", "response": "42"})
    loaded = supervised(tokenizer, files, **PLAIN)
    assert loaded.counts == {"num_rows": 2, "num_dropped": 0, "num_truncated": 0}
    first, second = loaded.rows
    assert (first.uid, second.uid) == ("train.jsonl line 1", "train.jsonl line 2")
    assert first.token_ids.tolist() == [*tokenizer.encode("2+3=5"), tokenizer.eos_token_id]
    assert first.token_ids.dtype == torch.int64
    assert first.loss_mask.tolist() == [False] * 4 + [True] * 2
    assert first.loss_mask.dtype == torch.bool
    assert trained_text(tokenizer, second) == "42<|end|>"


def test_a_digest_tells_other_tokens_other_masks_and_other_borders_apart():
    def digest(*rows):
        made = [
            Sample(uid=uid, token_ids=torch.tensor(ids), loss_mask=torch.tensor(mask, dtype=torch.bool))
            for uid, ids, mask in rows
        ]
        return Loaded(made, {}).digest()

    first, second = ("a", [1, 2, 3], [0, 1, 1]), ("b", [4, 5], [0, 1])
    assert digest(first, second) == digest(("c", *first[1:]), second), "names are not learnt"
    others = {
        digest(first, second),
        digest(second, first),
        digest(first),
        digest(("a", [1, 2, 9], [0, 1, 1]), second),
        digest(("a", [1, 2, 3], [0, 0, 1]), second),
        digest(("a", [1, 2, 3, 4, 5], [0, 1, 1, 0, 1])),
    }
    assert len(others) == 6
    examples = [
        Example(uid="a", prompt="?", prompt_ids=ids, ground_truth="5", data_source="") for ids in ([1, 2], [1, 3])
    ]
    assert Loaded(examples[:1], {}).digest() != Loaded(examples[1:], {}).digest()


def test_a_file_may_mix_conversations_and_responses(tokenizer, tmp_path):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rows = [{"messages": talk, "prompt": None, "response": None}, {"messages": None, "prompt": "hi", "response": "ho"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "mixed.parquet")
    first, second = supervised(tokenizer, [str(tmp_path / "mixed.parquet")], system_prompt="be kind").rows
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert tokenizer.decode(first.token_ids) == "<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>ho<|end|>"
    assert trained_text(tokenizer, first) == trained_text(tokenizer, second) == "ho<|end|>"


def test_own_column_names_are_used(tokenizer, write):
    files = write({"problem": {"text": "2+3="}, "answer": "5"})
    [sample] = supervised(tokenizer, files, prompt_column="problem.text", response_column="answer", **PLAIN).rows
    assert tokenizer.decode(sample.token_ids) == "2+3=5<|end|>"


def test_max_rows_takes_the_first(tokenizer, write):
    files = write(*({"prompt": f"{i}=", "response": "x"} for i in range(5)))
    assert [s.uid for s in supervised(tokenizer, files, max_rows=2, **PLAIN).rows] == [
        "train.jsonl line 1",
        "train.jsonl line 2",
    ]


SHORT, LONG = {"prompt": "1=", "response": "1"}, {"prompt": "123=", "response": "abcd"}
FAR = {"prompt": "12345678=", "response": "1"}


def test_overlong_sequence_is_an_error_by_default(tokenizer, write):
    with pytest.raises(DataError) as error:
        supervised(tokenizer, write(SHORT, LONG), max_sequence_tokens=6, **PLAIN)
    assert str(error.value) == (
        "train.jsonl line 2: the sequence has 9 tokens, more than data.max_sequence_tokens=6; "
        "raise it, or set data.on_overlong to drop or truncate"
    )
    assert len(supervised(tokenizer, write(SHORT, LONG), max_sequence_tokens=9, **PLAIN).rows) == 2


def test_overlong_sequences_are_dropped_and_counted(tokenizer, write):
    loaded = supervised(tokenizer, write(LONG, SHORT, FAR), max_sequence_tokens=6, on_overlong="drop", **PLAIN)
    assert [sample.uid for sample in loaded.rows] == ["train.jsonl line 2"]
    assert loaded.counts == {"num_rows": 3, "num_dropped": 2, "num_truncated": 0}


def test_overlong_sequences_are_cut_at_the_end_and_dropped_where_nothing_to_train_is_left(tokenizer, write):
    loaded = supervised(tokenizer, write(LONG, SHORT, FAR), max_sequence_tokens=6, on_overlong="truncate", **PLAIN)
    assert [tokenizer.decode(sample.token_ids) for sample in loaded.rows] == ["123=ab", "1=1<|end|>"]
    assert [trained_text(tokenizer, sample) for sample in loaded.rows] == ["ab", "1<|end|>"]
    assert loaded.counts == {"num_rows": 3, "num_dropped": 1, "num_truncated": 1}


def test_rows_that_are_not_left_whole_are_said_once_and_warned_of_where_many_are_dropped(tokenizer, write, capsys):
    """More than a tenth are many: of ten rows two, and not one."""
    rows = [SHORT] * 8
    limit, policy = "data.max_sequence_tokens=6", {"max_sequence_tokens": 6, "on_overlong": "drop"}
    supervised(tokenizer, write(*rows), **policy, **PLAIN)
    assert capsys.readouterr() == ("", "")
    (path,) = write(*rows, SHORT, LONG)
    supervised(tokenizer, [path], **policy, **PLAIN)
    assert capsys.readouterr() == ("", f"{path}: 9 of 10 rows, 1 dropped ({limit}, data.on_overlong=drop)\n")
    (path,) = write(*rows, LONG, LONG)
    supervised(tokenizer, [path], **policy, **PLAIN)
    assert capsys.readouterr().err == f"warning: {path}: 8 of 10 rows, 2 dropped ({limit}, data.on_overlong=drop)\n"
    supervised(
        tokenizer, [path, *write(SHORT, FAR, name="b.jsonl")], max_sequence_tokens=6, on_overlong="truncate", **PLAIN
    )
    assert capsys.readouterr().err == (
        f"{path} and 1 more file: 11 of 12 rows, 1 dropped, 2 truncated ({limit}, data.on_overlong=truncate)\n"
    )
    (path,) = write(RL_ROW, {**RL_ROW, "prompt": "100+200="})
    prompts(tokenizer, [path], max_prompt_tokens=4, on_overlong="drop", **PLAIN)
    assert capsys.readouterr().err == (
        f"warning: {path}: 1 of 2 rows, 1 dropped (data.max_prompt_tokens=4, data.on_overlong=drop)\n"
    )


@pytest.mark.parametrize(
    ("policy", "effect"), [("drop", "drops them"), ("truncate", "leaves nothing of them to train")]
)
def test_nothing_left_is_an_error_with_the_numbers(tokenizer, write, policy, effect):
    with pytest.raises(DataError) as error:
        supervised(tokenizer, write(FAR, FAR), max_sequence_tokens=6, on_overlong=policy, **PLAIN)
    assert str(error.value) == (
        f"0 of 2 rows left: all 2 are longer than data.max_sequence_tokens=6, and data.on_overlong={policy} {effect}; "
        "raise the limit"
    )
    if policy == "drop":
        with pytest.raises(DataError, match=r"^0 of 1 rows left: all 1 are longer than data\.max_prompt_tokens=3"):
            prompts(tokenizer, write(RL_ROW), max_prompt_tokens=3, on_overlong=policy, **PLAIN)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "answer": ["7"]}, 'there is no column "response"; the columns are "prompt", "answer"'),
        ({"response": "a"}, 'there is no column "prompt"; the columns are "response"'),
        ({"prompt": "a", "response": ["7", "8"]}, 'column "response" is a list, expected a string: ["7", "8"]'),
        ({"prompt": 7, "response": "a"}, 'column "prompt" is a number, expected a string or a list of messages: 7'),
        ({"prompt": "", "response": "a"}, "the prompt is empty"),
        (
            {"question": "a", "answer": "b"},
            'neither a conversation in "messages" nor a prompt in "prompt" with a response in "response"; the columns '
            'are "question", "answer"; set data.messages_column, or data.prompt_column and data.response_column',
        ),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            'column "messages" is a conversation, which only a chat template turns into text',
        ),
    ],
)
def test_supervised_rows_that_cannot_be_used_are_refused_by_line(tokenizer, write, row, message):
    with pytest.raises(DataError, match=re.escape(f"train.jsonl line 2: {message}")):
        supervised(tokenizer, write(SHORT, row), **PLAIN)


SHOWN = {name: {"function": {"name": name, "parameters": {name: {"type": "string"}}}} for name in ("now", "search")}


def test_supervised_rows_show_their_tools(tokenizer, write, tmp_path):
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    schemas = list(SHOWN.values())
    rows = [{"prompt": "2+3=", "response": "5", "tools": given} for given in (schemas, json.dumps(schemas), [], None)]
    talk = [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}]
    rows.append({"messages": talk, "tools": schemas})
    parquet.write_table(pyarrow.Table.from_pylist(rows[:1]), tmp_path / "t.parquet")  # has nulls where keys differ
    found = supervised(tokenizer, [*write(*rows), str(tmp_path / "t.parquet")]).rows
    offered = "".join(map(json.dumps, schemas))
    shown = [offered, offered, "", "", offered, offered]
    assert [tokenizer.decode(sample.token_ids) for sample in found] == [f"{tools}2+3=5<|end|>" for tools in shown]
    assert [trained_text(tokenizer, sample) for sample in found] == ["5<|end|>"] * 6
    own = supervised(tokenizer, write({**rows[0], "offers": schemas[:1]}), tools_column="offers").rows
    assert tokenizer.decode(own[0].token_ids) == f"{json.dumps(schemas[0])}2+3=5<|end|>"


@pytest.mark.parametrize(
    ("given", "shown"), [(["now"], '"now"'), ("now", '"now"'), ([{"name": "now"}], '{"name": "now"}'), (7, "7")]
)
def test_supervised_tools_that_are_no_schemas_are_refused_by_line(tokenizer, write, given, shown):
    files = write({"prompt": "2+3=", "response": "5", "tools": given})
    with pytest.raises(DataError, match=re.escape(f'train.jsonl line 1: column "tools" has {shown}, expected a list')):
        supervised(tokenizer, files)
    assert len(supervised(tokenizer, files, **PLAIN).rows) == 1


def test_messages_cell_that_is_no_list_is_refused(tokenizer, write):
    with pytest.raises(DataError, match=r"train\.jsonl line 1: the messages are a string, expected a list"):
        supervised(tokenizer, write({"messages": "hello"}))


def test_verl_parquet_works_unchanged(tokenizer, tmp_path):
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "2+3="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "5"},
            "extra_info": {"split": "train", "index": 0, "answer": "2+3 is 5 #### 5"},
        }
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    text = "<|user|>2+3=<|end|><|assistant|>"
    assert prompts(tokenizer, [str(tmp_path / "train.parquet")]).rows == [
        Example(
            uid="train.parquet row 0",
            prompt_ids=tokenizer.encode(text),
            prompt=text,
            data_source="openai/gsm8k",
            ground_truth="5",
            extra_info={"split": "train", "index": 0, "answer": "2+3 is 5 #### 5"},
            messages=[{"role": "user", "content": "2+3="}],
        )
    ]


def test_absent_source_and_extra_info_have_defaults(tokenizer, write):
    [example] = prompts(tokenizer, write(RL_ROW, name="sums.jsonl"), **PLAIN).rows
    assert (example.data_source, example.extra_info, example.prompt) == ("sums", {}, "2+3=")


def test_the_text_of_a_plain_prompt_is_that_of_the_row(tokenizer, write):
    """A reward model's tokenizer adds its special tokens to it by itself."""
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    [example] = prompts(tokenizer, write(RL_ROW), **PLAIN).rows
    assert example.prompt == "2+3="
    assert example.prompt_ids == tokenizer.encode("2+3=")
    assert example.prompt_ids[0] == tokenizer.bos_token_id


def test_without_a_reward_no_ground_truth_is_needed(tokenizer, write):
    files = write({"prompt": "2+3="}, {"prompt": "1+1=", "reward_model": {"ground_truth": None}})
    with pytest.raises(DataError, match=r"there is no column \"reward_model\.ground_truth\""):
        prompts(tokenizer, files, **PLAIN)
    found = prompt_examples(EvalDataConfig(**PLAIN), files, tokenizer, max_rows=None, is_judged=False)
    assert [example.ground_truth for example in found.rows] == [None, None]


def test_ground_truth_may_be_any_json_value_from_any_column(tokenizer, write):
    files = write({"question": "2+3=", "answer": {"tests": ["5", 5]}})
    [example] = prompts(tokenizer, files, prompt_column="question", ground_truth_column="answer", **PLAIN).rows
    assert example.ground_truth == {"tests": ["5", 5]}


def test_overlong_prompts_follow_the_policy(tokenizer, write):
    files = write(RL_ROW, {**RL_ROW, "prompt": "100+200="})
    with pytest.raises(
        DataError, match=r"train\.jsonl line 2: the prompt has 8 tokens, more than data\.max_prompt_tokens=4"
    ):
        prompts(tokenizer, files, max_prompt_tokens=4, **PLAIN)
    dropped = prompts(tokenizer, files, max_prompt_tokens=4, on_overlong="drop", **PLAIN)
    assert [example.prompt for example in dropped.rows] == ["2+3="]
    assert dropped.counts == {"num_rows": 2, "num_dropped": 1, "num_truncated": 0}
    cut = prompts(tokenizer, files, max_prompt_tokens=4, on_overlong="truncate", **PLAIN)
    assert [example.prompt for example in cut.rows] == ["2+3=", "200="]
    assert cut.rows[1].prompt_ids == tokenizer.encode("200=")
    assert cut.counts == {"num_rows": 2, "num_dropped": 0, "num_truncated": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": {"a": 1}}, 'column "prompt" is an object, expected a string or a list of messages: {"a": 1}'),
        (
            {"reward_model": {"style": "rule"}},
            'there is no column "reward_model.ground_truth"; the columns are "prompt", ',
        ),
        ({"reward_model": {"ground_truth": None}}, 'column "reward_model.ground_truth" is null'),
        ({"reward_model": {"ground_truth": math.nan}}, 'column "reward_model.ground_truth" is NaN, so the reward'),
        ({"data_source": ["x"]}, 'column "data_source" is a list, expected a string: ["x"]'),
        ({"extra_info": "x"}, 'column "extra_info" is a string, expected an object: "x"'),
        ({"prompt": " "}, "the prompt is empty"),
    ],
)
def test_prompt_rows_that_cannot_be_used_are_refused_by_line(tokenizer, write, change, message):
    with pytest.raises(DataError, match=re.escape(f"train.jsonl line 2: {message}")):
        prompts(tokenizer, write(RL_ROW, {**RL_ROW, **change}), **PLAIN)


TOOLS = {
    name: {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("calculate", "search", "now")
}
SHOWS_TOOLS = (
    "{% if tools %}tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %};{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def test_a_row_offers_the_tools_it_names_or_all(tokenizer, write):
    tokenizer.chat_template = SHOWS_TOOLS
    files = write({**RL_ROW, "tools": ["now", "search"]}, RL_ROW, {**RL_ROW, "tools": None}, {**RL_ROW, "tools": []})
    found = prompt_examples(PromptDataConfig(), files, tokenizer, max_rows=None, tools=TOOLS).rows
    everything = ["calculate", "search", "now"]
    assert [example.tools for example in found] == [["now", "search"], everything, everything, []]
    shown = ["tools: now search;", "tools: calculate search now;", "tools: calculate search now;", ""]
    assert [example.prompt for example in found] == [f"{tools}2+3=>" for tools in shown]


def test_a_row_may_name_its_tools_by_their_schemas_or_as_a_string_of_json(tokenizer, write):
    schemas = [TOOLS["now"], TOOLS["search"]]
    files = write(
        *({**RL_ROW, "tools": given} for given in (schemas, json.dumps(schemas), '["now", "search"]', "null"))
    )
    found = prompt_examples(PromptDataConfig(), files, tokenizer, max_rows=None, tools=TOOLS).rows
    assert [example.tools for example in found] == [["now", "search"]] * 3 + [["calculate", "search", "now"]]


def test_without_tools_their_column_is_not_read(tokenizer, write):
    (example,) = prompts(tokenizer, write({**RL_ROW, "tools": "anything"})).rows
    assert example.tools is None


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["now", "brew"], '"brew"'),
        ("now", '"now"'),
        ([3], "3"),
        ([TOOLS["now"], {"function": {"name": "brew"}}], re.escape('{"function": {"name": "brew"}}')),
        ([{"name": "now"}], re.escape('{"name": "now"}')),
        ({"now": 1}, re.escape('{"now": 1}')),
    ],
)
def test_a_tool_that_is_not_there_is_refused_by_line(tokenizer, write, given, shown):
    files = write({**RL_ROW, "offers": given})
    config = PromptDataConfig(tools_column="offers")
    expected = (
        rf'train\.jsonl line 1: column "offers" has {shown}, expected a list of names from calculate, search, now'
    )
    with pytest.raises(DataError, match=expected):
        prompt_examples(config, files, tokenizer, max_rows=None, tools=TOOLS)

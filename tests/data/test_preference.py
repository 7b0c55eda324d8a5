import json
import random
import re

import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from benchmarks.preference_problems import preference_problems
from shardwise.config import DataError, PreferenceDataConfig, SupervisedDataConfig
from shardwise.data import supervised_samples
from shardwise.data.chat import render_conversation, render_response_sample
from shardwise.data.packing import pack
from shardwise.data.preference import _next_others, labelled_samples, mismatched, preference_pairs
from shardwise.types import Sample

PLAIN = {"apply_chat_template": False}
PAIR = {"prompt": "2+3=", "chosen": "5", "rejected": "7"}


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def write(tmp_path):
    def write_rows(*rows):
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return [str(tmp_path / "train.jsonl")]

    return write_rows


def pairs(tokenizer, files, *, max_rows=None, vision=None, media_token_ids=(), **settings):
    options = {"max_rows": max_rows, "vision": vision, "media_token_ids": media_token_ids}
    return preference_pairs(PreferenceDataConfig(**settings), files, tokenizer, **options)


def labelled(tokenizer, files, *, max_rows=None, vision=None, media_token_ids=(), **settings):
    options = {"max_rows": max_rows, "vision": vision, "media_token_ids": media_token_ids}
    return labelled_samples(PreferenceDataConfig(**settings), files, tokenizer, **options)


def texts(tokenizer, samples):
    """Of each sample: everything, and what of it is trained."""
    return [(tokenizer.decode(s.token_ids), tokenizer.decode(s.token_ids[s.loss_mask])) for s in samples]


def assert_rendered(sample, rendered):
    token_ids, loss_mask = rendered
    assert sample.token_ids.tolist() == token_ids
    assert sample.loss_mask.tolist() == loss_mask
    assert (sample.token_ids.dtype, sample.loss_mask.dtype) == (torch.int64, torch.bool)


@pytest.mark.parametrize("apply_chat_template", [True, False])
@pytest.mark.parametrize("system_prompt", [None, "be kind"])
def test_each_side_is_what_rendering_it_alone_gives(tokenizer, write, apply_chat_template, system_prompt):
    if system_prompt and not apply_chat_template:
        return
    settings = {"apply_chat_template": apply_chat_template, "system_prompt": system_prompt}
    files = write(PAIR, {"prompt": "40+2=", "chosen": "I say 42", "rejected": "41"})
    loaded = pairs(tokenizer, files, **settings)
    expected = [("2+3=", "5"), ("2+3=", "7"), ("40+2=", "I say 42"), ("40+2=", "41")]
    for sample, (prompt, response) in zip(loaded.rows, expected, strict=True):
        assert_rendered(sample, render_response_sample(tokenizer, prompt, response, origin="row", **settings))
    assert [sample.uid for sample in loaded.rows] == [
        "train.jsonl line 1 chosen",
        "train.jsonl line 1 rejected",
        "train.jsonl line 2 chosen",
        "train.jsonl line 2 rejected",
    ]
    assert [sample.group for sample in loaded.rows] == [0, 0, 1, 1]
    assert [sample.reward for sample in loaded.rows] == [0.0] * 4
    assert loaded.counts == {"num_rows": 2, "num_dropped": 0, "num_truncated": 0, "num_identical": 0}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "chosen": "ho", "rejected": "no"},
        {"prompt": [user("hi")], "chosen": "ho", "rejected": "no"},
        {"prompt": [user("hi")], "chosen": [bot("ho")], "rejected": [bot("no")]},
        {"prompt": "hi", "chosen": [bot("ho")], "rejected": "no"},
        {"chosen": [user("hi"), bot("ho")], "rejected": [user("hi"), bot("no")]},
        {"prompt": "hi", "chosen": [user("hi"), bot("ho")], "rejected": [user("hi"), bot("no")]},
        {"chosen": [user("hi"), bot("ho"), user("and")], "rejected": [user("hi"), bot("no")]},
    ],
    ids=["text", "messages and text", "explicit prompt", "mixed", "implicit prompt", "ultrafeedback", "trailing turn"],
)
def test_all_forms_of_one_pair_give_the_same_samples(tokenizer, write, row):
    start = "<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>"
    found = pairs(tokenizer, write(row), system_prompt="be kind").rows
    assert texts(tokenizer, found) == [(f"{start}ho<|end|>", "ho<|end|>"), (f"{start}no<|end|>", "no<|end|>")]


def test_contents_that_parquet_has_as_bytes_are_words(tokenizer, tmp_path):
    talk = [{"role": "user", "content": b"hi"}, {"role": "assistant", "content": b"ho"}]
    other = [talk[0], {"role": "assistant", "content": b"no"}]
    parquet.write_table(pyarrow.Table.from_pylist([{"chosen": talk, "rejected": other}]), tmp_path / "train.parquet")
    found = pairs(tokenizer, [str(tmp_path / "train.parquet")]).rows
    assert [trained for _, trained in texts(tokenizer, found)] == ["ho<|end|>", "no<|end|>"]


def test_only_turns_after_the_shared_beginning_are_trained(tokenizer, write):
    shared = [user("a"), bot("b"), user("c")]
    found = pairs(tokenizer, write({"chosen": [*shared, bot("d")], "rejected": [*shared, bot("e")]})).rows
    assert [trained for _, trained in texts(tokenizer, found)] == ["d<|end|>", "e<|end|>"]
    assert_rendered(found[0], render_conversation(tokenizer, [*shared, bot("d")], "row", trained_from=3))


def test_conversations_that_part_early_are_trained_from_there(tokenizer, write):
    """The last turns are the same; what distinguishes them is the first."""
    row = {"chosen": [user("a"), bot("b"), user("c"), bot("d")], "rejected": [user("a"), bot("x"), user("c"), bot("d")]}
    trained = [trained for _, trained in texts(tokenizer, pairs(tokenizer, write(row)).rows)]
    assert trained == ["b<|end|>d<|end|>", "x<|end|>d<|end|>"]


def test_parquet_rows_with_nulls_in_their_messages(tokenizer, tmp_path):
    """Arrow gives every message the keys of all; a name that only one side's message has would part them."""
    chosen = [{"role": "user", "content": "hi", "name": None}, {"role": "assistant", "content": "ho", "name": "b"}]
    rejected = [user("hi"), bot("no")]
    parquet.write_table(pyarrow.Table.from_pylist([{"chosen": chosen, "rejected": rejected}]), tmp_path / "a.parquet")
    found = pairs(tokenizer, [str(tmp_path / "a.parquet")]).rows
    assert [sample.uid for sample in found] == ["a.parquet row 0 chosen", "a.parquet row 0 rejected"]
    assert [trained for _, trained in texts(tokenizer, found)] == ["ho<|end|>", "no<|end|>"]


def test_margin_is_the_reward_of_the_chosen_side(tokenizer, write):
    files = write({**PAIR, "info": {"gap": 2}}, {**PAIR, "info": {"gap": 0.25}})
    found = pairs(tokenizer, files, margin_column="info.gap", **PLAIN).rows
    assert [sample.reward for sample in found] == [2.0, 0.0, 0.25, 0.0]


def test_own_column_names_are_used(tokenizer, write):
    files = write({"q": "2+3=", "good": "5", "bad": "7"})
    found = pairs(tokenizer, files, prompt_column="q", chosen_column="good", rejected_column="bad", **PLAIN).rows
    assert [sample.uid for sample in found] == ["train.jsonl line 1 good", "train.jsonl line 1 bad"]
    assert texts(tokenizer, found) == [("2+3=5<|end|>", "5<|end|>"), ("2+3=7<|end|>", "7<|end|>")]


LONG = {"prompt": "2+3=", "chosen": "5", "rejected": "abcdefgh"}


def test_a_pair_is_overlong_if_one_side_is(tokenizer, write):
    with pytest.raises(DataError) as error:
        pairs(tokenizer, write(PAIR, LONG), max_sequence_tokens=8, **PLAIN)
    assert str(error.value) == (
        "train.jsonl line 2: the sequence has 13 tokens, more than data.max_sequence_tokens=8; "
        "raise it, or set data.on_overlong to drop or truncate"
    )
    dropped = pairs(tokenizer, write(LONG, PAIR), max_sequence_tokens=8, on_overlong="drop", **PLAIN)
    assert texts(tokenizer, dropped.rows) == [("2+3=5<|end|>", "5<|end|>"), ("2+3=7<|end|>", "7<|end|>")]
    assert [sample.group for sample in dropped.rows] == [0, 0]
    assert dropped.counts == {"num_rows": 2, "num_dropped": 1, "num_truncated": 0, "num_identical": 0}


def test_both_sides_are_cut_at_the_same_length(tokenizer, write):
    row = {"prompt": "2+3=", "chosen": "123456", "rejected": "abcdefgh"}
    cut = pairs(tokenizer, write(row, LONG), max_sequence_tokens=8, on_overlong="truncate", **PLAIN)
    assert texts(tokenizer, cut.rows) == [
        ("2+3=1234", "1234"),
        ("2+3=abcd", "abcd"),
        ("2+3=5<|end|>", "5<|end|>"),
        ("2+3=abcd", "abcd"),
    ]
    assert cut.counts == {"num_rows": 2, "num_dropped": 0, "num_truncated": 2, "num_identical": 0}


def test_a_pair_goes_where_cutting_leaves_a_side_nothing_to_train_or_no_difference(tokenizer, write):
    no_answer_left = {"prompt": "12345678=", "chosen": "1", "rejected": "2"}
    same_when_cut = {"prompt": "2+3=", "chosen": "55556", "rejected": "55557"}
    files = write(no_answer_left, same_when_cut, PAIR)
    loaded = pairs(tokenizer, files, max_sequence_tokens=8, on_overlong="truncate", **PLAIN)
    assert [sample.uid for sample in loaded.rows] == ["train.jsonl line 3 chosen", "train.jsonl line 3 rejected"]
    assert loaded.counts == {"num_rows": 3, "num_dropped": 2, "num_truncated": 0, "num_identical": 1}


@pytest.mark.parametrize("settings", [{}, PLAIN])
def test_pairs_of_one_answer_are_dropped_and_counted(tokenizer, write, settings, capsys):
    loaded = pairs(tokenizer, write({**PAIR, "rejected": "5"}, PAIR), **settings)
    assert [sample.uid for sample in loaded.rows] == ["train.jsonl line 2 chosen", "train.jsonl line 2 rejected"]
    assert loaded.counts == {"num_rows": 2, "num_dropped": 1, "num_truncated": 0, "num_identical": 1}
    said = "train.jsonl: 1 of 2 rows, 1 dropped, 1 of these with the same answer twice (data.max_sequence_tokens=2048, "
    assert said in capsys.readouterr().err


def test_nothing_left_is_an_error_with_the_reason(tokenizer, write):
    with pytest.raises(DataError) as error:
        pairs(tokenizer, write({**PAIR, "rejected": "5"}, {**PAIR, "rejected": "5"}))
    assert str(error.value) == (
        '0 of 2 rows left: in 2 of them "chosen" and "rejected" are the same up to data.max_sequence_tokens=2048; '
        "set data.chosen_column and data.rejected_column to columns that differ, or raise the limit"
    )
    with pytest.raises(DataError, match=r"^0 of 1 rows left: all 1 are longer than data\.max_sequence_tokens=3, and"):
        pairs(tokenizer, write(PAIR), max_sequence_tokens=3, on_overlong="drop")
    with pytest.raises(DataError, match=r"train\.jsonl is empty"):
        pairs(tokenizer, write())


PARTED = '"chosen" and "rejected" do not answer the same messages: after'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": 5}, 'column "chosen" is a number, expected a string or a list of messages: 5'),
        ({"rejected": None}, 'column "rejected" is null, expected a string or a list of messages: null'),
        ({"rejected": []}, 'column "rejected": the messages are an empty list, expected a list of {role, content}'),
        ({"chosen": [{"role": "user"}]}, 'column "chosen": message 1 has no "content": {"role": "user"}'),
        ({"prompt": 7}, 'column "prompt" is a number, expected a string or a list of messages: 7'),
        (
            {"chosen": [user("a"), bot("b")], "rejected": [user("x"), bot("c")]},
            f'{PARTED} 0 that they share they go on with {{"role": "user", "content": "a"}} and '
            '{"role": "user", "content": "x"}, expected an assistant turn in both; fix the row or remove it',
        ),
        (
            {"chosen": [user("a"), bot("b"), user("c"), bot("d")], "rejected": [user("a"), bot("b")]},
            f'{PARTED} 2 that they share they go on with {{"role": "user", "content": "c"}} and nothing, expected',
        ),
        ({"gap": "2"}, 'column "gap" is a string, expected a finite number: "2"'),
        ({"gap": True}, 'column "gap" is a boolean, expected a finite number: true'),
        ({"gap": -0.5}, 'column "gap" is -0.5: it says how much better the chosen answer is, so from 0 on; exchange'),
        ({"gap": float("nan")}, 'column "gap" is a number, expected a finite number: NaN'),
        ({"gap": 10**400}, 'column "gap" is a number, expected a finite number: 1000'),
    ],
)
def test_pairs_that_cannot_be_used_are_refused_by_line(tokenizer, write, change, message):
    files = write({**PAIR, "gap": 1}, {**PAIR, "gap": 1, **change})
    with pytest.raises(DataError, match=re.escape(f"train.jsonl line 2: {message}")):
        pairs(tokenizer, files, margin_column="gap")


@pytest.mark.parametrize("column", ["prompt", "chosen", "rejected"])
@pytest.mark.parametrize("settings", [{}, PLAIN])
def test_a_missing_column_is_named(tokenizer, write, column, settings):
    row = {name: cell for name, cell in PAIR.items() if name != column}
    with pytest.raises(DataError, match=rf'^train\.jsonl line 1: there is no column "{column}"; the columns are'):
        pairs(tokenizer, write(row), **settings)


def test_conversations_need_the_chat_template(tokenizer, write):
    files = write({**PAIR, "rejected": [bot("7")]})
    with pytest.raises(DataError) as error:
        pairs(tokenizer, files, **PLAIN)
    assert str(error.value) == (
        'train.jsonl line 1: column "rejected" is a list, and data.apply_chat_template=false takes strings: '
        '[{"role": "assistant", "content": "7"}]; set data.apply_chat_template=true'
    )


def test_packing_keeps_pairs_as_neighbours_in_one_batch(tokenizer, tmp_path):
    files = preference_problems(tmp_path, seed=0)
    samples = pairs(tokenizer, [str(files.pairs_train)], max_rows=30).rows
    step = pack(samples, num_shards=2, max_tokens=128, keep_together=2)
    batches = [batch for shard in step.shards for batch in shard]
    assert len(batches) > 4
    for batch in batches:
        chosen, rejected = batch.sample_index[::2], batch.sample_index[1::2]
        assert [index + 1 for index in chosen] == rejected
        assert all(index % 2 == 0 for index in chosen)
    assert sorted(index for batch in batches for index in batch.sample_index) == list(range(60))
    assert step.denominators.num_sequences == 60


def test_labels_become_rewards(tokenizer, write):
    files = write(
        {"prompt": "2+3=", "response": "5", "label": True},
        {"prompt": [user("2+3=")], "response": [bot("7")], "label": False},
        {"response": [user("2+3="), bot("no"), user("2+3="), bot("5")], "label": True},
    )
    loaded = labelled(tokenizer, files)
    start = "<|user|>2+3=<|end|><|assistant|>"
    assert texts(tokenizer, loaded.rows) == [
        (f"{start}5<|end|>", "5<|end|>"),
        (f"{start}7<|end|>", "7<|end|>"),
        (f"{start}no<|end|>{start}5<|end|>", "5<|end|>"),
    ]
    assert [(s.reward, s.group, s.uid) for s in loaded.rows] == [
        (1.0, 0, "train.jsonl line 1"),
        (-1.0, 1, "train.jsonl line 2"),
        (1.0, 2, "train.jsonl line 3"),
    ]
    assert loaded.counts == {"num_rows": 3, "num_dropped": 0, "num_truncated": 0, "num_desirable": 2}


def test_plain_answers_follow_the_overlong_policy(tokenizer, write):
    rows = [{"q": "2+3=", "completion": text, "good": len(text) > 1} for text in ("5", "abcdefgh")]
    columns = {"prompt_column": "q", "response_column": "completion", "label_column": "good"}
    limit = {"max_sequence_tokens": 8, **columns, **PLAIN}
    with pytest.raises(DataError, match=r"^train\.jsonl line 2: the sequence has 13 tokens, more than"):
        labelled(tokenizer, write(*rows), **limit)
    dropped = labelled(tokenizer, write(*rows), on_overlong="drop", **limit)
    assert dropped.counts == {"num_rows": 2, "num_dropped": 1, "num_truncated": 0, "num_desirable": 0}
    cut = labelled(tokenizer, write(*rows), on_overlong="truncate", **limit)
    assert texts(tokenizer, cut.rows) == [("2+3=5<|end|>", "5<|end|>"), ("2+3=abcd", "abcd")]
    assert cut.counts == {"num_rows": 2, "num_dropped": 0, "num_truncated": 1, "num_desirable": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": 1}, 'column "label" is a number, expected true (desirable) or false: 1'),
        ({"label": "true"}, 'column "label" is a string, expected true (desirable) or false: "true"'),
        ({"label": None}, 'column "label" is null, expected true (desirable) or false: null'),
        ({"response": 5}, 'column "response" is a number, expected a string or a list of messages: 5'),
        ({"response": [user("a")]}, "the conversation has no assistant turn"),
    ],
)
def test_labelled_rows_that_cannot_be_used_are_refused_by_line(tokenizer, write, change, message):
    row = {"prompt": "2+3=", "response": "5", "label": True}
    with pytest.raises(DataError, match=re.escape(f"train.jsonl line 2: {message}")):
        labelled(tokenizer, write(row, {**row, **change}))
    with pytest.raises(DataError, match=r'^train\.jsonl line 1: there is no column "label"; the columns are'):
        labelled(tokenizer, write({"prompt": "2+3=", "response": "5"}))


def answered(tokenizer, *rows):
    """Samples of (prompt, answer)."""
    samples = []
    for number, (prompt, answer) in enumerate(rows):
        token_ids, loss_mask = render_response_sample(
            tokenizer, prompt, answer, apply_chat_template=False, system_prompt=None, origin="row"
        )
        samples.append(
            Sample(
                uid=str(number),
                token_ids=torch.tensor(token_ids),
                loss_mask=torch.tensor(loss_mask),
                reward=1.0,
                group=number,
            )
        )
    return samples


def test_mismatched_gives_each_prompt_the_next_answer(tokenizer):
    samples = answered(tokenizer, ("1+1=", "2"), ("2+2=", "four"), ("3+3=", "6"))
    mixed = mismatched(samples, max_tokens=100)
    assert texts(tokenizer, mixed) == [
        ("1+1=four<|end|>", "four<|end|>"),
        ("2+2=6<|end|>", "6<|end|>"),
        ("3+3=2<|end|>", "2<|end|>"),
    ]
    assert [(s.uid, s.reward, s.group) for s in mixed] == [
        ("0 with the answer of 1", 0.0, 0),
        ("1 with the answer of 2", 0.0, 1),
        ("2 with the answer of 0", 0.0, 2),
    ]


def test_mismatched_passes_over_answers_to_the_same_prompt(tokenizer):
    """Rows made from pairs come with the same prompt twice in a row: the next answer would be one to this prompt."""
    samples = answered(tokenizer, ("1+1=", "2"), ("1+1=", "3"), ("2+2=", "4"), ("2+2=", "5"))
    assert [text for text, _ in texts(tokenizer, mismatched(samples, max_tokens=100))] == [
        "1+1=4<|end|>",
        "1+1=4<|end|>",
        "2+2=2<|end|>",
        "2+2=2<|end|>",
    ]
    alike = answered(tokenizer, ("1+1=", "2"), ("1+1=", "3"))
    assert [text for text, _ in texts(tokenizer, mismatched(alike, max_tokens=100))] == ["1+1=3<|end|>", "1+1=2<|end|>"]


def test_the_next_sample_with_another_prompt_is_found_for_all_at_once():
    for values in (random.choices("ab", k=size) for size in range(2, 40) for _ in range(20)):
        around = [[*range(index + 1, len(values)), *range(index)] for index in range(len(values))]
        expected = [next((o for o in others if values[o] != values[i]), others[0]) for i, others in enumerate(around)]
        assert _next_others(values) == expected


class Counted(str):
    """A value that counts how often it is compared with another one."""

    num_compared = 0

    def __ne__(self, other):
        Counted.num_compared += 1
        return super().__ne__(other)

    __hash__ = str.__hash__


def test_looking_for_other_prompts_takes_time_in_proportion_to_the_samples():
    _next_others([Counted("a")] * 999 + [Counted("b")])
    assert Counted.num_compared <= 2000


def test_mismatched_sequences_are_cut_and_keep_a_trained_token(tokenizer):
    """Both samples fit 8 tokens; the longer prompt with the longer answer does not."""
    samples = answered(tokenizer, ("123456=", "7"), ("1=", "abcde"))
    samples[0] = Sample(uid="0", token_ids=samples[0].token_ids[:8], loss_mask=samples[0].loss_mask[:8])
    mixed = mismatched(samples, max_tokens=8)
    assert texts(tokenizer, mixed) == [("123456=a", "a"), ("1=7", "7")]


SCHEMA = {"type": "function", "function": {"name": "add"}}


def test_rows_show_their_tools(tokenizer, write):
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    shown = json.dumps(SCHEMA)
    loaded = pairs(tokenizer, write({**PAIR, "tools": [SCHEMA]}))
    assert texts(tokenizer, loaded.rows) == [(f"{shown}2+3={n}<|end|>", f"{n}<|end|>") for n in (5, 7)]
    answer = {"prompt": "2+3=", "response": "5", "label": True, "offers": [SCHEMA]}
    loaded = labelled(tokenizer, write(answer), tools_column="offers")
    assert texts(tokenizer, loaded.rows) == [(f"{shown}2+3=5<|end|>", "5<|end|>")]


@pytest.fixture
def pictures(tmp_path):
    """Two files of 2 and 3 tokens beside the rows."""
    for number, size in enumerate(((16, 8), (8, 24))):
        Image.new("RGB", size, (90 * number, 90, 200)).save(tmp_path / f"{number}.png")
    return ["0.png", "1.png"]


IMAGE, WHICH = {"type": "image"}, {"type": "text", "text": "Which?"}
SEEN = {"chosen": "5", "rejected": "7", "response": "5", "label": True}


def learnt(seeing, files, messages, images, tmp_path):
    """What `shardwise sft` makes of a conversation."""
    (tmp_path / "sft.jsonl").write_text(json.dumps({"messages": messages, "images": images}))
    return supervised_samples(SupervisedDataConfig(), [str(tmp_path / "sft.jsonl")], **seeing, max_rows=None).rows[0]


def assert_shows(found, expected):
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.loss_mask, expected.loss_mask)
    assert torch.equal(found.position_ids, expected.position_ids)
    assert [(one.path, one.size) for one in found.image_refs] == [(one.path, one.size) for one in expected.image_refs]


def test_a_system_prompt_has_no_places_for_images(seeing, write, pictures, tmp_path):
    row = SEEN | {"prompt": "<image>Which?", "images": pictures[:1]}
    found = pairs(**seeing, files=write(row), system_prompt="Answer about the <image>.").rows[0]
    assert "about the <image>." in seeing["tokenizer"].decode(found.token_ids)
    assert [image.path for image in found.image_refs] == [str(tmp_path / "0.png")]


@pytest.mark.parametrize(
    ("question", "answers"),
    [
        ("<image>Which?<image>", ["5", "7"]),
        ([user("<image>Which?<image>")], [[bot("5")], "7"]),
        ([user([IMAGE, WHICH, IMAGE])], [[bot([{"type": "text", "text": "5"}])], [bot("7")]]),
        ([user([IMAGE | {"image": "0.png"}, WHICH, IMAGE | {"path": "1.png"}])], ["5", "7"]),
        (None, [[user([IMAGE, WHICH, IMAGE]), bot("5")], [user([IMAGE, WHICH, IMAGE]), bot("7")]]),
    ],
    ids=["text", "messages", "trl", "own images", "implicit prompt"],
)
def test_answers_to_images_are_what_supervised_training_reads(seeing, write, pictures, tmp_path, question, answers):
    """Both sides of a pair, and a labelled answer: tokens, positions and images of the conversation."""
    row = {"prompt": question, "chosen": answers[0], "rejected": answers[1], "response": answers[0], "label": True}
    if "0.png" not in json.dumps(question):
        row["images"] = pictures
    files = write(row, SEEN | {"prompt": "2+3="})
    chosen, rejected, *words = pairs(files=files, **seeing).rows
    (answer, _) = labelled(files=files, **seeing).rows
    for found, said in ((chosen, "5"), (rejected, "7"), (answer, "5")):
        assert_shows(found, learnt(seeing, files, [user("<image>Which?<image>"), bot(said)], pictures, tmp_path))
    assert [sample.position_ids for sample in words] == [None, None]
    assert [sample.image_refs for sample in words] == [[], []]


def test_parts_hold_bytes_of_images_in_parquet(seeing, pictures, tmp_path):
    """A list of messages with nulls, as arrow gives it."""
    parts = [IMAGE | {"image": {"bytes": (tmp_path / "0.png").read_bytes()}, "text": None}, WHICH | {"image": None}]
    row = {"prompt": [{"role": "user", "content": parts}], "chosen": "5", "rejected": "7"}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    chosen, rejected = pairs(files=[str(tmp_path / "a.parquet")], **seeing).rows
    assert chosen.image_refs[0].data.numpy().tobytes() == (tmp_path / "0.png").read_bytes()
    assert rejected.image_refs[0] is chosen.image_refs[0]


def test_a_row_that_is_cut_before_its_answer_goes_with_its_images(seeing, write, pictures):
    question = {"prompt": "<image>Which?<image>", "images": pictures}
    files = write(SEEN | question, SEEN | {"prompt": "2+"})
    whole = pairs(files=files, **seeing).rows[0]
    keys = {"max_sequence_tokens": int(whole.loss_mask.int().argmax()), "on_overlong": "truncate"}
    for read, count in ((pairs, 2), (labelled, 1)):
        assert [len(sample.image_refs) for sample in read(files=files, **seeing, **keys).rows] == [0] * count
    keys["max_sequence_tokens"] += 1
    loaded = pairs(files=files, **seeing, **keys)
    assert loaded.counts["num_truncated"] == 1
    assert [len(sample.image_refs) for sample in loaded.rows] == [2, 2, 0, 0]


IN_ANSWER = "an answer, or what follows one, has a place for an image (<image> in a string, or "


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"images": ["0.png"]}, 'column "images" has 1 images, and the messages have places for 2'),
        ({"images": ["0.png"] * 3}, 'column "images" has 3 images, and the messages have places for 2'),
        ({"images": ["0.png", "none.png"]}, "image 2 (none.png): there is no file"),
        ({"images": ["0.png", "text.png"]}, "image 2 (text.png) is damaged, or no image"),
        ({"prompt": "<image><image><|image_pad|>"}, "the text has 3 times '<|image_pad|>' for 2 images"),
        ({"prompt": [user([{"type": "video"}])]}, 'a part of a content is {"type": "video"}, expected'),
        ({"chosen": "<image>", "response": "<image>"}, IN_ANSWER),
        ({key: [bot([IMAGE | {"image": "0.png"}])] for key in ("chosen", "response")}, IN_ANSWER),
    ],
)
def test_what_is_wrong_with_an_image_names_row_and_file(seeing, write, pictures, tmp_path, change, reason):
    (tmp_path / "text.png").write_text("no image")
    files = write(SEEN | {"prompt": "2+3="}, SEEN | {"prompt": "<image>Which?<image>", "images": pictures} | change)
    for read in (pairs, labelled):
        with pytest.raises(DataError, match=re.escape(f"train.jsonl line 2: {reason}")):
            read(files=files, **seeing)


def test_an_answer_that_spells_the_placeholder_is_a_part_of_text(seeing, write, pictures):
    """As the error says that it is to be given; LLaVA, which knows an image by it, has no such way."""
    row = SEEN | {"prompt": "<image>Which?", "images": pictures[:1]}
    for key, read in (("chosen", pairs), ("response", labelled)):
        with pytest.raises(DataError) as error:
            read(files=write(row | {key: "I see <image>."}), **seeing)
        part = '{"type": "text", "text": "<image>"}'
        assert str(error.value).endswith(
            f'or remove it. Where <image> is text, give the message as {{"role": ..., "content": [{part}]}}'
        )
        parts = [{"type": "text", "text": "I see "}, json.loads(part)]
        found = read(files=write(row | {key: [{"role": "assistant", "content": parts}]}), **seeing).rows[0]
        assert seeing["tokenizer"].decode(found.token_ids[found.loss_mask]) == "I see <image><|end|>"
        assert len(found.image_refs) == 1


def test_sides_that_show_other_images_do_not_answer_the_same_messages(seeing, write, pictures):
    chosen, rejected = ([user([IMAGE | {"image": name}, WHICH]), bot(name)] for name in pictures)
    with pytest.raises(DataError, match=f"{PARTED} 0 that they share they go on with"):
        pairs(files=write({"chosen": chosen, "rejected": rejected}), **seeing)
    later = [*chosen[:1], bot("a"), user("<image>"), bot("b")]
    with pytest.raises(DataError, match=re.escape(IN_ANSWER)):
        pairs(files=write({"chosen": [*chosen[:1], bot("c")], "rejected": later}), **seeing)


def test_mismatched_answers_keep_the_images_of_their_prompts(seeing, write, pictures, tmp_path):
    """The same words about another image are another prompt; the same image named again is not."""
    rows = [
        SEEN | {"prompt": "<image>Which?", "images": [name], "response": answer}
        for name, answer in (("0.png", "a"), ("0.png", "b"), ("twin.png", "cde"), ("1.png", "f"))
    ]
    (tmp_path / "twin.png").write_bytes((tmp_path / "0.png").read_bytes())
    samples = labelled(files=(files := write(*rows)), **seeing).rows
    found = mismatched(samples, max_tokens=100)
    expected = [("0.png", "cde"), ("0.png", "cde"), ("twin.png", "f"), ("1.png", "a")]
    for sample, (name, answer) in zip(found, expected, strict=True):
        assert_shows(sample, learnt(seeing, files, [user("<image>Which?"), bot(answer)], [name], tmp_path))
    (cut, *_) = mismatched(samples, max_tokens=len(samples[0].token_ids))
    assert cut.position_ids.shape == (3, len(samples[0].token_ids))


@pytest.mark.parametrize("read", [pairs, labelled])
def test_rows_with_images_are_refused_where_nothing_shows_them(tokenizer, seeing, write, read):
    row = {**PAIR, "response": "5", "label": True, "images": ["a.png"]}
    for options in ({"tokenizer": tokenizer}, seeing | PLAIN):
        with pytest.raises(DataError, match=r'train\.jsonl line 1: column "images" has images, which supervised'):
            read(files=write(row), **options)
        assert read(files=write({**row, "images": []}), **options).rows
    shown, plain = ({"images": [], "prompt": [user(content)]} for content in ([WHICH, IMAGE], [WHICH, WHICH]))
    with pytest.raises(DataError, match=r'line 1: a part of a content is {"type": "image"}, expected {"type": "text",'):
        read(tokenizer, write(row | shown))
    found, joined = (
        read(tokenizer, write(row | {"images": [], "prompt": text})) for text in (plain["prompt"], "Which?" * 2)
    )
    assert found.rows[0].token_ids.tolist() == joined.rows[0].token_ids.tolist()


@pytest.mark.parametrize("apply_chat_template", [True, False])
@pytest.mark.parametrize(
    ("read", "column"),
    [(pairs, "prompt"), (pairs, "chosen"), (pairs, "rejected"), (labelled, "prompt"), (labelled, "response")],
)
def test_answers_that_spell_what_stands_for_images_are_refused(tokenizer, write, read, column, apply_chat_template):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image_pad|>"]})
    media = tokenizer.convert_tokens_to_ids(["<|image_pad|>"])
    row = {**PAIR, "response": "5", "label": True}
    files = write(row, {**row, column: "a <|image_pad|>"})
    with pytest.raises(DataError, match=r"^train\.jsonl line 2: the text spells '<\|image_pad\|>', by which the model"):
        read(tokenizer, files, media_token_ids=media, apply_chat_template=apply_chat_template)
    assert read(tokenizer, files, apply_chat_template=apply_chat_template).rows

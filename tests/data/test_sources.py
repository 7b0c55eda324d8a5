import datetime
import decimal
import json

import pyarrow
import pytest
from datasets import Dataset, DatasetDict
from pyarrow import parquet

from shardwise.config import DataError, EvalDataConfig, PreferenceDataConfig
from shardwise.data.sources import Row, check_files, first_rows, get_column, get_text, has_column, preview, read_rows

CONFIG = PreferenceDataConfig()


def write_jsonl(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_the_first_row_of_every_file_is_read_but_of_tasks(tmp_path):
    one, other = (write_jsonl(tmp_path / f"{name}.jsonl", [{"a": name}, {"b": 2}]) for name in ("one", "other"))
    (tmp_path / "task.yaml").write_text("task: chain_sum\n")
    found = first_rows([one, str(tmp_path / "task.yaml"), other])
    assert [row.values for row in found] == [{"a": "one"}, {"a": "other"}]
    (tmp_path / "one.jsonl").write_text("")
    with pytest.raises(DataError, match=r"one\.jsonl is empty"):
        first_rows([other, one])


def test_a_link_that_leads_nowhere_a_pattern_and_a_folder_of_files_are_told_as_such(tmp_path):
    (tmp_path / "link.jsonl").symlink_to("gone.jsonl")
    for name in "dcba":
        write_jsonl(tmp_path / "files" / f"{name}.jsonl", [{}])
    for path, told in {
        "link.jsonl": "does not exist; it is a link to gone.jsonl; correct the link",
        "files/*.jsonl": "does not exist; patterns are not expanded; give the files themselves, as a list: ",
        "files": f"is a folder of files; give the files themselves, as a list: [{tmp_path}/files/a.jsonl,{tmp_path}",
    }.items():
        with pytest.raises(DataError) as error:
            check_files([str(tmp_path / path)])
        assert told in str(error.value)
    assert str(error.value).endswith("/files/c.jsonl,...]")


def test_jsonl_rows_keep_their_line_numbers_across_blank_lines(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text('{"a": 1}\n\n  \n{"a": "ü"}\n', encoding="utf-8")
    assert read_rows([str(file)], max_rows=None) == [
        Row(values={"a": 1}, origin="train.jsonl line 1", stem="train", folder=tmp_path),
        Row(values={"a": "ü"}, origin="train.jsonl line 4", stem="train", folder=tmp_path),
    ]


def test_jsonl_byte_order_mark_and_missing_last_newline_are_accepted(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}')
    assert [row.values for row in read_rows([str(file)], max_rows=None)] == [{"a": 1}, {"a": 2}]


def test_parquet_rows_round_trip_with_nested_values(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "2+3="}], "n": 1.5}, {"prompt": [], "n": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    found = read_rows([str(tmp_path / "x.parquet")], max_rows=None)
    assert [row.values for row in found] == rows
    assert [row.origin for row in found] == ["x.parquet row 0", "x.parquet row 1"]


def test_datasets_folder_round_trips_in_the_order_of_its_indices(tmp_path):
    Dataset.from_list([{"a": i, "b": {"c": str(i)}} for i in range(5)]).select([3, 1]).save_to_disk(tmp_path / "set")
    found = read_rows([str(tmp_path / "set")], max_rows=None)
    assert [row.values for row in found] == [{"a": 3, "b": {"c": "3"}}, {"a": 1, "b": {"c": "1"}}]
    assert [row.origin for row in found] == ["set row 0", "set row 1"]


def test_max_rows_counts_over_all_files(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", [{"i": 0}, {"i": 1}])
    second = write_jsonl(tmp_path / "b.jsonl", [{"i": 2}, {"i": 3}])
    assert [row.values["i"] for row in read_rows([first, second], max_rows=3)] == [0, 1, 2]
    assert [row.values["i"] for row in read_rows([first, second], max_rows=2)] == [0, 1]
    assert [row.values["i"] for row in read_rows([first, second], max_rows=None)] == [0, 1, 2, 3]


def test_max_rows_does_not_read_the_broken_lines_behind(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"i": 0}\n{broken\n')
    assert len(read_rows([str(file)], max_rows=1)) == 1


def test_origins_tell_files_of_one_name_apart_and_do_not_depend_on_where_the_folder_lies(tmp_path):
    origins = []
    for place in ("here", "there/deeper"):
        files = []
        for split in ("easy", "hard"):
            folder = tmp_path / place / split
            folder.mkdir(parents=True)
            files.append(write_jsonl(folder / "train.jsonl", [{"i": 0}]))
        origins.append([row.origin for row in read_rows(files, max_rows=None)])
    assert origins == [["easy/train.jsonl line 1", "hard/train.jsonl line 1"]] * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": \n', r"bad\.jsonl line 2: not valid JSON \(.*\): \"\{\\\"a\\\":\""),
        (b'{"a": 1}\n[1, 2]\n', r"bad\.jsonl line 2: the line is a list, expected one object a line: \[1, 2\]"),
        (b'{"a": 1}\n{"a": "\xff"}\n', r"bad\.jsonl line 2: byte 8 of the line \(0xff\) is not utf-8"),
        (b'{"a": 1}\n' + b"[" * 100_000, r"bad\.jsonl line 2: not valid JSON \(maximum recursion depth"),
        (b"", r"bad\.jsonl is empty"),
        (b"\n \n", r"bad\.jsonl is empty"),
    ],
)
def test_broken_jsonl_is_refused_with_its_line(tmp_path, content, message):
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_rows([str(tmp_path / "bad.jsonl")], max_rows=None)


def test_parquet_with_two_columns_of_one_name_is_refused(tmp_path):
    """pyarrow's rows keep the last."""
    columns = [pyarrow.array(["1+1="]), pyarrow.array(["2"]), pyarrow.array(["3"])]
    table = pyarrow.Table.from_arrays(columns, names=["prompt", "answer", "answer"])
    parquet.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match=r'twice.parquet has two columns of the name "answer"; rename or remove one'):
        read_rows([str(tmp_path / "twice.parquet")], max_rows=None)


def test_broken_parquet_is_refused_with_its_name(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read as parquet: "):
        read_rows([str(tmp_path / "bad.parquet")], max_rows=None)


def test_parquet_without_rows_is_refused(tmp_path):
    parquet.write_table(pyarrow.table({"a": pyarrow.array([], pyarrow.int64())}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match=r"none\.parquet is empty"):
        read_rows([str(tmp_path / "none.parquet")], max_rows=None)


def test_damaged_datasets_folder_is_refused_with_its_name(tmp_path):
    Dataset.from_list([{"a": 1}]).save_to_disk(tmp_path / "set")
    next((tmp_path / "set").glob("*.arrow")).write_bytes(b"garbage")
    with pytest.raises(DataError, match=r"set cannot be read as a datasets folder"):
        read_rows([str(tmp_path / "set")], max_rows=None)


@pytest.mark.parametrize("read", [check_files, lambda paths: read_rows(paths, max_rows=None)])
def test_paths_that_are_no_data_are_refused_before_reading(tmp_path, read):
    good = write_jsonl(tmp_path / "good.jsonl", [{"a": 1}])
    with pytest.raises(DataError, match=r"gone\.jsonl does not exist; correct the path$"):
        read([good, str(tmp_path / "gone.jsonl")])
    (tmp_path / "table.csv").write_text("a\n1\n")
    with pytest.raises(DataError, match=r'table\.csv has the suffix "\.csv"; give a \.jsonl file'):
        read([good, str(tmp_path / "table.csv")])
    (tmp_path / "plain").mkdir()
    with pytest.raises(DataError, match=r"plain is not a dataset \(it has no state\.json\)"):
        read([good, str(tmp_path / "plain")])


def test_a_missing_file_is_told_with_one_like_it_or_where_its_path_begins(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "train.jsonl", [{"a": 1}])
    monkeypatch.chdir(tmp_path.parent)
    for given, remedy in (
        (f"{tmp_path.name}/trian.jsonl", f"did you mean {tmp_path.name}/train.jsonl?"),
        (f"{tmp_path}/train.json", f"did you mean {tmp_path}/train.jsonl?"),
        (f"{tmp_path.name}/val.parquet", f"correct the path, which begins in {tmp_path.parent}"),
        ("nowhere/train.jsonl", f"correct the path, which begins in {tmp_path.parent}"),
    ):
        with pytest.raises(DataError) as error:
            check_files([given])
        assert str(error.value) == f"data file {given} does not exist; {remedy}"


def test_dataset_dict_is_refused_with_the_folders_of_its_splits(tmp_path):
    part = Dataset.from_list([{"a": 1}])
    DatasetDict({"train": part, "test": part}).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match=r"DatasetDict.*one split: \S+both/test, \S+both/train$"):
        check_files([str(tmp_path / "both")])
    check_files([str(tmp_path / "both" / "train")])


def row(**values):
    return Row(values=values, origin="train.jsonl line 412", stem="train")


def test_get_column_goes_into_nested_columns_and_prefers_a_column_of_that_very_name():
    nested = row(reward_model={"ground_truth": "5", "style": "rule"})
    assert get_column(nested, "reward_model.ground_truth", CONFIG) == "5"
    assert get_column(nested, "reward_model", CONFIG) == {"ground_truth": "5", "style": "rule"}
    assert get_column(row(**{"reward_model.ground_truth": "6"}), "reward_model.ground_truth", CONFIG) == "6"


def test_missing_column_is_refused_with_the_columns_there_are():
    wrong = row(question="q", reward_model={"style": "rule", "truth": 1})
    for path, meant, config, keys in (
        ("reward_model.ground_truth", 'did you mean "reward_model.truth"? ', EvalDataConfig(), "ground_truth_column"),
        ("questoin", 'did you mean "question"? ', PreferenceDataConfig(prompt_column="questoin"), "prompt_column"),
        ("good", "", PreferenceDataConfig(chosen_column="good"), "chosen_column"),
        (
            "good",
            "",
            PreferenceDataConfig(chosen_column="good", response_column="good", system_prompt="good"),
            "chosen_column or data.response_column",
        ),
    ):
        with pytest.raises(DataError) as error:
            get_column(wrong, path, config)
        assert str(error.value) == (
            f'train.jsonl line 412: there is no column "{path}"; the columns are "question", "reward_model.style", '
            f'"reward_model.truth"; {meant}set data.{keys} to the right one'
        )


def test_has_column_takes_null_for_absent():
    assert has_column(row(a={"b": 0}), "a.b")
    assert not has_column(row(a={"b": None}), "a.b")
    assert not has_column(row(a=1), "a.b")


def test_cells_become_plain_json_values():
    cell = {
        "date": datetime.date(2026, 1, 2),
        "time": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        "price": decimal.Decimal("7.50"),
        "bytes": "ü".encode(),
        "list": [True, None, 1, 2.5, {"x": b"y"}],
    }
    plain = get_column(row(info=cell), "info", CONFIG)
    assert json.loads(json.dumps(plain)) == {
        "date": "2026-01-02",
        "time": "2026-01-02T03:04:05+00:00",
        "price": "7.50",
        "bytes": "ü",
        "list": [True, None, 1, 2.5, {"x": "y"}],
    }


def test_cells_that_json_cannot_hold_are_refused_when_they_are_used():
    broken = row(image=b"\xff\xd8", wait=datetime.timedelta(1), fine="x")
    assert get_column(broken, "fine", CONFIG) == "x"
    with pytest.raises(DataError, match=r'line 412: column "image" holds bytes that are not utf-8 text'):
        get_column(broken, "image", CONFIG)
    with pytest.raises(DataError, match=r'line 412: column "wait" holds a timedelta, which JSON cannot represent'):
        get_column(broken, "wait", CONFIG)


@pytest.mark.parametrize(
    ("cell", "what"),
    [
        (["7", "8"], 'a list, expected a string: ["7", "8"]'),
        (7, "a number, expected a string: 7"),
        (True, "a boolean, expected a string: true"),
        (None, "null, expected a string: null"),
        ({"x": "ü"}, 'an object, expected a string: {"x": "ü"}'),
    ],
)
def test_cells_that_are_no_strings_are_refused_with_their_value(cell, what):
    with pytest.raises(DataError) as error:
        get_text(row(answer=cell), "answer", CONFIG)
    assert str(error.value) == f'train.jsonl line 412: column "answer" is {what}'


@pytest.mark.parametrize("cell", ["a\ud83d", ["b", {"c": "a\ud83d"}], {"a\ud83d": 1}])
def test_half_a_surrogate_pair_is_refused_with_its_row_and_column(cell):
    with pytest.raises(DataError) as error:
        get_column(row(answer=cell), "answer", CONFIG)
    assert str(error.value) == (
        'train.jsonl line 412: column "answer" holds half a surrogate pair, which is no character: '
        "'a\\ud83d'; fix or remove the row"
    )
    assert get_column(row(answer="a\U0001f600"), "answer", CONFIG) == "a\U0001f600"


def test_text_in_parquet_that_is_not_utf_8_is_named_with_its_file(tmp_path):
    offsets = pyarrow.py_buffer((0).to_bytes(4, "little") + (2).to_bytes(4, "little"))
    text = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, offsets, pyarrow.py_buffer(b"a\xff")])
    path = tmp_path / "bad.parquet"
    parquet.write_table(pyarrow.table({"prompt": text}), path)
    with pytest.raises(
        DataError, match=r"bad\.parquet cannot be read as parquet: 'utf-8' codec can't decode byte 0xff"
    ):
        read_rows([str(path)], max_rows=None)


def test_preview_is_cut_to_80_characters():
    assert preview("x" * 78) == '"' + "x" * 78 + '"'
    assert preview("x" * 79) == '"' + "x" * 76 + "..."

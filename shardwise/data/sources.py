"""Reads rows from jsonl, parquet, folders of datasets and tasks of reasoning-gym. Each row knows where it came from."""

import datetime
import decimal
import difflib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config import DataError, HeldOutData, in_one_line
from shardwise.data.reasoning_gym import check_task, task_rows

_ACCEPTED = (
    "a .jsonl file, a .parquet file, a folder written by datasets' save_to_disk or a .yaml file that names a task of "
    "reasoning-gym"
)
_NUM_SHOWN = 3
"""How many of a folder's files an error names."""
_READ_ROWS = 1024  # rows turned into Python objects at a time, so that max_rows does not read a whole file


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data file.

    Example: `Row(values={"prompt": "2+3="}, origin="train.jsonl line 412", stem="train")`
    """

    values: dict[str, Any]
    """Column to cell, as the file's reader gives it; `get_column` turns a cell into plain JSON values."""
    origin: str
    """Names the row in errors and dumps. Lines count from 1 as editors do, rows from 0 as pandas and datasets do."""
    stem: str
    """The file's name without its suffix."""
    folder: Path = Path()
    """The folder that the file is in: relative paths in its rows start there."""


def check_files(paths: Sequence[str]) -> None:
    """Checks that every path exists and is of a kind that can be read; reads no rows.

    Raises:
        DataError: names the path, and one like it or what is accepted.
    """
    for name in paths:
        path = Path(name)
        if not path.exists():
            raise DataError(f"data file {name} does not exist; {_remedy_of_missing(path)}")
        if path.is_dir():
            _check_folder(path)
        elif path.suffix == ".yaml":
            check_task(path)
        elif path.suffix not in (".jsonl", ".parquet"):
            raise DataError(f'data file {name} has the suffix "{path.suffix}"; give {_ACCEPTED}')


def first_rows(paths: Sequence[str]) -> list[Row]:
    """Returns the first row of every file, except of those that name a task, whose columns are always the same. Raises
    DataError as `read_rows`."""
    return [row for path in paths if Path(path).suffix != ".yaml" for row in read_rows([path], max_rows=1)]


def read_rows(paths: Sequence[str], *, max_rows: int | None) -> list[Row]:
    """Reads the files one after the other.

    Args:
        paths: jsonl or parquet files, folders written by datasets' save_to_disk, or tasks of reasoning-gym.
        max_rows: the most rows to read, over all files; None reads everything.
    Raises:
        DataError: a missing, empty, broken or unknown file; names file and line.
    """
    check_files(paths)
    rows: list[Row] = []
    for path, name in zip(map(Path, paths), _short_names(paths), strict=True):
        wanted = None if max_rows is None else max_rows - len(rows)
        if wanted == 0:
            break
        found = [
            Row(values, origin, path.stem, path.parent)
            for origin, values in itertools.islice(_iterate(path, name), wanted)
        ]
        if not found:
            raise DataError(f"data file {path} is empty; give a file with at least one row or remove it from the list")
        rows += found
    return rows


def has_column(row: Row, path: str) -> bool:
    """Whether the row has a value at `path`; null counts as none, as parquet fills absent columns with it."""
    return _find(row.values, path) is not None


def get_column(row: Row, path: str, config: HeldOutData) -> Any:
    """Returns the cell at `path`, as plain JSON values.

    Args:
        path: a column; a dot goes into a nested one: `reward_model.ground_truth`.
        config: the section whose key holds `path`; errors name the key.
    Returns:
        str, number, bool, None, or lists and dicts of them: times in ISO format, decimals and utf-8 bytes as strings.
    Raises:
        DataError: there is no such column (names those there are, and the nearest), or the cell holds what JSON cannot.
    """
    cell = _find(row.values, path, absent=_ABSENT)
    if cell is _ABSENT:
        nearest = difflib.get_close_matches(path, _column_names(row), n=1)
        meant = f'did you mean "{nearest[0]}"? ' if nearest else ""
        keys = " or ".join(f"data.{key}" for key, value in config if key.endswith("_column") and value == path)
        raise DataError(
            f'{row.origin}: there is no column "{path}"; the columns are {describe_columns(row)}; {meant}'
            f"set {keys} to the right one"
        )
    return plain_cell(row, path, cell)


def get_cell(row: Row, path: str) -> Any:
    """Returns the cell at `path` as the file's reader gives it, bytes included; None where there is no such column."""
    return _find(row.values, path)


def plain_cell(row: Row, path: str, cell: Any) -> Any:
    """Converts a cell to plain JSON values, as `get_column` does."""
    return _plain(cell, f'{row.origin}: column "{path}"')


def get_text(row: Row, path: str, config: HeldOutData) -> str:
    """Returns the cell at `path`, which must be a string. Args as for `get_column`.

    Raises:
        DataError: no such column or not a string; shows the value.
    """
    cell = get_column(row, path, config)
    if not isinstance(cell, str):
        raise DataError(f'{row.origin}: column "{path}" is {describe_type(cell)}, expected a string: {preview(cell)}')
    return cell


def without_nulls(value: Any) -> Any:
    """Returns a JSON value without null keys: parquet gives every object of a column the keys of all of them."""
    match value:
        case dict():
            return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
        case list():
            return [without_nulls(inner) for inner in value]
    return value


def describe_columns(row: Row) -> str:
    """The names of a row's columns, nested ones dotted, for error messages."""
    return ", ".join(f'"{name}"' for name in _column_names(row))


def describe_type(value: Any) -> str:
    """The JSON name of a value's type, with its article, for error messages."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case dict():
            return "an object"
        case list():
            return "a list"
        case _:
            return f"a {type(value).__name__}"


def preview(value: Any) -> str:
    """A value as one line of JSON, cut to 80 characters, for error messages."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."


_ABSENT = object()  # tells a missing column from a null cell


def _find(values: dict[str, Any], path: str, absent: Any = None) -> Any:
    if path in values:  # also a column whose own name has a dot, as datasets' flatten() makes them
        return values[path]
    cell: Any = values
    for name in path.split("."):
        if not isinstance(cell, dict) or name not in cell:
            return absent
        cell = cell[name]
    return cell


def _column_names(row: Row) -> list[str]:
    names: list[str] = []
    for name, cell in row.values.items():
        names += [f"{name}.{inner}" for inner in cell] if isinstance(cell, dict) and cell else [name]
    return names


def _plain(value: Any, place: str) -> Any:
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return _whole_text(value, place)
        case dict():
            return {_whole_text(str(key), place): _plain(inner, place) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner, place) for inner in value]
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            return str(value)
        case bytes():
            try:
                return value.decode("utf-8")
            except UnicodeDecodeError:
                raise DataError(f"{place} holds bytes that are not utf-8 text: {preview(value)}; store text") from None
        case _:
            raise DataError(
                f"{place} holds {describe_type(value)}, which JSON cannot represent: {preview(value)}; "
                "store text, numbers, lists or objects"
            )


def _whole_text(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape what no file, tokenizer or terminal takes
        near = text[max(0, error.start - 20) : error.start + 20]
        raise DataError(
            f"{place} holds half a surrogate pair, which is no character: {near!a}; fix or remove the row"
        ) from None
    return text


def _short_names(paths: Sequence[str]) -> list[str]:
    # Takes as few trailing parts of the paths as tell the files apart: a row's origin seeds its sampling, so it must
    # not depend on where the folder is.
    parts = [Path(path).absolute().parts for path in paths]
    for depth in range(1, max(map(len, parts), default=1)):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return list(paths)


def _iterate(path: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix == ".jsonl" and path.is_file():
        return _iterate_jsonl(path, name)
    if path.suffix == ".yaml" and path.is_file():
        return task_rows(path, name)
    chunks = _read_dataset_folder(path) if path.is_dir() else _read_parquet(path)
    return ((f"{name} row {index}", values) for index, values in enumerate(itertools.chain.from_iterable(chunks)))


def _iterate_jsonl(path: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            origin = f"{name} line {number}"
            try:
                text = line.decode("utf-8-sig")  # some editors begin a file with a byte order mark
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{origin}: byte {error.start + 1} of the line ({line[error.start]:#04x}) is not utf-8; "
                    "save the file as utf-8"
                ) from None
            if not text.strip():
                continue
            try:
                values = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{origin}: not valid JSON ({error}): {preview(text.strip())}") from None
            if not isinstance(values, dict):
                raise DataError(
                    f"{origin}: the line is {describe_type(values)}, expected one object a line: {preview(values)}"
                )
            yield origin, values


def _read_parquet(path: Path) -> Iterator[list[dict[str, Any]]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise DataError(f'{path} has two columns of the name "{twice}"; rename or remove one of them')
            for batch in file.iter_batches(batch_size=_READ_ROWS):
                yield batch.to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as parquet: {in_one_line(error)}") from None


def _read_dataset_folder(path: Path) -> Iterator[list[dict[str, Any]]]:
    import datasets

    try:
        dataset = datasets.load_from_disk(str(path))
        # The arrow format leaves images and audio encoded: decoding them would need more packages.
        for table in dataset.with_format("arrow").iter(batch_size=_READ_ROWS):
            yield table.to_pylist()
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be read as a datasets folder: {in_one_line(error)}") from None


def _remedy_of_missing(path: Path) -> str:
    if path.is_symlink():
        return f"it is a link to {path.readlink()}; correct the link"
    if any(character in path.name for character in "*?["):
        return "patterns are not expanded; give the files themselves, as a list: data.train_files=[a.jsonl,b.jsonl]"
    beside = {other.stem: other for other in path.parent.iterdir()} if path.parent.is_dir() else {}
    if nearest := difflib.get_close_matches(path.stem, beside, n=1):
        return f"did you mean {beside[nearest[0]]}?"
    return "correct the path" if path.is_absolute() else f"correct the path, which begins in {Path.cwd()}"


def _check_folder(path: Path) -> None:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(str(child.parent) for child in path.glob("*/state.json"))
        raise DataError(
            f"{path} holds a DatasetDict, one dataset per split; give the folder of one split: {', '.join(splits)}"
        )
    if not (path / "state.json").is_file():
        files = sorted(str(file) for pattern in ("*.jsonl", "*.parquet") for file in path.glob(pattern))
        if files:
            shown = ",".join(files[:_NUM_SHOWN]) + (",..." if len(files) > _NUM_SHOWN else "")
            raise DataError(f"{path} is a folder of files; give the files themselves, as a list: [{shown}]")
        raise DataError(f"folder {path} is not a dataset (it has no state.json); give {_ACCEPTED}")

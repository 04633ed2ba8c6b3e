"""Rows of data sets in files, in folders and on the hub, each with the place where it stands."""

from __future__ import annotations

import csv
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_specdec.errors import ArgumentError, SpecDecError

_TEXT = "utf-8-sig"
"""UTF-8 whose byte order mark, which spreadsheets write, is no part of the first column's name."""


class TrainingDependencyError(SpecDecError, ImportError):
    """A package of the extra `train` is not installed."""


@dataclass(frozen=True)
class Record:
    """One row.

    Attributes:
        where: file and line, or data set and row, for messages.
        values: by column.
    """

    where: str
    values: dict[str, Any]

    def __getitem__(self, column: str) -> Any:
        return self.values[column]

    def get(self, column: str) -> Any:
        """The value, or None."""
        return self.values.get(column)

    def text(self, column: str) -> str:
        """The value of a column that must hold a text."""
        value = self.values[column]
        if not isinstance(value, str):
            raise self.error(column, "must be a text")
        return value

    def error(self, column: str, message: str) -> ArgumentError:
        """An error about a column of this row."""
        return ArgumentError(f"{self.where}, column {column!r}: {message}, not {_short(self.get(column))}")


def read_records(data: str | Path | Iterable[dict[str, Any]], limit: int | None = None) -> list[Record]:
    """Read the rows of a data set.

    Args:
        data: one of
            - a file: `.jsonl` (an object a line), `.json` (a list of objects, or as `.jsonl`), `.csv` (with a header),
              `.parquet`, `.txt` (a row a line, column `text`);
            - a folder of such files, or one written by `datasets.Dataset.save_to_disk`;
            - a data set of the hub: `name`, `name:split` or `name:configuration:split`; the split is `train` if not
              given. With a limit only as much as needed is downloaded.
            - rows: dictionaries by column, a `datasets.Dataset` too.
        limit: take the first rows only.

    Raises:
        ArgumentError: no such data set, an empty one, or what is in a file is not what its name says.
        TrainingDependencyError: a package that reads this kind of data is missing.
    """
    if limit is not None and limit < 1:
        raise ArgumentError(f"limit={limit!r} must be at least 1")
    name, rows = _open(data, limit)
    records = list(itertools.islice(rows, limit))
    if not records:
        raise ArgumentError(f"{name} holds no rows")
    return records


def _open(data: str | Path | Iterable[dict[str, Any]], limit: int | None) -> tuple[str, Iterator[Record]]:
    if not isinstance(data, (str, Path)):
        if not isinstance(data, Iterable):
            raise ArgumentError(f"data={_short(data)} must be a file, a folder, the name of a data set, or rows")
        return "the data set", (Record(f"row {number}", _row(one, number)) for number, one in enumerate(data, 1))
    path = Path(data)
    if path.is_file():
        return path.name, _read_file(path)
    if path.is_dir():
        return path.name, _read_folder(path)
    if isinstance(data, Path) or path.is_absolute() or path.suffix in _READERS:
        raise ArgumentError(f"there is no file or folder {data}")
    return data, _read_hub(data, limit)


def _read_file(path: Path) -> Iterator[Record]:
    if path.suffix not in _READERS:
        raise ArgumentError(f"{path.name}: expected a file that ends in {', '.join(_READERS)}")
    try:
        yield from _READERS[path.suffix](path)
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path.name} is not a text in UTF-8: {error.reason} at byte {error.start}") from error


def _read_folder(folder: Path) -> Iterator[Record]:
    if (folder / "dataset_dict.json").is_file():
        raise ArgumentError(f"{folder.name} holds several splits; name the folder of one of them")
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        load: Callable[..., Any] = _import_datasets().load_from_disk
        try:
            rows = load(str(folder))
        # What datasets raises for files that are damaged or not there.
        except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise ArgumentError(f"{folder.name} looks like a saved data set and cannot be loaded: {first}") from error
        yield from _rows(folder.name, rows)
        return
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in _READERS)
    if not files:
        raise ArgumentError(f"{folder.name} holds no file that ends in {', '.join(_READERS)}")
    for path in files:
        yield from _read_file(path)


def _read_hub(name: str, limit: int | None) -> Iterator[Record]:
    dataset, _, rest = name.partition(":")
    configuration, _, split = rest.rpartition(":")
    load: Callable[..., Any] = _import_datasets().load_dataset
    try:
        rows = load(dataset, configuration or None, split=split or "train", streaming=limit is not None)
    # What datasets raises for names, configurations and splits that are not there, and without a network.
    except (OSError, ValueError, RuntimeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ArgumentError(
            f"{name!r} is no file or folder here, and no data set that can be loaded: {first}"
        ) from error
    return _rows(name, rows)


def _rows(name: str, rows: Iterable[Any]) -> Iterator[Record]:
    return (Record(f"{name}, row {number}", _row(one, number)) for number, one in enumerate(rows, 1))


def _row(one: Any, number: int) -> dict[str, Any]:
    if not isinstance(one, dict):
        raise ArgumentError(f"row {number} of the data set must be a dictionary by column, not {_short(one)}")
    return one


def _read_jsonl(path: Path) -> Iterator[Record]:
    with path.open(encoding=_TEXT) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _json_record(path, f"line {number}", line)


def _json_record(path: Path, place: str, line: str) -> Record:
    where = f"{path.name}, {place}"
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ArgumentError(f"{where}: not JSON: {error}") from error
    return _object(where, value)


def _object(where: str, value: Any) -> Record:
    if not isinstance(value, dict):
        raise ArgumentError(f"{where}: expected a JSON object with columns as its keys, not {_short(value)}")
    return Record(where, value)


def _read_json(path: Path) -> Iterator[Record]:
    text = path.read_text(encoding=_TEXT)
    if not text.lstrip().startswith("["):
        yield from _read_jsonl(path)
        return
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ArgumentError(f"{path.name}: not JSON: {error}") from error
    yield from (_object(f"{path.name}, element {number}", value) for number, value in enumerate(values, start=1))


def _read_csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding=_TEXT, newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                where = f"{path.name}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise ArgumentError(f"{where}: not as many fields as the header has columns")
                yield Record(where, row)
        except csv.Error as error:
            raise ArgumentError(f"{path.name}, line {reader.reader.line_num}: not CSV: {error}") from error


def _read_parquet(path: Path) -> Iterator[Record]:
    if importlib.util.find_spec("pyarrow") is None:
        raise TrainingDependencyError("parquet files need pyarrow: pip install 'hf_specdec[train]'")
    from pyarrow import ArrowException, parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise ArgumentError(f"{path.name}: not a parquet file: {error}") from error
    yield from _rows(path.name, rows)


def _read_txt(path: Path) -> Iterator[Record]:
    with path.open(encoding=_TEXT) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield Record(f"{path.name}, line {number}", {"text": line.rstrip("\n")})


_READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}


def _import_datasets() -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise TrainingDependencyError("this data set is read by datasets: pip install 'hf_specdec[train]'")
    import datasets

    return datasets


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

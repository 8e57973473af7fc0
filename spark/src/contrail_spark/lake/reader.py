"""Reads ranges of a lake, also while jobs replace its files."""

import logging
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from contrail_spark.errors import LakeError
from contrail_spark.lake.manifest import FileEntry, State
from contrail_spark.lake.rows import SEQ, read_rows
from contrail_spark.lake.selection import Selection
from contrail_spark.lake.splits import LakeSplit, files_of
from contrail_spark.lake.store import Lake

_log: Final = logging.getLogger(__name__)


class LakeReader:
    """Reads the wanted messages of a lake. All methods raise LakeError for what is damaged."""

    def __init__(self, lake: Lake, wanted: Selection) -> None:
        self.lake = lake
        self.wanted = wanted

    def read(self, split: LakeSplit, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        """Yield the messages of ``split`` in ascending sequence, with ``columns`` and ``seq``.

        If a job has replaced files since the split was made, it reads what has replaced them: the
        same messages, except those that were erased.
        """
        position, files, unverified = split.from_seq, split.files, split.unverified
        while True:
            bounds = (position, split.to_seq)
            try:
                for entry in files:
                    if entry.path in unverified and (problem := self.lake.verify(entry)):
                        raise LakeError(problem)
                for batch in read_rows(self.lake.root, files, bounds, columns, self.wanted):
                    position = batch.column(SEQ)[-1].as_py() + 1
                    yield batch
                return
            except (LakeError, FileNotFoundError) as error:
                state = self.lake.state()
                if all(each.path in state.files for each in files):
                    raise self._damage(error, files) from error
                bounds = (position, split.to_seq)
                files = tuple(files_of(state, split.shard, bounds, self.wanted, self._token))
                unverified = frozenset(each.path for each in files)
                _log.info("files of the lake in %s were replaced: %s", self.lake.root, error)

    def range(self, state: State, shard: int, bounds: tuple[int, int]) -> LakeSplit:
        """All that the lake has of a range, as one split."""
        files = tuple(files_of(state, shard, bounds, self.wanted, self._token))
        return LakeSplit(shard, *bounds, files, frozenset(each.path for each in files))

    @property
    def _token(self) -> int | None:
        return self.lake.info.token

    def _damage(self, error: Exception, files: tuple[FileEntry, ...]) -> LakeError:
        if isinstance(error, FileNotFoundError):
            gone = (each.path for each in files if not (self.lake.root / each.path).exists())
            error = LakeError(f"{next(gone, 'a file')} is missing")
        return LakeError(f"the lake in {self.lake.root}: {error}")

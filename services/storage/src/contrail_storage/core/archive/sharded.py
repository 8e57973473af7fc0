"""Archives of streams with several shards: the records of one shard follow those of the other.

Each shard begins with a header of its own, which has its number in the stream as ``shard``.
:class:`ArchiveCheck` checks each shard by itself. This module checks that the shards form one
stream.
"""

import numpy as np

from contrail_common.partition import shards_of
from contrail_storage.core.archive import format as archive
from contrail_storage.core.archive.check import ArchiveCheck
from contrail_storage.core.archive.format import ArchiveError, Record, Subjects, decoded
from contrail_storage.core.commands import ArchiveHeader


class ShardedCheck:
    """Checks the records of a whole archive in order, with one :class:`ArchiveCheck` per shard."""

    def __init__(self) -> None:
        self._first: ArchiveHeader | None = None
        self._consumers: frozenset[str] | None = None
        self._current = ArchiveCheck()
        self._shard = 0

    def take(self, record: Record) -> None:
        """Check the next record. Raises ArchiveError at the first invalid record."""
        if record.kind == archive.HEADER and self._first is not None:
            self._finish_shard()
            self._current = ArchiveCheck()
            self._shard += 1
        self._current.take(record)
        if record.kind == archive.HEADER:
            self._take_header(self._current.header)
        elif record.kind == archive.SUBJECTS:
            self._check_subjects(decoded(record.payload, Subjects).names)

    def finish(self) -> None:
        """Check that no shard is missing. Raises ArchiveError."""
        self._finish_shard()
        assert self._first is not None
        _need(self._shard + 1 == self._first.config.shards, "a shard is missing")

    def _take_header(self, header: ArchiveHeader) -> None:
        self._first = first = self._first or header
        _need(
            self._shard < first.config.shards and header.shard == self._shard,
            "the order or number of shards",
        )
        _need(header.config == first.config, "the configurations of the shards differ")
        _need(header.incarnation == first.incarnation, "the shards belong to different streams")
        _need(header.hash_key == first.hash_key, "the keys of message ids differ")

    def _check_subjects(self, names: list[str]) -> None:
        assert self._first is not None
        config = self._first.config
        # A subject in the wrong shard would never be found again: reads compute its shard too.
        found = shards_of(names, config.shards, config.shard_by)
        _need(bool((found == np.uint32(self._shard)).all()), "the shard of a subject")

    def _finish_shard(self) -> None:
        self._current.finish()
        consumers = self._current.consumers
        if self._consumers is None:
            self._consumers = consumers
        # A consumer of the stream is one consumer in each shard, all under the same name.
        _need(consumers == self._consumers, "a consumer is missing in some shards")


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise ArchiveError(f"the archive is inconsistent: {what}")

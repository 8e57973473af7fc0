"""Entries and commits for tests of lakes."""

from datetime import date

from contrail_spark.lake.layout import DataFile, Partition
from contrail_spark.lake.manifest import Commit, FileEntry, Range

DAY = date(2026, 11, 24)


def entry(commit: int, from_seq: int, to_seq: int, *, shard: int = 0) -> FileEntry:
    """The entry of a file that has all messages of the range."""
    return FileEntry(
        path=DataFile(Partition(DAY), "S", shard, from_seq, to_seq, commit).path,
        shard=shard,
        from_seq=from_seq,
        to_seq=to_seq,
        messages=to_seq - from_seq + 1,
        bytes=1,
        sha256="0" * 64,
        first_time_us=0,
        last_time_us=0,
    )


def archived(number: int, from_seq: int, to_seq: int, *, shard: int = 0) -> Commit:
    """A commit that archives a range in one file."""
    return Commit(
        number=number,
        job="archive",
        time_us=0,
        covered=(Range(shard, from_seq, to_seq),),
        added=(entry(number, from_seq, to_seq, shard=shard),),
    )

"""Which files of a lake are merged. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from contrail_spark.errors import LakeError
from contrail_spark.lake.manifest import FileEntry, partition_of


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive files of one shard and partition that become one file.

    ``bytes`` are those of their messages before compression.
    """

    files: tuple[FileEntry, ...]
    bytes: int

    @property
    def messages(self) -> int:
        """The number of messages in all files."""
        return sum(each.messages for each in self.files)


def unmeasured(files: Iterable[FileEntry], file_bytes: int) -> list[FileEntry]:
    """The files that may be merged, as far as the manifest says: it has sizes after compression."""
    return [each for run in _runs(files, {}, file_bytes) for each in run]


def plan(files: Iterable[FileEntry], sizes: Mapping[str, int], file_bytes: int) -> list[Group]:
    """The groups whose files become one of at most ``file_bytes``.

    ``sizes`` are those of messages before compression, by path, of all `unmeasured` files. A file
    of at least half of ``file_bytes`` is left alone. So a second plan has nothing to do: a group
    that another one follows has more than half. Raises LakeError if two files of a shard and
    partition overlap.
    """
    return [
        group
        for run in _runs(files, sizes, file_bytes)
        for group in _packed(run, sizes, file_bytes)
    ]


def rounds(groups: Sequence[Group], bytes_max: int, groups_max: int) -> Iterator[list[Group]]:
    """What is committed at once: groups up to these limits, and at least one."""
    own: list[Group] = []
    room = bytes_max
    for each in groups:
        if own and (each.bytes > room or len(own) == groups_max):
            yield own
            own, room = [], bytes_max
        own.append(each)
        room -= each.bytes
    if own:
        yield own


def _runs(
    files: Iterable[FileEntry], sizes: Mapping[str, int], file_bytes: int
) -> Iterator[list[FileEntry]]:
    """Two or more consecutive files that are all small."""

    def is_small(entry: FileEntry) -> bool:
        return 2 * max(entry.bytes, sizes.get(entry.path, 0)) < file_bytes

    for series in _series(files):
        for small, run in groupby(series, is_small):
            found = list(run)
            if small and len(found) > 1:
                yield found


def _series(files: Iterable[FileEntry]) -> Iterator[list[FileEntry]]:
    """The files of each shard and partition, in ascending sequence."""

    def place(entry: FileEntry) -> tuple[int, str]:
        return entry.shard, partition_of(entry).folder

    ordered = sorted(files, key=lambda each: (*place(each), each.from_seq, each.path))
    for _, own in groupby(ordered, place):
        series = list(own)
        for before, after in pairwise(series):
            if after.from_seq <= before.to_seq:
                raise LakeError(
                    f"{before.path} and {after.path} overlap: no lake has sequences of a shard "
                    "twice in one folder"
                )
        yield series


def _packed(run: Sequence[FileEntry], sizes: Mapping[str, int], file_bytes: int) -> Iterator[Group]:
    group: list[FileEntry] = []
    total = 0
    for each in run:
        size = sizes[each.path]
        if group and total + size > file_bytes:
            yield Group(tuple(group), total)
            group, total = [], 0
        group.append(each)
        total += size
    # Only the last one may be alone: two small files always fit.
    if len(group) > 1:
        yield Group(tuple(group), total)

"""What a lake has of a range, what it lacks, and how reading it is divided. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from contrail_spark.lake.manifest import FileEntry, ShardState, State
from contrail_spark.lake.rows import overlapping
from contrail_spark.lake.selection import Selection

SPLITS_MAX: Final = 1_024
Bounds = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LakeSplit:
    """A closed range of sequences of a shard, and the files that have its messages.

    ``unverified`` are the paths that its reader compares with their checksums. Of the splits of a
    plan that read parts of one file, only the first does.
    """

    shard: int
    from_seq: int
    to_seq: int
    files: tuple[FileEntry, ...]
    unverified: frozenset[str] = frozenset()


def first_seq(state: State, shard: int) -> int:
    """The sequence with which a shard begins in the lake.

    What the stream had lost before it was archived for the first time is no loss of a reader.
    """
    lost = state.shards.get(shard, ShardState()).lost
    return lost[0][1] + 1 if lost and lost[0][0] == 1 else 1


def missing(state: State, shard: int, bounds: Bounds) -> list[Bounds]:
    """The ranges within ``bounds`` that the lake does not cover."""
    low, high = bounds
    known = state.shards.get(shard, ShardState())
    gaps = [(max(low, first), min(high, last)) for first, last in known.lost]
    gaps.append((max(low, known.archived_through + 1), high))
    return [(first, last) for first, last in gaps if first <= last]


def missing_wanted(state: State, shard: int, bounds: Bounds, wanted: Selection) -> list[Bounds]:
    """The ranges of `missing` that may have had wanted messages, by the times around them."""
    files = [each for each in state.files.values() if each.shard == shard]
    found = []
    for first, last in missing(state, shard, bounds):
        older = [each.last_time_us for each in files if each.to_seq < first]
        newer = [each.first_time_us for each in files if each.from_seq > last]
        if wanted.may_have_between(max(older, default=None), min(newer, default=None)):
            found.append((first, last))
    return found


def files_of(
    state: State, shard: int, bounds: Bounds, wanted: Selection, token: int | None
) -> list[FileEntry]:
    """The files that may have wanted messages of a range."""
    low, high = bounds
    return [
        each
        for each in state.files.values()
        if each.shard == shard
        and each.from_seq <= high
        and each.to_seq >= low
        and wanted.may_have(each, token)
    ]


def cut(files: Mapping[int, tuple[Bounds, list[FileEntry]]], size: int) -> list[LakeSplit]:
    """Divide the files of each shard, within its bounds, into splits of about ``size`` bytes."""
    total = sum(each.bytes for _, entries in files.values() for each in entries)
    size = max(size, -(-total // SPLITS_MAX), 1)
    splits: list[LakeSplit] = []
    for shard, (bounds, entries) in sorted(files.items()):
        for group in _groups(entries, size):
            splits += _parts(shard, bounds, group, size)
    return verified_once(splits)


def _groups(entries: Iterable[FileEntry], size: int) -> Iterator[list[FileEntry]]:
    """Whole files, as many as make ``size`` bytes; those that overlap stay together."""
    group: list[FileEntry] = []
    room = size
    for together in overlapping(entries):
        more = sum(each.bytes for each in together)
        if group and more > room:
            yield group
            group, room = [], size
        group += together
        room -= more
    if group:
        yield group


def _parts(shard: int, bounds: Bounds, group: list[FileEntry], size: int) -> Iterator[LakeSplit]:
    """A group as one split, or as several if it is too large."""
    low = max(bounds[0], min(each.from_seq for each in group))
    high = min(bounds[1], max(each.to_seq for each in group))
    parts = max(1, min(-(-sum(each.bytes for each in group) // size), high - low + 1))
    cuts = [low - 1 + (high - low + 1) * at // parts for at in range(parts + 1)]
    for before, last in pairwise(cuts):
        own = tuple(each for each in group if each.from_seq <= last and each.to_seq > before)
        if own:
            yield LakeSplit(shard, before + 1, last, own)


def verified_once(splits: Iterable[LakeSplit]) -> list[LakeSplit]:
    """The same splits, of which the first one that reads a file also verifies it."""
    seen: set[str] = set()
    found = []
    for split in splits:
        new = frozenset(each.path for each in split.files) - seen
        seen |= new
        found.append(LakeSplit(split.shard, split.from_seq, split.to_seq, split.files, new))
    return found

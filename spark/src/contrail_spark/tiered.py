"""One range of a stream and its lake: what retention has removed comes from the lake.

The stream has the first word: the lake is only asked for sequences that the stream no longer has.
A deleted message therefore stays deleted as long as the stream has older ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from contrail_common.timeunits import NS_PER_US, parse_time
from contrail_spark.client import ReplayClient, report_loss
from contrail_spark.errors import LakeError, OptionError, ProtocolError, ServerRefusedError
from contrail_spark.lake.manifest import State
from contrail_spark.lake.reader import LakeReader
from contrail_spark.lake.selection import Selection
from contrail_spark.lake.splits import (
    SPLITS_MAX,
    Bounds,
    LakeSplit,
    cut,
    files_of,
    first_seq,
    missing,
    missing_wanted,
)
from contrail_spark.lake.store import Lake
from contrail_spark.options import SEQ_MAX, ReplayOptions
from contrail_spark.plan import SEQ, ReplayPlan, ShardBounds, Split

_NOT_FOUND: Final = 404


@dataclass(frozen=True, slots=True)
class TieredPlan:
    """A fixed range: the splits that a lake has of it, and the plan of what the stream has.

    ``lake`` is None if there is none, and ``stream`` is None if only the lake is read.
    """

    stream: ReplayPlan | None
    lake: Lake | None = None
    lake_splits: tuple[LakeSplit, ...] = ()


class LakeTier:
    """What a lake has of messages that were removed from the stream after a range was fixed."""

    def __init__(self, reader: LakeReader) -> None:
        self._reader = reader

    def removed(
        self, shard: int, bounds: Bounds, columns: tuple[str, ...]
    ) -> tuple[list[Bounds], Iterator[pa.RecordBatch]]:
        """The ranges that the lake lacks, and its messages. It may know more than at the plan."""
        state = self._reader.lake.state()
        split = self._reader.range(state, shard, bounds)
        return missing(state, shard, bounds), self._reader.read(split, columns)


def make_plan(options: ReplayOptions) -> TieredPlan:
    """Fix the range that the options ask for."""
    if options.lake is None:
        return TieredPlan(ReplayClient(options).plan())
    lake = Lake.open(options.lake)
    stream = None if options.lake_only else _stream_plan(options, lake)
    check_lake(options, lake, stream)
    # After the plan: what has been removed from the stream by then is in the lake by now, or lost.
    state = lake.state()
    wanted = selection(options)
    ranges = lake_ranges(options, state, stream)
    files = {}
    for shard, bounds in ranges.items():
        for first, last in missing_wanted(state, shard, bounds, wanted):
            report_loss(
                options,
                f"stream {options.stream} shard {shard}: sequences {first}..{last} were removed "
                f"before they were archived in the lake {lake.root}",
            )
        files[shard] = bounds, files_of(state, shard, bounds, wanted, lake.info.token)
    size = sum(each.bytes for _, entries in files.values() for each in entries)
    size = -(-size // min(options.splits, SPLITS_MAX))
    if options.split_bytes is not None:
        size = min(size, options.split_bytes)
    return TieredPlan(stream, lake, tuple(cut(files, size)))


def selection(options: ReplayOptions) -> Selection:
    """The messages that the options select, besides the range of sequences."""
    return Selection(
        options.subjects, _microseconds(options.start_time), _microseconds(options.end_time)
    )


def client_of(options: ReplayOptions, lake: Lake | None) -> ReplayClient:
    """A client that reads what is removed in the meantime from the lake, if there is one."""
    lower = None if lake is None else LakeTier(LakeReader(lake, selection(options)))
    return ReplayClient(options, lower=lower)


def check_lake(options: ReplayOptions, lake: Lake, plan: ReplayPlan | None) -> None:
    """Raise LakeError unless the lake is of this stream, and not of an older one of its name."""
    if lake.info.stream != options.stream:
        raise LakeError(
            f"the lake in {lake.root} holds stream {lake.info.stream}, not {options.stream}"
        )
    if plan is not None and lake.info.incarnation != plan.incarnation:
        raise LakeError(
            f"stream {options.stream} was deleted and created again since the lake in {lake.root} "
            'was begun. To read the lake alone, use .option("lakeOnly", "true")'
        )


def reaching_back(plan: ReplayPlan, lake: Lake, start_time: str | None) -> ReplayPlan:
    """The plan of a stream as if it still had what its lake has.

    With ``start_time`` it also has splits that begin with the first message of that time.
    """
    state = lake.state()
    shards, splits = [], list(plan.splits)
    reader = LakeReader(lake, Selection(start_us=_microseconds(start_time)))
    for one in plan.shards:
        first = min(one.first_seq, first_seq(state, one.shard))
        if one.shard not in state.shards or first == one.first_seq:
            shards.append(one)
            continue
        shards.append(replace(one, first_seq=first))
        if start_time is not None:
            bounds = first, one.first_seq - 1
            batches = reader.read(reader.range(state, one.shard, bounds), ())
            if (found := next(batches, None)) is not None:
                splits.append(Split(one.shard, found.column(SEQ)[0].as_py(), bounds[1], 0, 0))
    return replace(plan, splits=tuple(splits), shards=tuple(shards))


def _stream_plan(options: ReplayOptions, lake: Lake) -> ReplayPlan:
    try:
        return ReplayClient(options).plan()
    except ServerRefusedError as refused:
        if refused.status != _NOT_FOUND:
            raise
        raise ServerRefusedError(
            f"{refused}. To read what the lake in {lake.root} has of it, use "
            '.option("lakeOnly", "true")',
            refused.status,
            refused.name,
        ) from refused


def lake_ranges(
    options: ReplayOptions, state: State, stream: ReplayPlan | None
) -> Mapping[int, Bounds]:
    """The range of each shard that has to come from the lake.

    A shard of which nothing is archived yet has no such range: its lake has not begun.
    """
    if stream is None:
        ends = {shard: known.archived_through for shard, known in state.shards.items()}
    else:
        ends = {one.shard: one.first_seq - 1 for one in _reaching_below(options, stream)}
    if len(ends) > 1 and (options.from_seq or options.to_seq):
        # A server refuses that too.
        raise OptionError(
            f"{'the lake' if stream is None else f'stream {options.stream}'} has {len(ends)} "
            "shards, each with its own sequences: use "
            "startingTimestamp and endingTimestamp instead"
        )
    low, high = options.from_seq or 1, options.to_seq or SEQ_MAX
    found = {
        shard: (max(low, first_seq(state, shard)), min(high, end))
        for shard, end in ends.items()
        if shard in state.shards
    }
    return {shard: bounds for shard, bounds in found.items() if bounds[0] <= bounds[1]}


def _reaching_below(options: ReplayOptions, plan: ReplayPlan) -> Sequence[ShardBounds]:
    """The shards whose range begins before the oldest message of the stream."""
    if not plan.shards:
        raise ProtocolError("the server's plan has no shards; a newer server is needed for a lake")
    if options.start_time is None:
        return plan.shards
    # Only the server knows which of its messages is the first of that time.
    asked = replace(options, from_seq=None, to_seq=None, end_time=None, splits=1, split_bytes=None)
    found = ReplayClient(asked).plan()
    starts = {split.shard: split.from_seq for split in found.splits}
    below = set()
    for one in found.shards:
        is_empty = one.first_seq > one.last_seq
        if is_empty or starts.get(one.shard, SEQ_MAX) <= one.first_seq:
            below.add(one.shard)
    return [one for one in plan.shards if one.shard in below]


def _microseconds(time: str | None) -> int | None:
    # Times in a lake are rounded down, so limits are as well: a message is still from the time that
    # its own says, and ranges that meet still have each message once.
    return None if time is None else parse_time(time) // NS_PER_US

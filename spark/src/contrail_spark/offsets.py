"""Positions of a streaming query, and the ranges between two of them. Pure: no Spark, no IO.

Spark writes an offset to the checkpoint before it reads up to it. After a restart it asks for the
same ranges again, so they follow from the two offsets alone, and never from what the server has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from contrail_spark.errors import CheckpointError, OptionError, ProtocolError
from contrail_spark.options import DEFAULT_SPLITS, SEQ_MAX, SPLITS_MAX, ReplayOptions
from contrail_spark.plan import ReplayPlan, ShardBounds, Split, several_shards

PARTITION_SEQUENCES_MIN: Final = 1 << 16
"""Fewer take less time to read than Spark takes to start a task."""
PARTITION_SEQUENCES_MAX: Final = 1 << 20
"""More would have to be read again for too long after a failure."""


@dataclass(frozen=True, slots=True)
class Offset:
    """A position: all messages up to and including ``shards[number]`` of each shard are read."""

    incarnation: str
    shards: Mapping[int, int]

    def document(self) -> dict[str, object]:
        """The JSON of the checkpoint. Spark compares offsets as text, so its order is fixed."""
        shards = {str(number): self.shards[number] for number in sorted(self.shards)}
        return {"incarnation": self.incarnation, "shards": shards}


@dataclass(frozen=True, slots=True)
class Heads:
    """What the shards of a stream have now."""

    incarnation: str
    shards: Mapping[int, ShardBounds]

    def newest(self) -> Offset:
        """The position after the newest message."""
        return Offset(self.incarnation, {one.shard: one.last_seq for one in self.shards.values()})

    def oldest(self) -> Offset:
        """The position before the oldest message."""
        before = {one.shard: one.first_seq - 1 for one in self.shards.values()}
        return Offset(self.incarnation, before)


def parse_offset(document: object) -> Offset:
    """The offset that :meth:`Offset.document` wrote; CheckpointError if it is not one."""
    match document:
        case {"incarnation": str(incarnation), "shards": dict(shards)} if all(
            name.isascii() and name.isdigit() and type(seq) is int and 0 <= seq <= SEQ_MAX
            for name, seq in shards.items()
        ):
            return Offset(incarnation, {int(name): seq for name, seq in shards.items()})
    raise CheckpointError(
        f"the checkpoint's offset is not one of this data source: {document!r}. "
        "Use a new checkpointLocation"
    )


def heads_of(plan: ReplayPlan) -> Heads:
    """The heads in a plan; ProtocolError if an old server left them out."""
    if not plan.shards:
        raise ProtocolError("the server's plan has no shards; a newer server is needed to follow")
    return Heads(plan.incarnation, {one.shard: one for one in plan.shards})


def initial(options: ReplayOptions, plan: ReplayPlan) -> Offset:
    """Where a new query starts. ``plan`` is of the range from ``options.start_time`` on.

    Raises OptionError if there cannot be such a position.
    """
    heads = heads_of(plan)
    if options.from_seq is not None:
        return _before(options.from_seq, heads)
    if options.start_time is not None:
        found = dict(heads.newest().shards)  # without a split, no message is that new
        for split in plan.splits:
            found[split.shard] = min(found[split.shard], split.from_seq - 1)
        return Offset(heads.incarnation, found)
    return heads.oldest() if options.starting_position == "earliest" else heads.newest()


def _before(from_seq: int, heads: Heads) -> Offset:
    if len(heads.shards) > 1:
        raise several_shards(len(heads.shards))
    [bounds] = heads.shards.values()
    if from_seq > bounds.last_seq + 1:
        raise OptionError(
            f"option startingSequence: {from_seq} is above the next sequence of the stream, "
            f"{bounds.last_seq + 1}"
        )
    before = max(from_seq, bounds.first_seq) - 1
    return Offset(heads.incarnation, {bounds.shard: before})


def check_shards(start: Offset, heads: Heads) -> None:
    """Raise CheckpointError if ``start`` is of this stream, but of other shards."""
    if start.incarnation == heads.incarnation and start.shards.keys() != heads.shards.keys():
        raise CheckpointError(
            f"the checkpoint has shards {_listed(start.shards)}, but the query reads shards "
            f"{_listed(heads.shards)}: option subject was changed. Use a new checkpointLocation"
        )


def loss(start: Offset, heads: Heads) -> str | None:
    """Why the stream cannot be read from ``start`` on without a loss; None if it can.

    Messages that retention removed are not among the reasons: reading finds them.
    """
    if start.incarnation != heads.incarnation:
        return (
            "was re-created after the checkpoint of this query was written, or the checkpoint "
            "belongs to another stream"
        )
    for number, seq in sorted(start.shards.items()):
        if seq > heads.shards[number].last_seq:
            return (
                f"shard {number} ends at sequence {heads.shards[number].last_seq}, but this query "
                f"has read up to {seq}: the server has lost messages"
            )
    return None


def advance(start: Offset, heads: Heads, limit: int | None) -> Offset:
    """The position up to which the next batch reads: at most ``limit`` sequences after ``start``.

    Each shard with new messages moves by at least one. Sequences that retention removed do not
    count towards the limit. A stream that was re-created is read from its oldest message, and a
    shard that became shorter from its end.
    """
    read = start.shards if start.incarnation == heads.incarnation else {}
    reached = {
        number: min(max(read.get(number, 0), one.first_seq - 1), one.last_seq)
        for number, one in heads.shards.items()
    }
    backlogs = {number: heads.shards[number].last_seq - seq for number, seq in reached.items()}
    granted = backlogs if limit is None else shares(backlogs, limit)
    return Offset(heads.incarnation, {one: reached[one] + granted[one] for one in reached})


def shares(backlogs: Mapping[int, int], limit: int) -> dict[int, int]:
    """Divide ``limit`` in proportion to the backlogs: no share exceeds its backlog.

    Each shard with a backlog gets at least one, also beyond the limit. Otherwise larger ones that
    always have a backlog could hold up a small one for ever.
    """
    if sum(backlogs.values()) <= limit:
        return dict(backlogs)
    behind = sorted((n for n in backlogs if backlogs[n]), key=lambda n: (-backlogs[n], n))
    rest = max(0, limit - len(behind))
    total = sum(backlogs[number] - 1 for number in behind)
    granted = dict.fromkeys(backlogs, 0)
    for number in behind:
        granted[number] = 1 + rest * (backlogs[number] - 1) // max(total, 1)
    # Rounding left less than one for each shard whose share was rounded.
    for number in behind[: max(0, limit - sum(granted.values()))]:
        granted[number] += 1
    return granted


def ranges(start: Offset, end: Offset, partitions: int | None = None) -> list[Split]:
    """Cut the range after ``start`` up to ``end`` into splits of about equal numbers of sequences.

    There are about ``partitions`` of them, by default as many as pay off. A split is of one shard.
    They depend on nothing else, so a batch that is repeated has the same partitions.
    """
    read = start.shards if start.incarnation == end.incarnation else {}
    found = [(number, read.get(number, 0), end.shards[number]) for number in sorted(end.shards)]
    found = [(number, low, high) for number, low, high in found if low < high]
    total = sum(high - low for _, low, high in found)
    if partitions is None:
        few = min(DEFAULT_SPLITS, -(-total // PARTITION_SEQUENCES_MIN))
        partitions = min(SPLITS_MAX, max(few, -(-total // PARTITION_SEQUENCES_MAX)))
    splits: list[Split] = []
    for number, low, high in found:
        parts = -(-(high - low) * partitions // total)
        cuts = [low + (high - low) * at // parts for at in range(parts + 1)]
        splits += [Split(number, one + 1, two, 0, 0) for one, two in pairwise(cuts) if one < two]
    return splits


def _listed(shards: Mapping[int, object]) -> str:
    return ", ".join(str(number) for number in sorted(shards))

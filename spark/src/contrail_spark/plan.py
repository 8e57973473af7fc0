"""Replay plans, and the requests that read them. Pure: no Spark, no Arrow, no IO."""

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from contrail_spark.errors import OptionError, ProtocolError
from contrail_spark.options import ReplayOptions

SEQ: Final = "seq"
Query = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Split:
    """A closed range of sequences of one shard; ``messages`` and ``bytes`` are estimates."""

    shard: int
    from_seq: int
    to_seq: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ShardBounds:
    """The oldest and newest sequence of a shard; without messages, first is last plus one."""

    shard: int
    first_seq: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """A fixed range: every read of one DataFrame, and every retry, returns its messages.

    ``incarnation`` detects a stream that was deleted and created again in between. ``shards`` are
    all that may have messages that match; servers before 0.3 leave them out.
    """

    stream: str
    incarnation: str
    splits: tuple[Split, ...]
    shards: tuple[ShardBounds, ...] = ()


def plan_path(options: ReplayOptions) -> str:
    """The path of the request for the plan."""
    return f"/v1/streams/{quote(options.stream, safe='')}/replay/plan"


def plan_query(options: ReplayOptions) -> Query:
    """The query of the request for the plan: only the limits that the caller has set."""
    asked = {
        "splits": options.splits,
        "split_bytes": options.split_bytes,
        "from_seq": options.from_seq,
        "to_seq": options.to_seq,
        "start_time": options.start_time,
        "end_time": options.end_time,
        "subject": " ".join(options.subjects) or None,
        "consistency": options.consistency,
        "replica": options.replica,
    }
    return [(name, str(value)) for name, value in asked.items() if value is not None]


def several_shards(count: int) -> OptionError:
    """The error for a range of sequences if ``count`` shards may have messages of it."""
    return OptionError(
        f"options startingSequence and endingSequence: {count} shards of the stream are read, each "
        "with its own sequences; use startingTimestamp and endingTimestamp"
    )


def kept_query(split: Split) -> Query:
    """The query of a plan that shows what is left of ``split``.

    Only the leader may answer: a replica that is behind lacks the end of the range, which would
    look as if it had been removed.
    """
    return [
        ("shard", str(split.shard)),
        ("from_seq", str(split.from_seq)),
        ("to_seq", str(split.to_seq)),
    ]


def part_query(part: Split, split_bytes: int) -> Query:
    """The query of a plan of a part of one shard, in splits of about ``split_bytes``."""
    sizes = [("splits", "1"), ("split_bytes", str(split_bytes))]
    return [*kept_query(part), *sizes]


def parse_plan(document: object) -> ReplayPlan:
    """The plan in the server's JSON answer; ProtocolError if it is not valid."""
    try:
        fields = _object(document)
        splits, shards = fields["splits"], fields.get("shards", [])
        if not (isinstance(splits, list) and isinstance(shards, list)):
            raise TypeError("splits or shards are not a list")
        plan = ReplayPlan(
            stream=str(fields["stream"]),
            incarnation=str(fields["incarnation"]),
            splits=tuple(_parse_split(split) for split in splits),
            shards=tuple(_parse_bounds(bounds) for bounds in shards),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the server's replay plan cannot be read: {error!r}") from error
    return plan


def _parse_split(document: object) -> Split:
    fields = _object(document)
    split = Split(
        shard=_integer(fields["shard"]),
        from_seq=_integer(fields["from_seq"]),
        to_seq=_integer(fields["to_seq"]),
        messages=_integer(fields["messages"]),
        bytes=_integer(fields["bytes"]),
    )
    # The loop over such a split would end at once, and the DataFrame would lack its messages.
    if split.from_seq > split.to_seq:
        raise ValueError(f"the split {split.from_seq}..{split.to_seq} ends before it starts")
    return split


def _parse_bounds(document: object) -> ShardBounds:
    fields = _object(document)
    return ShardBounds(
        shard=_integer(fields["shard"]),
        first_seq=_integer(fields["first_seq"]),
        last_seq=_integer(fields["last_seq"]),
    )


def _object(document: object) -> dict[str, object]:
    if not isinstance(document, dict):
        raise TypeError("not a JSON object")
    return document


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not an integer")
    return value


def replay_path(plan: ReplayPlan) -> str:
    """The path of the requests that read the splits of ``plan``."""
    return f"/v1/streams/{quote(plan.stream, safe='')}/replay"


def wire_columns(wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The columns to request, always with `seq`: a read resumes after the last sequence."""
    return wanted if SEQ in wanted else (*wanted, SEQ)


def replay_query(
    options: ReplayOptions,
    plan: ReplayPlan,
    split: Split,
    columns: tuple[str, ...],
    consistency: str | None,
) -> Query:
    """The query that reads ``split`` in the types Spark takes."""
    query = [
        ("shard", str(split.shard)),
        ("from_seq", str(split.from_seq)),
        ("to_seq", str(split.to_seq)),
        ("incarnation", plan.incarnation),
        ("columns", ",".join(columns)),
        ("schema", "spark"),
    ]
    if options.subjects:
        query.append(("subject", " ".join(options.subjects)))
    if consistency is not None:
        query.append(("consistency", consistency))
    if options.replica is not None:
        query.append(("replica", options.replica))
    return query

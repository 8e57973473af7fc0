"""`report` and `find` of `contrail stream` and `contrail consumer`: many at once."""

import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from contrail_client.cli import show, units
from contrail_client.cli.arguments import StreamName
from contrail_client.cli.commands import consumers, streams
from contrail_client.cli.connection import Session, client_command
from contrail_client.models import ConsumerInfo, StreamInfo
from contrail_client.times import to_timedelta


class StreamOrder(StrEnum):
    """What a report on streams is sorted by."""

    NAME = "name"
    MESSAGES = "messages"
    SIZE = "size"
    SUBJECTS = "subjects"
    CONSUMERS = "consumers"


class ConsumerOrder(StrEnum):
    """What a report on consumers is sorted by."""

    NAME = "name"
    PENDING = "pending"
    UNACKED = "unacknowledged"


_STREAM_KEYS: Final[dict[StreamOrder, Callable[[StreamInfo], Any]]] = {
    StreamOrder.NAME: lambda info: info.name,
    StreamOrder.MESSAGES: lambda info: -info.state.messages,
    StreamOrder.SIZE: lambda info: -info.state.bytes,
    StreamOrder.SUBJECTS: lambda info: -info.state.num_subjects,
    StreamOrder.CONSUMERS: lambda info: -info.state.consumer_count,
}
_CONSUMER_KEYS: Final[dict[ConsumerOrder, Callable[[ConsumerInfo], Any]]] = {
    ConsumerOrder.NAME: lambda info: info.name,
    ConsumerOrder.PENDING: lambda info: -info.num_pending,
    ConsumerOrder.UNACKED: lambda info: -info.num_ack_pending,
}

Subject = Annotated[
    str | None, typer.Option(metavar="SUBJECT", help="Only streams that capture this subject.")
]
Idle = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION", help='Only those without activity for this long, such as "1h" or "7d".'
    ),
]
Older = Annotated[
    str | None, typer.Option(metavar="DURATION", help="Only those created at least this long ago.")
]
Empty = Annotated[bool, typer.Option("--empty", help="Only streams without messages.")]
Unused = Annotated[bool, typer.Option("--unused", help="Only streams without consumers.")]
MinMessages = Annotated[
    int | None, typer.Option(help="Only streams with at least this many messages.")
]
Pending = Annotated[
    int | None, typer.Option(help="Only consumers with at least this many pending messages.")
]
AckPending = Annotated[
    int | None, typer.Option(help="Only consumers with at least this many unacknowledged messages.")
]
Waiting = Annotated[bool, typer.Option("--waiting", help="Only consumers with a waiting pull.")]
Bound = Annotated[
    bool, typer.Option("--bound", help="Only consumers with a WebSocket subscription.")
]
Invert = Annotated[bool, typer.Option("--invert", help="Print those that do not match.")]


def register() -> None:
    """Add the commands to the groups that they belong to."""
    client_command(streams.app, "report")(report_streams)
    client_command(streams.app, "find")(find_streams)
    client_command(consumers.app, "report")(report_consumers)
    client_command(consumers.app, "find")(find_consumers)


def report_streams(
    session: Session,
    subject: Subject = None,
    sort: Annotated[StreamOrder, typer.Option(help="Sort order.")] = StreamOrder.NAME,
) -> None:
    """Compare all streams and show totals."""
    found = sorted(session.client.list_streams(subject=subject), key=_STREAM_KEYS[sort])
    if session.as_json:
        _json_lines(found)
        return
    now_ns = time.time_ns()
    rows: list[list[object]] = [
        [
            info.name,
            info.config["storage"],
            info.config["retention"],
            info.state.consumer_count,
            info.state.messages,
            units.size(info.state.bytes),
            info.state.num_subjects,
            info.state.num_deleted,
            units.age(info.state.last_ts, now_ns),
        ]
        for info in found
    ]
    states = [info.state for info in found]
    total = [
        units.counted(len(found), "stream"),
        "",
        "",
        sum(state.consumer_count for state in states),
        sum(state.messages for state in states),
        units.size(sum(state.bytes for state in states)),
        sum(state.num_subjects for state in states),
        sum(state.num_deleted for state in states),
        units.Figure("-"),
    ]
    columns = ["stream", "storage", "retention", "consumers", "messages", "size", "subjects"]
    show.table([*columns, "deleted", "last message"], [*rows, total])


def find_streams(
    session: Session,
    subject: Subject = None,
    idle: Idle = None,
    older: Older = None,
    empty: Empty = False,
    unused: Unused = False,
    min_messages: MinMessages = None,
    invert: Invert = False,
) -> None:
    """Print the names of streams that match all given conditions."""
    now_ns = time.time_ns()
    idle_s, older_s = _duration_s(idle), _duration_s(older)

    def matches(info: StreamInfo) -> bool:
        state = info.state
        return (
            (idle_s is None or units.since_s(state.last_ts or info.created, now_ns) >= idle_s)
            and (older_s is None or units.since_s(info.created, now_ns) >= older_s)
            and not (empty and state.messages)
            and not (unused and state.consumer_count)
            and (min_messages is None or state.messages >= min_messages)
        )

    found = session.client.list_streams(subject=subject)
    _names([info for info in found if matches(info) is not invert], as_json=session.as_json)


def report_consumers(
    session: Session,
    stream: StreamName,
    sort: Annotated[ConsumerOrder, typer.Option(help="Sort order.")] = ConsumerOrder.NAME,
) -> None:
    """Compare the consumers of a stream by pending and unacknowledged messages."""
    found = sorted(session.client.list_consumers(stream), key=_CONSUMER_KEYS[sort])
    if session.as_json:
        _json_lines(found)
        return
    messages = session.client.get_stream(stream).state.messages
    now_ns = time.time_ns()
    show.table(
        [
            "consumer",
            "ack",
            "unacknowledged",
            "redelivered",
            "pending",
            "behind",
            "pulls",
            "bound",
            "last delivery",
            "last ack",
        ],
        [
            [
                info.name,
                info.config["ack_policy"],
                _of(info.num_ack_pending, info.config["max_ack_pending"]),
                info.num_redelivered,
                info.num_pending,
                units.Figure(f"{info.num_pending / messages:.0%}" if messages else "-"),
                info.num_waiting,
                info.push_bound,
                units.age(info.delivered.last_active, now_ns),
                units.age(info.ack_floor.last_active, now_ns),
            ]
            for info in found
        ],
    )


def find_consumers(
    session: Session,
    stream: StreamName,
    pending: Pending = None,
    ack_pending: AckPending = None,
    idle: Idle = None,
    waiting: Waiting = False,
    bound: Bound = False,
    invert: Invert = False,
) -> None:
    """Print the names of a stream's consumers that match all given conditions."""
    now_ns = time.time_ns()
    idle_s = _duration_s(idle)

    def matches(info: ConsumerInfo) -> bool:
        last = info.delivered.last_active or info.created
        return (
            (pending is None or info.num_pending >= pending)
            and (ack_pending is None or info.num_ack_pending >= ack_pending)
            and (idle_s is None or units.since_s(last, now_ns) >= idle_s)
            and not (waiting and not info.num_waiting)
            and not (bound and not info.push_bound)
        )

    found = session.client.list_consumers(stream)
    _names([info for info in found if matches(info) is not invert], as_json=session.as_json)


def _names(found: Iterable[StreamInfo | ConsumerInfo], *, as_json: bool) -> None:
    if as_json:
        _json_lines(found)
    else:
        for info in found:
            show.console.print(info.name, markup=False, soft_wrap=True)


def _json_lines(found: Iterable[StreamInfo | ConsumerInfo]) -> None:
    for info in found:
        show.json_line(info)


def _of(number: int, limit: int) -> units.Figure:
    return units.Figure(f"{units.count(number)} of {units.count(limit)}" if limit > 0 else number)


def _duration_s(text: str | None) -> float | None:
    return None if text is None else to_timedelta(text).total_seconds()

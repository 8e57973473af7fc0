"""`contrail sub`, `next` and `replay`: messages out."""

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated

import typer

from contrail_client.cli import show
from contrail_client.cli.arguments import (
    ConsumerName,
    EndTime,
    FromReplica,
    FromSeq,
    Raw,
    StartTime,
    StreamName,
    ToSeq,
    consumer_names,
)
from contrail_client.cli.connection import Session, client_command
from contrail_client.cli.ending import while_read
from contrail_client.live.feed import CREDIT_MSGS
from contrail_client.live.ordered import Start
from contrail_client.models import Gap
from contrail_client.operations.replaying import Bounds

Filters = Annotated[
    list[str] | None,
    typer.Option(
        "--filter", metavar="SUBJECT", help="Only messages of this subject; may be repeated."
    ),
]
AckOption = Annotated[bool, typer.Option(help="Acknowledge printed messages.")]
Count = Annotated[int | None, typer.Option(min=1, help="Stop after this many messages.")]
Patience = Annotated[
    float | None,
    typer.Option(
        "--wait", min=0.0, metavar="SECONDS", help="Stop after this many seconds without a message."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    client_command(app, "sub")(subscribe)
    client_command(app, "next")(pull)
    client_command(app, "replay")(replay)


def subscribe(
    session: Session,
    stream: StreamName,
    consumer: Annotated[
        str | None,
        typer.Argument(
            help="Consumer to receive from; its messages are shared among receivers and "
            "acknowledged. Without a consumer, print all messages of the stream in order.",
            autocompletion=consumer_names,
        ),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="Where to start without a consumer: all, last, new, a sequence or an RFC 3339 "
            "time.",
        ),
    ] = "new",
    filters: Filters = None,
    ack: AckOption = True,
    count: Count = None,
    wait: Patience = None,
    raw: Raw = False,
) -> None:
    """Print messages as they arrive, until Ctrl-C."""
    with while_read():
        if consumer is None:
            _read(session, stream, _start(start), filters or [], count, wait, raw=raw)
        elif filters or start != "new":
            raise ValueError("--start and --filter cannot be used with a consumer")
        else:
            _consume(session, stream, consumer, count, wait, ack=ack, raw=raw)


def _consume(
    session: Session,
    stream: str,
    consumer: str,
    count: int | None,
    wait: float | None,
    *,
    ack: bool,
    raw: bool,
) -> None:
    # Do not receive more than is printed: other subscribers would have to wait for the rest.
    credit = min(count or CREDIT_MSGS, CREDIT_MSGS)
    with session.client.subscribe(stream, consumer, credit_msgs=credit) as messages:
        for number in _numbers(count):
            found = messages.next(timeout_s=wait)
            if found is None:
                return
            show.message(found.delivered, as_json=session.as_json, raw=raw)
            if ack and number == count:
                found.ack_sync()  # if the last one is durable, so are all before it
            elif ack:
                found.ack()


def _read(
    session: Session,
    stream: str,
    start: Start,
    filters: list[str],
    count: int | None,
    wait: float | None,
    *,
    raw: bool,
) -> None:
    def report(gap: Gap) -> None:
        text = f"{gap.first} to {gap.last} are missing: {gap.cause}"
        show.note(text, as_json=session.as_json)

    reader = session.client.ordered(stream, start=start, filter_subjects=filters, on_gap=report)
    with reader as messages:
        for _ in _numbers(count):
            found = messages.next(timeout_s=wait)
            if found is None:
                return
            show.message(found, as_json=session.as_json, raw=raw)


def pull(
    session: Session,
    stream: StreamName,
    consumer: ConsumerName,
    batch: Annotated[int, typer.Option(min=1, help="Maximum number of messages.")] = 1,
    expires: Annotated[
        str, typer.Option(metavar="DURATION", help="How long to wait for the first message.")
    ] = "5s",
    ack: AckOption = True,
    raw: Raw = False,
) -> None:
    """Pull the next messages of a consumer."""
    worker = session.client.consumer(stream, consumer)
    found = worker.next(batch, expires=expires)
    for delivery in found:
        show.message(delivery, as_json=session.as_json, raw=raw)
    if ack:
        worker.ack(*found, sync=True)
    if not (session.as_json or raw):
        show.note(f"{len(found)} received, {found.num_pending} pending")


def replay(
    session: Session,
    stream: StreamName,
    from_seq: FromSeq = None,
    to_seq: ToSeq = None,
    start_time: StartTime = None,
    end_time: EndTime = None,
    subject: Annotated[
        str | None, typer.Option(metavar="SUBJECT", help="Only messages of these subjects.")
    ] = None,
    shard: Annotated[int | None, typer.Option(help="Only messages of this shard.")] = None,
    consistency: FromReplica = None,
    raw: Raw = False,
) -> None:
    """Print all messages of a range. Default: the whole stream."""
    bounds = Bounds(
        from_seq=from_seq,
        to_seq=to_seq,
        start_time=start_time,
        end_time=end_time,
        subject=subject,
        shard=shard,
        consistency=consistency,
    )
    plan = session.client.replay_plan(stream, bounds)
    total = sum(split.messages for split in plan.splits)
    shown = not show.console.is_terminal  # on a terminal, the messages themselves show progress
    with show.progress(f"Replaying {stream}", total, shown=shown) as bar:
        for split in plan.splits:
            for message in session.client.read_split(split):
                show.message(message, as_json=session.as_json, raw=raw)
                bar.advance(bar.task_ids[0])


def _numbers(count: int | None) -> Iterator[int]:
    number = 0
    while count is None or number < count:
        number += 1
        yield number


def _start(text: str) -> Start:
    """Where to begin; ValueError when the text does not say."""
    match text:
        case "all" | "last" | "new":
            return text
    if text.isdecimal():
        return int(text)
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"--start must be all, last, new, a sequence or an RFC 3339 time, not {text!r}"
        ) from None

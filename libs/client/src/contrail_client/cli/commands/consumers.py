"""`contrail consumer`: manage consumers."""

import time
from typing import Annotated, cast

import typer

from contrail_client.cli import show, units
from contrail_client.cli.arguments import (
    ConsumerName,
    FieldsFile,
    Replace,
    SetFields,
    StreamName,
    Yes,
    confirm,
    fields_of,
    hint_at_edit,
)
from contrail_client.cli.connection import Session, client_command
from contrail_client.cli.tree import group
from contrail_client.configs import ConsumerConfig

app = group("Manage consumers.")

Filters = Annotated[
    list[str] | None,
    typer.Option("--filter", metavar="SUBJECT", help="Filter subject; may be repeated."),
]
AckWait = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION", help='Time to wait for an ack before redelivery, such as "30s".'
    ),
]
MaxDeliver = Annotated[int | None, typer.Option(help="Maximum number of deliveries of a message.")]
MaxAckPending = Annotated[
    int | None, typer.Option(help="Maximum number of unacknowledged messages.")
]


@client_command(app, "ls")
def list_consumers(session: Session, stream: StreamName) -> None:
    """List a stream's consumers."""
    now_ns = time.time_ns()
    show.listing(
        session.client.list_consumers(stream),
        [
            "consumer",
            "delivered",
            "ack floor",
            "unacknowledged",
            "redelivered",
            "pending",
            "waiting pulls",
            "last delivery",
        ],
        lambda info: (
            info.name,
            info.delivered.stream_seq,
            info.ack_floor.stream_seq,
            info.num_ack_pending,
            info.num_redelivered,
            info.num_pending,
            info.num_waiting,
            units.age(info.delivered.last_active, now_ns),
        ),
        as_json=session.as_json,
    )


@client_command(app, "info")
def show_consumer(session: Session, stream: StreamName, consumer: ConsumerName) -> None:
    """Show a consumer's configuration and progress."""
    info = session.client.consumer(stream, consumer).info()
    show.facts(info, f"{stream} / {consumer}", as_json=session.as_json)


@client_command(app, "create")
def create_consumer(
    session: Session,
    stream: StreamName,
    consumer: ConsumerName,
    filters: Filters = None,
    deliver: Annotated[
        str | None, typer.Option(metavar="POLICY", help="Where to start: all, new, last, ...")
    ] = None,
    ack: Annotated[
        str | None, typer.Option(metavar="POLICY", help="Ack policy: explicit, all or none.")
    ] = None,
    ack_wait: AckWait = None,
    max_deliver: MaxDeliver = None,
    max_ack_pending: MaxAckPending = None,
    fields: FieldsFile = None,
    assignments: SetFields = None,
    replace: Replace = False,
) -> None:
    """Create a durable consumer. An existing consumer is not changed."""
    config = fields_of(
        fields,
        assignments,
        filter_subjects=filters,
        deliver_policy=deliver,
        ack_policy=ack,
        ack_wait=ack_wait,
        max_deliver=max_deliver,
        max_ack_pending=max_ack_pending,
    )
    wanted = cast(ConsumerConfig, config)  # the server checks it
    if replace:
        made = session.client.put_consumer(stream, consumer, wanted)
    else:
        with hint_at_edit("contrail consumer edit"):
            made = session.client.create_consumer(stream, consumer, wanted)
    show.configuration(made.info(), f"{stream} / {consumer}", as_json=session.as_json)


@client_command(app, "edit")
def edit_consumer(
    session: Session,
    stream: StreamName,
    consumer: ConsumerName,
    filters: Filters = None,
    ack_wait: AckWait = None,
    max_deliver: MaxDeliver = None,
    max_ack_pending: MaxAckPending = None,
    fields: FieldsFile = None,
    assignments: SetFields = None,
) -> None:
    """Change the given fields of a consumer's configuration."""
    changes = fields_of(
        fields,
        assignments,
        filter_subjects=filters,
        ack_wait=ack_wait,
        max_deliver=max_deliver,
        max_ack_pending=max_ack_pending,
    )
    info = session.client.consumer(stream, consumer).update(changes)
    show.configuration(info, f"{stream} / {consumer}", as_json=session.as_json)


@client_command(app, "rm")
def remove_consumer(
    session: Session, stream: StreamName, consumer: ConsumerName, yes: Yes = False
) -> None:
    """Remove a consumer."""
    found = session.client.consumer(stream, consumer)
    info = found.info()
    left = (
        f"{units.counted(info.num_pending, 'message')} pending and "
        f"{units.count(info.num_ack_pending)} unacknowledged"
    )
    confirm(f"Remove consumer {consumer} of stream {stream} with {left}?", yes)
    found.delete()
    show.done(
        f"consumer {consumer} of {stream} removed, with {left}",
        {
            "removed": consumer,
            "stream": stream,
            "num_pending": info.num_pending,
            "num_ack_pending": info.num_ack_pending,
        },
        as_json=session.as_json,
    )

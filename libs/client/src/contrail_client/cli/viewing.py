"""`contrail stream view`: a stream a page at a time."""

import sys
from typing import Annotated

import typer

from contrail_client.cli import show, streams, units
from contrail_client.cli.arguments import Raw, StreamName
from contrail_client.cli.connection import Session, client_command
from contrail_client.models import Range

Page = Annotated[int, typer.Option(min=1, max=1_000, help="Number of messages per page.")]
FromSeq = Annotated[
    int | None, typer.Option("--from", metavar="SEQ", help="Start at this sequence.")
]
Since = Annotated[str | None, typer.Option(metavar="TIME", help="Start at this time (RFC 3339).")]


def register() -> None:
    """Add the commands to the groups that they belong to."""
    client_command(streams.app, "view")(view_stream)


def view_stream(
    session: Session,
    stream: StreamName,
    subject: streams.Filter = None,
    from_seq: FromSeq = None,
    since: Since = None,
    shard: streams.Shard = None,
    page: Page = 25,
    raw: Raw = False,
) -> None:
    """Page through a stream's messages. Without a terminal, print the first page."""
    found = session.client.read_range(
        stream, from_seq=from_seq, start_time=since, subject=subject, shard=shard, limit=page
    )
    while True:
        for message in found.messages:
            show.message(message, as_json=session.as_json, raw=raw)
        if not found.num_pending or not _wants_more(found):
            return
        found = session.client.read_range(
            stream,
            from_seq=found.cursor or found.next_seq,
            subject=subject,
            shard=shard,
            limit=page,
        )


def _wants_more(found: Range) -> bool:
    if not (sys.stdin.isatty() and show.errors.is_terminal):
        return False
    left = units.counted(found.num_pending, "message")
    show.errors.print(f"{left} left. Enter for more, q to quit: ", end="", markup=False)
    answer = sys.stdin.readline()
    return answer.endswith("\n") and answer.strip().lower() not in ("q", "quit")

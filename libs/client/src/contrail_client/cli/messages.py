"""`contrail pub`, `next` and `replay`: messages in and out."""

import sys
from typing import Annotated

import typer

from contrail_client.cli import show
from contrail_client.cli.connection import DEFAULT_URL, AsJson, Server, TokenFile, connected
from contrail_client.replaying import Bounds

Stream = Annotated[str, typer.Argument(help="Name of the stream.")]


def publish(
    subject: Annotated[str, typer.Argument(help="Subject of the message.")],
    payload: Annotated[str, typer.Argument(help="The payload; - reads standard input.")],
    headers: Annotated[
        list[str] | None, typer.Option("--header", "-H", help="NAME=VALUE; may be repeated.")
    ] = None,
    msg_id: Annotated[
        str | None, typer.Option(help="Stored once within the duplicate window.")
    ] = None,
    server: Server = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Publish one message."""
    with connected(server, token_file) as client:
        data = sys.stdin.buffer.read() if payload == "-" else payload
        ack = client.publish(subject, data, headers=_headers(headers or []), msg_id=msg_id)
    if as_json:
        show.json_line(ack)
    else:
        known = " (known already)" if ack.duplicate else ""
        show.console.print(f"{ack.stream} {ack.seq}{known}", markup=False)


def pull(
    stream: Stream,
    consumer: Annotated[str, typer.Argument(help="Name of the consumer.")],
    batch: Annotated[int, typer.Option(help="Most messages.")] = 1,
    expires: Annotated[str, typer.Option(help="How long to wait for the first.")] = "5s",
    ack: Annotated[bool, typer.Option(help="Acknowledge what was printed.")] = True,
    server: Server = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Receive the next messages of a consumer."""
    with connected(server, token_file) as client:
        worker = client.consumer(stream, consumer)
        found = worker.next(batch, expires=expires)
        for delivery in found:
            show.message(delivery, as_json=as_json)
        if ack:
            worker.ack(*found, sync=True)
    if not as_json:
        show.errors.print(f"{len(found)} received, {found.num_pending} pending")


def replay(
    stream: Stream,
    from_seq: Annotated[int | None, typer.Option(help="First sequence.")] = None,
    to_seq: Annotated[int | None, typer.Option(help="Last sequence.")] = None,
    start_time: Annotated[str | None, typer.Option(help="RFC 3339.")] = None,
    end_time: Annotated[str | None, typer.Option(help="RFC 3339, exclusive.")] = None,
    subject: Annotated[str | None, typer.Option(help="Only these subjects.")] = None,
    server: Server = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Print every message of a range, by default of the whole stream."""
    bounds = Bounds(
        from_seq=from_seq,
        to_seq=to_seq,
        start_time=start_time,
        end_time=end_time,
        subject=subject,
    )
    with connected(server, token_file) as client:
        for message in client.replay(stream, bounds):
            show.message(message, as_json=as_json)


def _headers(given: list[str]) -> dict[str, list[str]]:
    headers: dict[str, list[str]] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise ValueError(f"a header is NAME=VALUE, not {each!r}")
        headers.setdefault(name, []).append(value)
    return headers

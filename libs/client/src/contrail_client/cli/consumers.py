"""`contrail consumer`: list, show, create and remove consumers."""

from pathlib import Path
from typing import Annotated

import typer

from contrail_client.calls import given
from contrail_client.cli import show
from contrail_client.cli.connection import DEFAULT_URL, AsJson, Server, TokenFile, connected
from contrail_client.cli.streams import read_object

app = typer.Typer(help="Manage consumers.", no_args_is_help=True)

Stream = Annotated[str, typer.Argument(help="Name of the stream.")]
Name = Annotated[str, typer.Argument(help="Name of the consumer.")]


@app.command("ls")
def list_consumers(
    stream: Stream,
    server: Server = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List a stream's consumers."""
    with connected(server, token_file) as client:
        found = list(client.list_consumers(stream))
    if as_json:
        for info in found:
            show.json_line(info)
        return
    show.table(
        ["consumer", "delivered", "ack floor", "unacknowledged", "pending", "waiting pulls"],
        (
            (
                info.name,
                info.delivered.stream_seq,
                info.ack_floor.stream_seq,
                info.num_ack_pending,
                info.num_pending,
                info.num_waiting,
            )
            for info in found
        ),
    )


@app.command("info")
def show_consumer(
    stream: Stream,
    name: Name,
    server: Server = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show a consumer's configuration and progress."""
    with connected(server, token_file) as client:
        info = client.consumer(stream, name).info()
    if as_json:
        show.json_line(info)
    else:
        show.pairs(info, f"{stream} / {name}")


@app.command("create")
def create_consumer(
    stream: Stream,
    name: Name,
    filters: Annotated[
        list[str] | None, typer.Option("--filter", help="Subject to receive; may be repeated.")
    ] = None,
    deliver: Annotated[str | None, typer.Option(help="Where to begin: all, new, last, ...")] = None,
    ack_wait: Annotated[str | None, typer.Option(help='Time to ack, such as "30s".')] = None,
    max_deliver: Annotated[int | None, typer.Option(help="Most deliveries of one message.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="JSON file with further fields of the configuration.")
    ] = None,
    server: Server = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Create a durable consumer, or replace its configuration."""
    with connected(server, token_file) as client:
        fields = read_object(config) | given(
            filter_subjects=filters,
            deliver_policy=deliver,
            ack_wait=ack_wait,
            max_deliver=max_deliver,
        )
        consumer = client.ensure_consumer(stream, name, fields)  # type: ignore[arg-type]
        info = consumer.info()
    if as_json:
        show.json_line(info)
    else:
        show.pairs(info.config, f"{stream} / {name}")


@app.command("rm")
def remove_consumer(
    stream: Stream, name: Name, server: Server = DEFAULT_URL, token_file: TokenFile = None
) -> None:
    """Remove a consumer."""
    with connected(server, token_file) as client:
        client.consumer(stream, name).delete()

"""`contrail stream`: list, show, create, remove and purge streams."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from contrail_client.calls import given
from contrail_client.cli import show
from contrail_client.cli.connection import (
    DEFAULT_URL,
    AsJson,
    Server,
    TokenFile,
    connected,
    read_file,
)

app = typer.Typer(help="Manage streams.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the stream.")]
Subject = Annotated[str | None, typer.Option("--subject", help="Only these subjects.")]


@app.command("ls")
def list_streams(
    subject: Subject = None,
    server: Server = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List streams."""
    with connected(server, token_file) as client:
        found = list(client.list_streams(subject=subject))
    if as_json:
        for info in found:
            show.json_line(info)
        return
    show.table(
        ["stream", "subjects", "messages", "bytes", "first", "last", "consumers"],
        (
            (
                info.name,
                ", ".join(info.config.get("subjects", [])),
                info.state.messages,
                info.state.bytes,
                info.state.first_seq,
                info.state.last_seq,
                info.state.consumer_count,
            )
            for info in found
        ),
    )


@app.command("info")
def show_stream(
    name: Name,
    server: Server = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show a stream's configuration and state."""
    with connected(server, token_file) as client:
        info = client.get_stream(name)
    if as_json:
        show.json_line(info)
    else:
        show.pairs(info, name)


@app.command("create")
def create_stream(
    name: Name,
    subjects: Annotated[
        list[str] | None, typer.Option("--subject", help="Captured subject; may be repeated.")
    ] = None,
    max_msgs: Annotated[int | None, typer.Option(help="Most messages kept.")] = None,
    max_bytes: Annotated[int | None, typer.Option(help="Most bytes kept.")] = None,
    max_age: Annotated[str | None, typer.Option(help='Longest age, such as "7d".')] = None,
    discard: Annotated[str | None, typer.Option(help="At a limit: old or new.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="JSON file with further fields of the configuration.")
    ] = None,
    server: Server = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Create a stream, or replace its configuration."""
    with connected(server, token_file) as client:
        fields = read_object(config) | given(
            subjects=subjects,
            max_msgs=max_msgs,
            max_bytes=max_bytes,
            max_age=max_age,
            discard=discard,
        )
        info = client.ensure_stream(name, fields)  # type: ignore[arg-type] # the server checks it
    if as_json:
        show.json_line(info)
    else:
        show.pairs(info.config, name)


@app.command("rm")
def remove_stream(name: Name, server: Server = DEFAULT_URL, token_file: TokenFile = None) -> None:
    """Remove a stream with its messages and consumers."""
    with connected(server, token_file) as client:
        client.delete_stream(name)


@app.command("purge")
def purge_stream(
    name: Name,
    subject: Subject = None,
    up_to_seq: Annotated[int | None, typer.Option(help="Only below this sequence.")] = None,
    keep: Annotated[int | None, typer.Option(help="Keep this many of the newest.")] = None,
    server: Server = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Remove messages of a stream, by default all of them."""
    with connected(server, token_file) as client:
        purged = client.purge_stream(name, subject=subject, up_to_seq=up_to_seq, keep=keep)
    if as_json:
        show.json_line({"purged": purged})
    else:
        show.console.print(f"{purged} messages removed")


def read_object(path: Path | None) -> dict[str, Any]:
    """The JSON object in a file; ValueError when it holds something else."""
    if path is None:
        return {}
    try:
        return msgspec.json.decode(read_file(path), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error

"""Options that every client command has, and the client they make."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from contrail_client.cli import show
from contrail_client.client import Contrail
from contrail_client.errors import ApiProblem, ContrailError, Unreachable
from contrail_client.transport import DEFAULT_URL

FAILED = 1
MISUSED = 2

Server = Annotated[
    str, typer.Option("--server", envvar="CONTRAIL_URL", help="Address of the server.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", help="File with the token; otherwise CONTRAIL_TOKEN."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON value a line.")]

__all__ = ["DEFAULT_URL", "AsJson", "Server", "TokenFile", "connected", "read_file"]


@contextmanager
def connected(server: str, token_file: Path | None) -> Iterator[Contrail]:
    """A client; its errors become a message and a status: 2 for misuse, 1 for the rest."""
    try:
        with Contrail(server, token=_token(token_file)) as client:
            yield client
    except ContrailError as error:
        _explain(error, server)
        raise typer.Exit(FAILED) from error
    except ValueError as error:
        show.failure(str(error))
        raise typer.Exit(MISUSED) from error


def read_file(path: Path) -> bytes:
    """The file's bytes; ValueError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error


def _token(file: Path | None) -> str | None:
    return read_file(file).decode().strip() if file else os.environ.get("CONTRAIL_TOKEN")


def _explain(error: ContrailError, server: str) -> None:
    show.failure(str(error))
    match error:
        case ApiProblem(errors=fields):
            for each in fields:
                show.failure(f"  {each.pointer}: {each.message}")
        case Unreachable():
            show.failure(f"Is a server running at {server}? `contrail serve` starts one.")

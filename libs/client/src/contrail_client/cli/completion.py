"""Shell completion of stream and consumer names. What cannot be found out is not completed."""

import os
from itertools import islice
from typing import Final

import typer

from contrail_client.blocking.client import Contrail
from contrail_client.calls import Retries
from contrail_client.cli.context import read_context
from contrail_client.errors import ContrailError

_SHOWN_MAX: Final = 100
_PATIENCE_S: Final = 1.0


def stream_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Streams whose names begin with `incomplete`."""
    try:
        with _client(ctx) as client:
            found = islice(client.list_streams(prefix=incomplete), _SHOWN_MAX)
            return [info.name for info in found]
    except (ContrailError, ValueError):
        return []


def consumer_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Consumers of the stream named before whose names begin with `incomplete`."""
    try:
        with _client(ctx) as client:
            found = client.list_consumers(str(ctx.params.get("stream") or ""))
            names = (info.name for info in found if info.name.startswith(incomplete))
            return list(islice(names, _SHOWN_MAX))
    except (ContrailError, ValueError):
        return []


def _client(ctx: typer.Context) -> Contrail:
    given = ctx.params
    context = read_context(
        given.get("server"), given.get("token_file"), given.get("config"), os.environ
    )
    return Contrail(
        context.url, token=context.token, timeout_s=_PATIENCE_S, retries=Retries(attempts=1)
    )

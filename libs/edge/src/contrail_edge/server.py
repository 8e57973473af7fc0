"""The HTTP server of an edge process: uvicorn with the kit's protocol, sockets and shutdown."""

import asyncio
import contextlib
import socket
from collections.abc import Generator, Sequence
from typing import Final

import uvicorn

from contrail_edge.app import EdgeApp
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.http_protocol import protocol_class

_BACKLOG: Final = 2048


class EdgeServer(uvicorn.Server):
    """Serves the application on given sockets until ``should_exit`` is set.

    The process handles signals. When the server stops, it accepts no more connections, answers all
    long polls, and waits for other requests for the grace time of the settings.
    """

    def __init__(
        self, app: EdgeApp, config: uvicorn.Config, sockets: Sequence[socket.socket]
    ) -> None:
        super().__init__(config)
        self._app = app
        self._sockets = list(sockets)
        self.running = asyncio.Event()
        """Set when the server accepts connections."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on ``sockets``; by default on those given to the constructor."""
        await super().serve(self._sockets if sockets is None else sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections, and set ``running``."""
        await super().startup(sockets)
        self.running.set()

    async def on_tick(self, counter: int) -> bool:
        """Do what is due; called ten times a second. Return True if the server should stop."""
        should_stop = await super().on_tick(counter)
        lines = (b"%b: %b\r\n" % header for header in self.server_state.default_headers)
        self._app.state.common_lines = b"".join(lines)
        return should_stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all long polls, then stop as uvicorn does."""
        self._app.drain()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Do nothing, because the process handles signals."""
        yield


def make_server(
    app: EdgeApp, settings: EdgeSettings, sockets: Sequence[socket.socket]
) -> EdgeServer:
    """Return a server for ``app`` on bound ``sockets``; run it with ``await server.serve()``."""
    config = uvicorn.Config(
        app,
        http=protocol_class(settings, app),
        ws="none",
        loop="uvloop",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=round(settings.keep_alive_s),
        timeout_graceful_shutdown=round(settings.grace_s),
    )
    return EdgeServer(app, config, sockets)

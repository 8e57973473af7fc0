"""An edge on a real port, and patience with it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Final

from contrail_edge.server import EdgeServer, make_server
from tests.unit.edge.edge_rig import Edge

SOON_S: Final = 60.0
"""What comes at once on an idle machine comes within this on a busy one."""


async def wait_until(condition: Callable[[], bool]) -> None:
    """Look again and again until ``condition`` holds."""
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(edge: Edge) -> AsyncIterator[tuple[int, EdgeServer]]:
    """Serve ``edge`` on a free port until the block ends; answers the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = make_server(edge.app, edge.settings, [listener])
    task = asyncio.create_task(server.serve())
    await wait_until(lambda: server.started)
    try:
        yield listener.getsockname()[1], server
    finally:
        server.should_exit = True
        await task

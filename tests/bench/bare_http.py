"""HTTP without a service: uvicorn and an application that answers at once.

``python -m tests.bench.bare_http`` serves on a free port and prints it. Its rate is the upper limit
for every service on the same HTTP server and event loop.
"""

import asyncio
import contextlib
import socket
import sys
from dataclasses import dataclass
from typing import Final

import uvicorn
from starlette.types import Receive, Scope, Send

from tests.bench.figures import Bench, BenchError, Measured, Run
from tests.bench.http_scripts import Singles
from tests.bench.load import Load
from tests.bench.patience import repeat
from tests.bench.processes import HOST, ready_line, running
from tests.bench.server import drive

_BODY: Final = b'{"stream":"BENCH","seq":1000000,"duplicate":false}'
_HEADERS: Final = [
    (b"content-type", b"application/json"),
    (b"content-length", b"%d" % len(_BODY)),
]
_WARM_S: Final = 0.5


async def _answer(_: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 201, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": _BODY})


@dataclass(frozen=True, slots=True)
class BareRequests:
    """Requests a second, like those of single publishes, answered without storing anything."""

    connections: int

    def __call__(self, bench: Bench) -> Measured:
        """Requests a second."""
        command = [sys.executable, "-m", "tests.bench.bare_http"]
        with running(command, bench.folder / "bare_http.log") as process:
            line = ready_line(process)
            if not line:
                raise BenchError("the bare HTTP server did not start")
            load = Load(
                int(line),
                process.pid,
                Singles("bench", self.connections),
                seconds=bench.scale.seconds,
                warm_s=_WARM_S,
            )

            def once(_: int) -> Run:
                return drive(bench, load).run

            return Measured(repeat(bench, once))


def main() -> None:
    """Serve until the process is ended."""
    with socket.create_server((HOST, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        config = uvicorn.Config(
            _answer, loop="uvloop", lifespan="off", ws="none", access_log=False, log_level="error"
        )
        with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
            uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()

"""HTTP without a service: uvicorn and an application that answers at once, or after a sync.

``python -m tests.bench.bare_http [FOLDER]`` serves on a free port and prints it. Its rate is the
upper limit for every service on the same HTTP server and event loop. With a folder, a thread
writes 4 KiB into a preallocated file there and syncs it before each answer, as every service must
that confirms only what is on the disk.
"""

import asyncio
import contextlib
import itertools
import os
import socket
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

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
_BLOCK: Final = bytes(4_096)
_BLOCKS: Final = 4_096


async def _answer(_: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 201, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": _BODY})


def _answer_after_sync(file: int) -> ASGIApp:
    """The application that answers when a thread has written to ``file`` and synced it."""
    places = itertools.cycle(range(0, len(_BLOCK) * _BLOCKS, len(_BLOCK)))
    thread = ThreadPoolExecutor(1)

    def store() -> None:
        os.pwrite(file, _BLOCK, next(places))
        os.fdatasync(file)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.get_running_loop().run_in_executor(thread, store)
        await _answer(scope, receive, send)

    return answer


@dataclass(frozen=True, slots=True)
class BareRequests:
    """Requests a second, like those of single publishes, answered without a service.

    With ``synced``, 4 KiB are written to a file and synced before each answer.
    """

    connections: int
    synced: bool = False

    def __call__(self, bench: Bench) -> Measured:
        """Requests a second."""
        command = [sys.executable, "-m", "tests.bench.bare_http"]
        if self.synced:
            command.append(str(bench.folder))
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
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with socket.create_server((HOST, 0)) as listener, contextlib.ExitStack() as stack:
        app: ASGIApp = _answer
        if folder is not None:
            file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
            file.write(_BLOCK * _BLOCKS)
            os.fsync(file.fileno())
            app = _answer_after_sync(file.fileno())
        print(listener.getsockname()[1], flush=True)
        config = uvicorn.Config(
            app, loop="uvloop", lifespan="off", ws="none", access_log=False, log_level="error"
        )
        with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
            uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()

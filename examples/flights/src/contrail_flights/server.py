"""The server: a child process that stops with this one, or a server that runs already."""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from contrail_client import ApiProblem, Contrail, Unreachable

HOST: Final = "127.0.0.1"
READY_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 20.0
LOG_TAIL_BYTES: Final = 2_000
UNAUTHENTICATED: Final = 401


class ServerError(RuntimeError):
    """The server did not start, ended on its own (with the end of its log), or cannot be used."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is up: its address, its log file and its process."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def ended(self) -> ServerError | None:
        """The error to raise if the process has ended; None if it runs."""
        status = self.process.poll()
        return None if status is None else _ended(status, self.log)

    def wait(self) -> ServerError:
        """Wait until the process ends; returns the error to raise."""
        return _ended(self.process.wait(), self.log)


@contextlib.contextmanager
def serving(port: int, data_dir: Path) -> Iterator[Server]:
    """A server on 127.0.0.1 (``port`` 0 takes a free one) for as long as the context lasts.

    It gets its own process group: Ctrl-C in a terminal reaches only this process, which then stops
    the server cleanly. Raises ServerError if it does not start.
    """
    _check_free(port)
    data_dir.mkdir(parents=True, exist_ok=True)
    log = data_dir / "serve.log"
    command = [sys.executable, "-m", "contrail_client", "serve"]
    command += ["--host", HOST, "--port", str(port), "--data-dir", str(data_dir)]
    # Only the flags above count: the environment may have settings of another server.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("CONTRAIL_")
    }
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            # Ctrl-C in the terminal must not reach the server before this process stops it.
            start_new_session=True,
        )
    try:
        yield Server(_ready_url(process, log), log, process)
    finally:
        _stop(process)


@contextlib.contextmanager
def connected(url: str, token_file: Path | None) -> Iterator[Contrail]:
    """A client of a server that runs already, after the server has answered once.

    Raises ServerError if it does not answer, or refuses the token.
    """
    with Contrail(url, token=_token(token_file)) as client:
        try:
            next(client.list_streams(), None)
        except Unreachable as error:
            raise ServerError(f"no server answers at {url}: {error}") from error
        except ApiProblem as problem:
            if problem.status != UNAUTHENTICATED:
                raise
            wanted = "requires a token: use --token-file"
            if token_file is not None:
                wanted = f"refuses the token in {token_file}"
            raise ServerError(f"the server at {url} {wanted}") from problem
        yield client


def _token(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ServerError(f"the token file cannot be read: {error}") from error


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        # The server sets this too: a port with connections in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ServerError(
                f"port {port} cannot be used ({error.strerror}); is another server running? "
                "Stop it, or choose another port with --port"
            ) from None


def _ready_url(process: subprocess.Popen[bytes], log: Path) -> str:
    """The address in the line that the server prints when it is ready."""
    assert process.stdout is not None
    line = _first_line(process.stdout, READY_TIMEOUT_S)
    if not line:
        try:
            status = process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            raise ServerError(
                f"the server was not ready after {READY_TIMEOUT_S:.0f} s{_tail(log)}"
            ) from None
        raise _ended(status, log)
    try:
        return str(json.loads(line)["url"])
    except (ValueError, KeyError, TypeError) as error:
        raise ServerError(f"the server's first line cannot be read: {line!r}") from error


def _first_line(stream: IO[bytes], timeout_s: float) -> bytes:
    """The first complete line; empty if the stream or the time ends before it."""
    line = b""
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not line.endswith(b"\n") and selector.select(max(0.0, deadline - time.monotonic())):
            part = os.read(stream.fileno(), 4_096)
            if not part:
                return b""
            line += part
    return line if line.endswith(b"\n") else b""


def _ended(status: int, log: Path) -> ServerError:
    how = f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
    return ServerError(f"the server ended with {how}{_tail(log)}")


def _tail(log: Path) -> str:
    with log.open("rb") as lines:
        lines.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        text = lines.read().decode(errors="replace").strip()
    return f"; its log {log} ends:\n{text}" if text else f"; its log {log} is empty"


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()

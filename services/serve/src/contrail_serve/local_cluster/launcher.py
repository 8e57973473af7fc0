"""The launcher: starts the processes of a local cluster, watches them, and stops them."""

import asyncio
import contextlib
import ctypes
import hmac
import json
import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from contrail_serve.local_cluster.folder import (
    HOST,
    SIZES,
    Control,
    Folder,
    FolderError,
    Place,
)
from contrail_serve.logs import configure_logs
from contrail_serve.process import StartError, first_done, stop_signal

_READY_S: Final = 120.0
_STOP_S: Final = 60.0
_POLL_S: Final = 0.05
_AGAIN_MIN_S: Final = 0.5
_AGAIN_MAX_S: Final = 10.0
_SET_DEATH_SIGNAL: Final = 1
_log: Final = structlog.get_logger("contrail.local_cluster")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a local cluster is run. ``config`` is a file with settings for all processes.

    ``restart``: whether processes that end are started again.
    """

    data_dir: Path
    nodes: int = SIZES[0]
    port: int = 7420
    restart: bool = False
    config: Path | None = None


def launch(options: Options) -> int:
    """Run a cluster until SIGTERM or SIGINT; return the exit status, as for the services."""
    if options.nodes not in SIZES:
        print(f"contrail: a cluster has 3 or 5 nodes, not {options.nodes}", file=sys.stderr)
        return 2
    configure_logs("info", "auto", service="cluster", node="cluster")
    folder = Folder(options.data_dir)
    try:
        with folder.locked():
            places = folder.places(options.nodes, options.port)
            asyncio.run(_Launcher(folder, places, options).run())
    except (FolderError, StartError, OSError) as error:
        print(f"contrail: {error}", file=sys.stderr)
        return 1
    return 0


class _Member:
    """One process of the cluster, running or not."""

    def __init__(self, place: Place, command: Sequence[str], folder: Folder) -> None:
        self.place = place
        self.url = ""
        self.log = folder.log_of(place.name)
        self.running = False
        self.pid = 0
        self._command = command
        self._process: asyncio.subprocess.Process

    async def start(self) -> None:
        """Start it, and return when it serves. Raises StartError."""
        self.running = True
        try:
            with self.log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    # Ctrl-C is for the launcher, which stops the processes in order.
                    start_new_session=True,
                    preexec_fn=_end_with_parent(),
                )
            self.pid = self._process.pid
            assert self._process.stdout is not None
            line = await self._process.stdout.readline()
        except BaseException:
            self.running = False
            raise
        if not line:
            status = await self.ended()
            raise StartError(f"{self.place.name} did not start (status {status}): {self.last()}")
        self.url = json.loads(line)["url"]

    async def ended(self) -> int:
        """Wait for its end; return its exit status."""
        status = await self._process.wait()
        self.running = False
        return status

    async def stop(self) -> None:
        """End it cleanly, or after a time by force."""
        if not self.running:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await self.ended()
                    return

    def last(self) -> str:
        """Return the end of its log, for people."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"{lines[-1] if lines else 'nothing in its log'} (see {self.log})"


class _Launcher:
    def __init__(self, folder: Folder, places: Sequence[Place], options: Options) -> None:
        self._folder = folder
        self._restart = options.restart
        self._members = {
            place.name: _Member(place, _command(place, places, folder, options.config), folder)
            for place in places
        }
        self._key = secrets.token_hex(16)
        self._stopping: asyncio.Event
        # Watches each process that was started.
        self._watching: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        self._stopping = stop_signal()
        members = list(self._members.values())
        for member in members:
            member.log.parent.mkdir(exist_ok=True)
        starting = asyncio.ensure_future(self._start_all(members))
        control = await asyncio.start_server(self._serve, HOST, 0)
        try:
            await first_done(starting, self._stopping.wait())
            if not self._stopping.is_set():
                await starting
                port = control.sockets[0].getsockname()[1]
                self._folder.note_running(Control(port, self._key))
                print(json.dumps(self._ready_line()), flush=True)
                await self._stopping.wait()
        finally:
            self._stopping.set()
            starting.cancel()
            control.close()
            await asyncio.gather(starting, return_exceptions=True)
            await self._stop_all(members)

    async def _start_all(self, members: Sequence[_Member]) -> None:
        starts = [asyncio.ensure_future(self._start(member)) for member in members]
        try:
            await asyncio.gather(*starts)
        finally:
            # The storage nodes await each other, so one that fails leaves the others waiting.
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def _start(self, member: _Member) -> None:
        await member.start()
        self._watching[member.place.name] = asyncio.create_task(self._watch(member))
        try:
            async with asyncio.timeout(_READY_S):
                while not await _is_ready(member.place.port):  # noqa: ASYNC110 - a process
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise StartError(f"{member.place.name} is not ready: {member.last()}") from None

    async def _watch(self, member: _Member) -> None:
        """Note the end of a process, and start it again if that is wanted."""
        again_s = _AGAIN_MIN_S
        while True:
            status = await member.ended()
            if self._stopping.is_set():
                return
            _log.warning("process_ended", name=member.place.name, status=status)
            if not self._restart:
                return
            await asyncio.sleep(again_s)
            if member.running:
                return  # it was started by a request, and is watched again
            again_s = min(2 * again_s, _AGAIN_MAX_S)
            try:
                await member.start()
            except StartError as error:
                _log.warning("process_not_started", name=member.place.name, reason=str(error))
            else:
                again_s = _AGAIN_MIN_S
                _log.info("process_started", name=member.place.name, pid=member.pid)

    async def _stop_all(self, members: Sequence[_Member]) -> None:
        """Stop the edges first, so that they answer what they have accepted."""
        for task in self._watching.values():
            task.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)
        for chosen in (False, True):
            await asyncio.gather(
                *(one.stop() for one in members if (one.place.service == "storage") is chosen)
            )

    # What is told --------------------------------------------------------------------------------

    def _ready_line(self) -> dict[str, Any]:
        by_service: dict[str, list[dict[str, Any]]] = {"storage": [], "api": [], "gateway": []}
        for member in self._members.values():
            by_service[member.place.service].append(self._described(member))
        return {
            "ready": True,
            "url": by_service["api"][0]["url"],
            "pid": os.getpid(),
            "nodes": by_service["storage"],
            "apis": by_service["api"],
            "gateways": by_service["gateway"],
        }

    def _described(self, member: _Member) -> dict[str, Any]:
        place = member.place
        known = {"name": place.name, "url": member.url, "pid": member.pid, "log": str(member.log)}
        if place.service != "storage":
            return known
        data_dir = str(self._folder.data_of(place.name))
        ports = {"internal_port": place.peer_port, "link_port": place.link_port}
        return {**known, "data_dir": data_dir, **ports}

    # Requests ------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError):
            request = json.loads(await reader.readline())
            answer = await self._answer(request if isinstance(request, dict) else {})
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if not hmac.compare_digest(str(request.get("key")).encode(), self._key.encode()):
            return {"error": "the key is wrong"}
        if "stop" in request:
            self._stopping.set()
            return {}
        name = str(request.get("start"))
        member = self._members.get(name)
        if member is None:
            return {"error": f"there is no {name}; there are {', '.join(self._members)}"}
        if member.running:
            return {"error": f"{name} is running (pid {member.pid})"}
        try:
            await self._start(member)
        except StartError as error:
            return {"error": str(error)}
        return {"ready": True, **self._described(member)}


def _command(
    place: Place, places: Sequence[Place], folder: Folder, config: Path | None
) -> list[str]:
    """Return the command line of a process."""

    def addresses(service: str, port: Callable[[Place], int], named: bool = False) -> str:
        """List all processes of a service."""
        return ",".join(
            f"{one.name}={HOST}:{port(one)}" if named else f"{HOST}:{port(one)}"
            for one in places
            if one.service == service
        )

    flags: dict[str, object] = {
        "host": HOST,
        "port": place.port,
        "node": place.name,
        "cluster-secret-file": folder.secret,
    }
    if place.service == "storage":
        flags |= {
            "data-dir": folder.data_of(place.name),
            "link-port": place.link_port,
            "peer-port": place.peer_port,
            "peers": addresses("storage", lambda one: one.peer_port, named=True),
        }
    else:
        flags["storage"] = addresses("storage", lambda one: one.link_port)
        other = "gateway" if place.service == "api" else "api"
        flags[f"{other}s"] = addresses(other, lambda one: one.port)
    if config is not None:
        flags["config"] = config.absolute()
    given = [f"--{name}={value}" for name, value in flags.items()]
    return [sys.executable, "-m", "contrail_client", place.service, *given]


def _end_with_parent() -> Callable[[], None] | None:
    """Return what makes a new process stop when the launcher dies; None where that is not known."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_SET_DEATH_SIGNAL, signal.SIGTERM) and None


async def _is_ready(port: int) -> bool:
    """Ask a process whether it is ready."""
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        status = await reader.readline()
        writer.close()
    except OSError:
        return False
    return b" 200 " in status

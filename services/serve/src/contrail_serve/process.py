"""Parts that all server processes share: sockets, ready line, signals, the HTTP server."""

import asyncio
import gc
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import structlog

from contrail_edge.app import EdgeApp
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.server import make_server
from contrail_serve.large_pages import use_large_pages
from contrail_serve.loop_watch import LoopWatch
from contrail_serve.process_metrics import ProcessMetrics
from contrail_serve.settings import ProcessSettings

LINK_LATER_S: Final = 5.0
"""How much longer a link waits for an answer than storage waits for the disk."""

_BACKLOG: Final = 2_048
_STOP: Final = (signal.SIGTERM, signal.SIGINT)
_kept: Final[set[int]] = set()
"""The signals that came before the service followed them."""
_log: Final = structlog.get_logger("contrail.serve")


class StartError(Exception):
    """The process cannot start; the text says why."""


class StoppedEarlyError(Exception):
    """The process was asked to stop while it started, and has released all resources."""


@contextmanager
def signals_kept() -> Iterator[None]:
    """Keep signals until the service follows them: by default they would end the process."""
    # Blocked signals would not do: they go to threads that libraries have already started.
    before = {each: signal.signal(each, _keep) for each in (*_STOP, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _kept.clear()


def stop_signal() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set, also if one was kept."""
    stopping = asyncio.Event()
    for number in _STOP:
        _follow(number, stopping)
    return stopping


def hangup_signal(*, wanted: bool) -> asyncio.Event:
    """Return an event that SIGHUP sets, also if one was kept.

    Unless it is ``wanted``, SIGHUP ends the process.
    """
    hung_up = asyncio.Event()
    if wanted:
        _follow(signal.SIGHUP, hung_up)
    else:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if signal.SIGHUP in _kept:
            signal.raise_signal(signal.SIGHUP)
    return hung_up


def _keep(number: int, _frame: object) -> None:
    _kept.add(number)


def _follow(number: signal.Signals, event: asyncio.Event) -> None:
    asyncio.get_running_loop().add_signal_handler(number, event.set)
    if number in _kept:
        event.set()


async def on_hangup(hung_up: asyncio.Event, actions: Sequence[Callable[[], object]]) -> None:
    """Carry out ``actions`` in a thread whenever ``hung_up`` is set, until cancelled."""
    while True:
        await hung_up.wait()
        hung_up.clear()
        for action in actions:
            await asyncio.to_thread(action)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def authority(listener: socket.socket) -> str:
    """Return ``host:port`` of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def edge_settings(settings: ProcessSettings, ack_keys: Sequence[bytes]) -> EdgeSettings:
    """Return the settings of the HTTP edge for a process with these settings."""
    return EdgeSettings(
        ack_keys=ack_keys,
        node=settings.node,
        token=settings.token,
        allowed_hosts=settings.allowed_hosts,
        allowed_origins=settings.allowed_origins,
        fast_lane=settings.fast_lane,
        access_log=settings.access_log,
        payload_bytes_max=settings.max_payload,
    )


async def serve_http(
    app: EdgeApp,
    edge: EdgeSettings,
    listener: socket.socket,
    until: Awaitable[object],
    *,
    service: str,
    leaving: Callable[[], None] = lambda: None,
    **announced: Any,
) -> None:
    """Serve ``app``, write the ready line, and stop cleanly when ``until`` is done.

    ``service`` is the command's name. ``leaving`` is called before the server stops. ``announced``
    goes into the ready line.
    """
    watch = LoopWatch()
    app.metrics.add(ProcessMetrics(service, edge.node, watch))
    watching = asyncio.create_task(watch.run())
    server = make_server(app, edge, [listener])
    serving = asyncio.ensure_future(server.serve())
    await _first_of(serving, server.running.wait())
    # Objects that exist now live as long as the process. Freezing them spares the collector, whose
    # full runs would hold the event loop for much longer.
    gc.collect()
    gc.freeze()
    url = f"http://{authority(listener)}"
    _log.info("serving", url=url, **announced)
    print(json.dumps({"ready": True, "url": url, "pid": os.getpid(), **announced}), flush=True)
    paging = asyncio.create_task(use_large_pages())
    if app.has_management:
        # After the ready line, because FastAPI takes longer to import than everything else.
        loading = asyncio.create_task(app.load())
        loading.add_done_callback(lambda _: gc.freeze())
        serving.add_done_callback(lambda _: loading.cancel())
    await _first_of(serving, until)
    leaving()
    server.should_exit = True
    await serving
    watching.cancel()
    paging.cancel()


async def first_done(*others: Awaitable[object]) -> None:
    """Wait until any of ``others`` happens."""
    waiting = {asyncio.ensure_future(other) for other in others}
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            if isinstance(one, asyncio.Task):
                one.cancel()


async def _first_of(serving: "asyncio.Future[None]", other: Awaitable[object]) -> None:
    """Wait until the server ends or ``other`` happens."""
    waiting = asyncio.ensure_future(other)
    either: set[asyncio.Future[Any]] = {waiting, serving}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if isinstance(waiting, asyncio.Task):
        waiting.cancel()

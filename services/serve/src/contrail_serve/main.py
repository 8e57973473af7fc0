"""``contrail serve``: every room in one process, joined by direct calls."""

import asyncio
import contextlib
import gc
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, Final

import structlog
import uvloop

import contrail_api
import contrail_gateway
from contrail_common.edge.app import build_app
from contrail_common.edge.server import make_server
from contrail_common.edge.settings import EdgeSettings
from contrail_serve.groups import SingleMemberGroups
from contrail_serve.logs import configure_logs
from contrail_serve.settings import ServeSettings, SettingsError
from contrail_storage.node.checkpointer import DataLostError
from contrail_storage.node.local_link import LocalLink
from contrail_storage.node.node import NodeOptions, StorageNode
from contrail_storage.wal.files import Files
from contrail_storage.wal.node_file import read_node_file, write_node_file

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_SETTINGS: Final = 2
_BACKLOG: Final = 2_048
_ACK_KEY_BYTES: Final = 32
_log = structlog.get_logger("contrail.serve")


class StartError(Exception):
    """The process cannot start; the text says why."""


def main(values: Mapping[str, Any]) -> int:
    """Serve until SIGTERM or SIGINT; answers the exit status (0 clean, 1 failed, 2 bad setting)."""
    try:
        settings = ServeSettings.of(values)
    except SettingsError as error:
        print(f"contrail: {error}", file=sys.stderr)
        return EXIT_SETTINGS
    configure_logs(settings.log_level, settings.log_format)
    try:
        return uvloop.run(_serve(settings))
    except (StartError, DataLostError, OSError) as error:
        print(f"contrail: {error}", file=sys.stderr)
        return EXIT_FAILED


async def _serve(settings: ServeSettings) -> int:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    listener = _listen(settings.host, settings.port)
    with contextlib.closing(listener):
        node = await asyncio.to_thread(_open_node, settings.data_dir)
        await node.start()
        try:
            return await _run(settings, node, listener, stopping)
        finally:
            await node.stop()


def _open_node(data_dir: Path) -> StorageNode:
    try:
        return StorageNode.open(NodeOptions(data_dir), SingleMemberGroups())
    except OSError as error:
        raise StartError(f"the data in {data_dir} cannot be opened: {error}") from error


async def _run(
    settings: ServeSettings,
    node: StorageNode,
    listener: socket.socket,
    stopping: asyncio.Event,
) -> int:
    edge = EdgeSettings(
        ack_keys=(_ack_key(settings.data_dir),),
        token=settings.token,
        allowed_hosts=settings.allowed_hosts,
        allowed_origins=settings.allowed_origins,
        fast_lane=settings.fast_lane,
        payload_bytes_max=settings.max_payload,
    )
    link = LocalLink(node)
    app = build_app([contrail_api.room(link, edge), contrail_gateway.room(link, edge)], edge)
    server = make_server(app, edge, [listener])
    serving = asyncio.ensure_future(server.serve())
    await _first_of(serving, server.running.wait())
    # What is alive now lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    _announce(settings, listener)
    await _first_of(serving, node.fatal, stopping.wait())
    server.should_exit = True
    await serving
    if node.fatal.done():
        _log.critical("stopped", reason=node.fatal.result())
        return EXIT_FAILED
    return EXIT_OK


async def _first_of(serving: "asyncio.Future[None]", *others: Awaitable[object]) -> None:
    """Wait until the server ends or any of ``others`` happens."""
    waiting = {asyncio.ensure_future(other) for other in others}
    await asyncio.wait(waiting | {serving}, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        if isinstance(one, asyncio.Task):
            one.cancel()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartError(f"{host}:{port} cannot be bound: {error.strerror}") from error
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _ack_key(data_dir: Path) -> bytes:
    """The key that signs ack tokens, made at the first start and kept beside the data."""
    path = data_dir / "ack.key"
    files = Files()
    try:
        return read_node_file(files, path)
    except FileNotFoundError:
        key = secrets.token_bytes(_ACK_KEY_BYTES)
        write_node_file(files, path, key)
        path.chmod(0o600)
        return key


def _announce(settings: ServeSettings, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    _log.info("serving", url=url, data_dir=str(settings.data_dir))
    print(json.dumps({"ready": True, "url": url, "pid": os.getpid()}), flush=True)

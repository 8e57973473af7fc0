"""The processes with a storage node: ``contrail serve`` with all services, ``contrail storage``."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import structlog

import contrail_api
import contrail_gateway
from contrail_common.timeunits import NS_PER_S
from contrail_edge.app import build_app
from contrail_edge.routing import EdgeModule
from contrail_link.tcp.handshake import derived_key
from contrail_link.tcp.server import LinkServer
from contrail_serve.cluster import Peers
from contrail_serve.groups import SingleMemberGroups
from contrail_serve.key_file import follow_key_file, warn_if_open
from contrail_serve.long_lived import uncollected
from contrail_serve.process import (
    ACK_LABEL,
    LINK_LABEL,
    StartError,
    StoppedEarlyError,
    authority,
    edge_settings,
    first_done,
    hangup_signal,
    listen,
    serve_http,
    stop_signal,
)
from contrail_serve.settings import (
    ClusterSettings,
    NodeSettings,
    ServeSettings,
    StorageSettings,
)
from contrail_storage.disk.files import Files
from contrail_storage.disk.node_file import NodeFileDamagedError, read_node_file, write_node_file
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.upkeep.checkpointer import DataLostError

_ACK_KEY_BYTES: Final = 32
_LINK_GRACE_S: Final = 10.0
_WAY_OUT: Final = (
    "No file was changed. Either restore the folder from a backup, or start once with "
    "accept_data_loss=true (--accept-data-loss) to keep only what can be read"
)
_log: Final = structlog.get_logger("contrail.serve")


async def serve(settings: ServeSettings) -> bool:
    """Run all services in one process, joined by direct calls; return False if the node failed."""
    stopping = stop_signal()
    listener = listen(settings.host, settings.port)
    with contextlib.closing(listener):
        _check_ack_key(settings)
        async with _running_node(settings, stopping) as node:
            edge = edge_settings(settings, _kept_ack_key(settings))
            link = LocalLink(node)
            modules = [
                contrail_api.edge_module(link, edge),
                contrail_gateway.edge_module(link, edge),
            ]
            app = build_app(modules, edge)
            until = first_done(node.fatal, stopping.wait())
            await serve_http(app, edge, listener, until, service="serve")
            return _went_well(node)


async def serve_storage(settings: StorageSettings) -> bool:
    """Run a storage node on the service link, with probes over HTTP; return as :func:`serve`."""
    stopping = stop_signal()
    listener = listen(settings.host, settings.port)
    link_listener = listen(settings.host, settings.link_port)
    with contextlib.closing(listener), contextlib.closing(link_listener):
        async with _running_node(settings, stopping, settings.cluster) as node:
            link = _ServedLink(node)
            link.server = LinkServer(
                link,
                derived_key(settings.cluster_secret, LINK_LABEL),
                node=settings.node,
                access_log=settings.access_log,
            )
            await link.server.start(link_listener)
            edge = edge_settings(settings, derived_key(settings.cluster_secret, ACK_LABEL))
            app = build_app([EdgeModule(link, ())], edge)

            async def until_link_stopped() -> None:
                await first_done(node.fatal, stopping.wait())
                await link.server.stop(_LINK_GRACE_S)

            where = authority(link_listener)
            until = until_link_stopped()
            await serve_http(app, edge, listener, until, service="storage", link=where)
            return _went_well(node)


class _ServedLink(LocalLink):
    """A link to the node that also shows the metrics of its link server."""

    server: LinkServer

    async def metrics_text(self) -> str:
        """Return the metrics of the node and of the link server."""
        return await super().metrics_text() + self.server.metrics_text()


@asynccontextmanager
async def _running_node(
    settings: NodeSettings, stopping: asyncio.Event, cluster: ClusterSettings | None = None
) -> AsyncIterator[StorageNode]:
    """Yield a started node, alone or as one of a ``cluster``.

    Raise StoppedEarlyError if ``stopping`` is set before it has started.
    """
    keys, file = settings.encryption_keys, settings.encryption_key_file
    hung_up = asyncio.Event()
    if file is not None:
        hung_up = hangup_signal()
        warn_if_open(file)
    peers = Peers(cluster) if cluster is not None else None
    with uncollected():
        node = await asyncio.to_thread(_open_node, settings, peers)
    starting = asyncio.create_task(_start(node, peers))
    await first_done(starting, stopping.wait())
    if stopping.is_set():
        # Recovery may take long; SIGTERM must not wait for it.
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await _stop(node, peers)
        raise StoppedEarlyError("stopped before the node had started")
    await starting
    _log.info("node_started", data_dir=str(settings.data_dir), encrypted=bool(keys))
    following = asyncio.create_task(follow_key_file(node, file, hung_up))
    try:
        yield node
    finally:
        following.cancel()
        await _stop(node, peers)


async def _start(node: StorageNode, peers: Peers | None) -> None:
    if peers is not None:
        try:
            await peers.form(node)
        except BaseException:
            await asyncio.to_thread(node.close)
            raise
    await node.start()


async def _stop(node: StorageNode, peers: Peers | None) -> None:
    await node.stop()
    if peers is not None:
        await peers.close()


def _open_node(settings: NodeSettings, peers: Peers | None) -> StorageNode:
    data_dir = settings.data_dir
    options = NodeOptions(
        data_dir,
        settings.node,
        node_keys=settings.encryption_keys,
        memory_max_bytes=settings.memory_max_bytes,
        accept_data_loss=settings.accept_data_loss,
        publish_timeout_s=settings.publish_timeout_s,
        clock_jump_max_ns=round(settings.max_clock_jump_s * NS_PER_S),
        cluster=None if peers is None else peers.cluster,
    )
    groups = SingleMemberGroups() if peers is None else peers.groups
    try:
        return StorageNode.open(options, groups)
    except DataLostError as error:
        raise StartError(f"{error}. {_WAY_OUT}") from error
    except OSError as error:
        raise StartError(f"the data in {data_dir} cannot be opened: {error}") from error


def _went_well(node: StorageNode) -> bool:
    if node.fatal.done():
        _log.critical("stopped", reason=node.fatal.result())
    return not node.fatal.done()


def _check_ack_key(settings: ServeSettings) -> None:
    """Refuse to start if the key is damaged, because tokens in use would become invalid."""
    if settings.accept_data_loss:
        return
    try:
        read_node_file(Files(), settings.data_dir / "ack.key")
    except FileNotFoundError:
        # The first start, or a folder of a storage process, which needs no such key.
        return
    except NodeFileDamagedError as error:
        raise StartError(f"stored data is damaged: {error}. {_WAY_OUT}") from error


def _kept_ack_key(settings: ServeSettings) -> bytes:
    """Return the key that signs ack tokens. It is created at the first start, in the data folder.

    If it cannot be written, only this process has it: its tokens become invalid at a restart.
    """
    path = settings.data_dir / "ack.key"
    files = Files()
    try:
        return read_node_file(files, path)
    except (FileNotFoundError, NodeFileDamagedError):
        key = secrets.token_bytes(_ACK_KEY_BYTES)
    try:
        write_node_file(files, path, key)
        path.chmod(0o600)
    except OSError as error:
        # A node on a full disk serves reads and recovers by itself, so this must not end it.
        _log.warning("ack_key_not_kept", error=str(error))
    return key

"""The processes with a storage node: ``contrail serve`` with all services, ``contrail storage``."""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import structlog

import contrail_api
import contrail_gateway
from contrail_common.timeunits import NS_PER_S
from contrail_edge.app import EdgeApp, build_app
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.routing import EdgeModule
from contrail_link.contract import StorageLink
from contrail_link.routed.leaders import OwnNode
from contrail_link.routed.link import RoutedLink
from contrail_link.tcp.client import RemoteLink
from contrail_link.tcp.encryption import ServerTls, is_loopback
from contrail_link.tcp.limits import limits_in_cluster
from contrail_link.tcp.server import LinkServer
from contrail_replicator.peers.certificates import made_tls
from contrail_serve.cluster import Peers
from contrail_serve.cluster_secret import ACK_LABEL, LINK_LABEL, ClusterSecret
from contrail_serve.groups import SingleMemberGroups
from contrail_serve.key_file import read_keys_again, warn_if_open
from contrail_serve.long_lived import uncollected
from contrail_serve.process import (
    LINK_LATER_S,
    StartError,
    StoppedEarlyError,
    authority,
    edge_settings,
    first_done,
    hangup_signal,
    listen,
    on_hangup,
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
_DEFAULTS: Final = NodeOptions(Path())
_WAY_OUT_AMONG_OTHERS: Final = (
    "No file was changed. What is damaged may belong to streams with one replica, which no other "
    "node has. Either repair the files, or start once with accept_data_loss=true "
    "(--accept-data-loss) to set the folder aside: these streams are lost then, and the other "
    "nodes send this one its replicas again"
)
_log: Final = structlog.get_logger("contrail.serve")


async def serve(settings: ServeSettings) -> bool:
    """Run all services in one process; return False if the node failed.

    They are joined by direct calls. In a cluster, they also use the links to the other nodes.
    """
    stopping = stop_signal()
    listener = listen(settings.host, settings.port)
    with contextlib.closing(listener):
        if settings.cluster is not None:
            return await _serve_in_cluster(settings, settings.cluster, listener, stopping)
        _check_ack_key(settings)
        async with _running_node(settings, stopping) as node:
            edge = edge_settings(settings, [_kept_ack_key(settings)])
            app = _app_of_all(LocalLink(node), edge)
            until = first_done(node.fatal, stopping.wait())
            await serve_http(app, edge, listener, until, service="serve")
            return _went_well(node)


async def _serve_in_cluster(
    settings: ServeSettings,
    cluster: ClusterSettings,
    listener: socket.socket,
    stopping: asyncio.Event,
) -> bool:
    secret = ClusterSecret(cluster.secret)
    peers = Peers(cluster, secret)
    link_listener = listen(cluster.host, settings.link_port)
    peers.link_port = link_listener.getsockname()[1]
    with contextlib.closing(link_listener):
        async with _running_node(settings, stopping, peers, secret) as node:
            link = _ServedLink(node, settings, secret, peers)
            # Storage knows more about the reason, so let it give up first.
            call_s = settings.publish_timeout_s + LINK_LATER_S
            limits, keys = limits_in_cluster(call_s), secret.keys(LINK_LABEL)
            own = OwnNode(cluster.name, link.link)
            remotes = {
                name: RemoteLink(partial(peers.locate, name), keys, limits)
                for name in cluster.names
                if name != cluster.name
            }
            nodes = [remotes.get(name, own) for name in cluster.names]
            routed = RoutedLink(nodes, answer_s=call_s, own=own)
            edge = edge_settings(settings, secret.keys(ACK_LABEL))
            app = _app_of_all(routed.link, edge)
            await link.server.start(link_listener, _tls_for(link_listener, cluster.name))
            for remote in remotes.values():
                remote.start()
            until = link.until_stopped(stopping)
            try:
                await serve_http(app, edge, listener, until, service="serve")
            finally:
                await routed.close()
                for remote in remotes.values():
                    await remote.close()
            return _went_well(node)


def _app_of_all(link: StorageLink, edge: EdgeSettings) -> EdgeApp:
    return build_app(
        [contrail_api.edge_module(link, edge), contrail_gateway.edge_module(link, edge)], edge
    )


async def serve_storage(settings: StorageSettings) -> bool:
    """Run a storage node on the service link, with probes over HTTP; return as :func:`serve`."""
    stopping = stop_signal()
    listener = listen(settings.host, settings.port)
    link_listener = listen(settings.host, settings.link_port)
    with contextlib.closing(listener), contextlib.closing(link_listener):
        secret = ClusterSecret(settings.cluster_secret)
        peers = None if settings.cluster is None else Peers(settings.cluster, secret)
        async with _running_node(settings, stopping, peers, secret) as node:
            link = _ServedLink(node, settings, secret, peers)
            await link.server.start(link_listener, _tls_for(link_listener, settings.node))
            edge = edge_settings(settings, secret.keys(ACK_LABEL))
            app = build_app([EdgeModule(link.link, ())], edge)
            where = authority(link_listener)
            until = link.until_stopped(stopping)
            await serve_http(app, edge, listener, until, service="storage", link=where)
            return _went_well(node)


def _tls_for(listener: socket.socket, node: str) -> ServerTls | None:
    """Return TLS for clients on other machines; None if no other machine reaches the listener."""
    if is_loopback(listener.getsockname()[0]):
        return None
    tls = made_tls(node)
    return ServerTls(tls.listening, tls.digest)


class _ServedLink(LocalLink):
    """A link to the node, with the server through which other processes use it."""

    def __init__(
        self, node: StorageNode, settings: NodeSettings, secret: ClusterSecret, peers: Peers | None
    ) -> None:
        super().__init__(node)
        self._peers = peers
        self._fatal, self._leave = node.fatal, node.leave
        self.server = LinkServer(
            self.link,
            secret.keys(LINK_LABEL),
            node=settings.node,
            access_log=settings.access_log,
        )

    @property
    def link(self) -> StorageLink:
        """This object, typed as what it implements."""
        return self

    async def until_stopped(self, stopping: asyncio.Event) -> None:
        """Serve until ``stopping`` is set or the node fails, and end the server."""
        await first_done(self._fatal, stopping.wait())
        await self._leave()
        await self.server.stop(_LINK_GRACE_S)

    async def metrics_text(self) -> str:
        """Return the metrics of the node, of the link server and of the peers."""
        peers = self._peers.metrics_text() if self._peers is not None else ""
        return await super().metrics_text() + self.server.metrics_text() + peers


@asynccontextmanager
async def _running_node(
    settings: NodeSettings,
    stopping: asyncio.Event,
    peers: Peers | None = None,
    secret: ClusterSecret | None = None,
) -> AsyncIterator[StorageNode]:
    """Yield a started node, alone or with ``peers``.

    Raise StoppedEarlyError if ``stopping`` is set before it has started.
    """
    keys, file = settings.encryption_keys, settings.encryption_key_file
    certificates = settings.cluster is not None and settings.cluster.certificates
    follows = file or certificates or (secret is not None and secret.file)
    hung_up = hangup_signal(wanted=bool(follows))
    if file is not None:
        warn_if_open(file)
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
    actions: list[Callable[[], object]] = []
    if file is not None:
        actions.append(partial(read_keys_again, node, file))
    if secret is not None:
        actions.append(secret.read_again)
    if peers is not None and certificates:
        actions.append(peers.read_certificates_again)
    following = asyncio.create_task(on_hangup(hung_up, actions))
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
    data_dir, tail = settings.data_dir, settings.log_tail_bytes
    segment_bytes = _DEFAULTS.log.segment_bytes
    options = NodeOptions(
        data_dir,
        settings.node,
        node_keys=settings.encryption_keys,
        log=replace(_DEFAULTS.log, tail_bytes=tail, segment_bytes=min(segment_bytes, tail)),
        # Segments are dropped at checkpoints.
        checkpoint_bytes=min(_DEFAULTS.checkpoint_bytes, 4 * tail),
        memory_max_bytes=settings.memory_max_bytes,
        cache_max_bytes=settings.cache_max_bytes,
        accept_data_loss=settings.accept_data_loss,
        publish_timeout_s=settings.publish_timeout_s,
        clock_jump_max_ns=round(settings.max_clock_jump_s * NS_PER_S),
        cluster=None if peers is None else peers.cluster,
    )
    groups = SingleMemberGroups() if peers is None else peers.groups
    try:
        return StorageNode.open(options, groups)
    except DataLostError as error:
        way_out = _WAY_OUT if peers is None else _WAY_OUT_AMONG_OTHERS
        raise StartError(f"{error}. {way_out}") from error
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

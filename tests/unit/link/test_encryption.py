"""The link between machines: TLS whose certificate is part of the proof of the secret."""

import asyncio
import contextlib
import ssl
import traceback
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from contrail_common.model import PublishMessage
from contrail_link.contract.read import ReplayRequest
from contrail_link.publishing import publish
from contrail_link.tcp import encryption
from contrail_link.tcp.client import RemoteLink
from contrail_link.tcp.encryption import ServerTls, client_context, is_loopback
from contrail_link.tcp.handshake import ONE_END, SILENT
from contrail_link.tcp.limits import LinkLimits
from contrail_link.tcp.server import LinkServer
from contrail_replicator.peers.certificates import made_tls
from contrail_storage.link import LocalLink
from tests.support.each import each
from tests.support.ports import HOST
from tests.unit.link.link_rig import KEY, QUICK, bound, port_of, remote, run, storage, until

PAYLOAD = b"what nobody else may read" * 10


@pytest.fixture(autouse=True)
def _far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends take each other for another machine."""
    monkeypatch.setattr(encryption, "is_loopback", lambda _host: False)


@contextlib.asynccontextmanager
async def served(
    link: LocalLink, limits: LinkLimits = QUICK
) -> AsyncIterator[tuple[LinkServer, int]]:
    made, listener = made_tls("n1"), bound()
    server = LinkServer(link, [KEY], limits)
    await server.start(listener, ServerTls(made.listening, made.digest))
    try:
        yield server, port_of(listener)
    finally:
        await server.stop(1.0)


class Middle:
    """Passes on what two ends say, and remembers it; with TLS of its own, it reads everything."""

    def __init__(self, port: int, *, encrypted: bool) -> None:
        self.seen = b""
        self._port = port
        self._encrypted = encrypted
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[int]:
        context = made_tls("n1").listening if self._encrypted else None
        server = await asyncio.start_server(self._relay, HOST, 0, ssl=context)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await closed(*self._writers)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        context = client_context() if self._encrypted else None
        far_reader, far_writer = await asyncio.open_connection(HOST, self._port, ssl=context)
        self._writers += (writer, far_writer)
        for source, target in ((reader, far_writer), (far_reader, writer)):
            self._tasks.add(asyncio.create_task(self._pass_on(source, target)))

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                self.seen += data
                target.write(data)
        target.close()


async def closed(*writers: asyncio.StreamWriter) -> None:
    for writer in writers:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def test_nobody_between_machines_can_read_or_join_in(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with storage(tmp_path) as local, served(local) as (server, port):
            listens = Middle(port, encrypted=False)
            async with listens.running() as tapped, remote(tapped) as link:
                await publish(link, "S", [PublishMessage("a.b", None, PAYLOAD)])
                replayed = b"".join(
                    [piece async for piece in await link.replay(ReplayRequest(stream="S"))]
                )
                assert PAYLOAD in replayed
                assert len(listens.seen) > 2 * len(PAYLOAD)
                assert PAYLOAD[:20] not in listens.seen
            refused = server.refused
            joins_in = Middle(port, encrypted=True)
            async with joins_in.running() as caught, remote(caught, up=False) as link:
                await until(lambda: "secret" in link.readiness().get("storage link", ""))
                assert server.refused > refused
                # It has seen the proof of the client, and nothing that came after.
                assert KEY not in joins_in.seen
                assert b"storage" not in joins_in.seen

    run(scenario())


def test_strangers_that_do_not_finish_tls_keep_nobody_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = LinkLimits(unproven_max=2, pulse_s=0.05)
        async with storage(tmp_path) as local, served(local, limits) as (server, port):
            silent = [await asyncio.open_connection(HOST, port) for _ in range(5)]
            await until(lambda: server.waiting_for_tls == 2)
            plain_reader, plain = await asyncio.open_connection(HOST, port)
            plain.write(b"GET / HTTP/1.1\r\n\r\n")
            assert not (await plain_reader.read()).startswith(b"CTRLNK")
            async with remote(port) as link:
                assert (await link.stream_info("S")).config.name == "S"
            await closed(plain, *(writer for _, writer in silent))

    run(scenario())


def at_server() -> bool:
    """Whether it is the server that asks for an address."""
    return any(one.name == "_welcome" for one in traceback.extract_stack())


def both_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: LinkLimits
) -> tuple[str, str]:
    """What client and server say that cannot agree on TLS."""
    refusals: list[str] = []
    turned_away = LinkServer.turned_away

    def noted(server: LinkServer, reason: str) -> None:
        refusals.append(reason)
        turned_away(server, reason)

    monkeypatch.setattr(LinkServer, "turned_away", noted)

    async def scenario() -> tuple[str, str]:
        async with storage(tmp_path) as local, served(local, limits) as (_, port):
            link = RemoteLink((HOST, port), [KEY], limits)
            link.start()
            await until(lambda: bool(refusals))
            await until(lambda: ONE_END in link.readiness().get("storage link", ""))
            said = link.readiness()["storage link"]
            await link.close()
            return said, refusals[0]

    return run(scenario())


def test_ends_say_that_only_the_server_is_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encryption, "is_loopback", lambda _host: at_server())
    client, server = both_reasons(tmp_path, monkeypatch, QUICK)
    assert "it speaks no TLS" in client
    assert f"the peer speaks TLS, and this end does not on loopback: {ONE_END}" in server


@each("connect_s", [0.3, 5.0])
def test_ends_say_that_only_the_client_is_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connect_s: float
) -> None:
    """Whichever of them gives up first."""
    monkeypatch.setattr(encryption, "is_loopback", lambda _host: not at_server())
    limits = LinkLimits(connect_s=connect_s, handshake_s=0.5, pulse_s=0.05)
    client, server = both_reasons(tmp_path, monkeypatch, limits)
    assert SILENT in client
    assert "no TLS" in server
    assert ONE_END in server


@each(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("localhost", False),
    ],
)
def test_loopback_is_told_by_the_address(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


def test_only_the_newest_tls_is_spoken() -> None:
    assert client_context().minimum_version is ssl.TLSVersion.TLSv1_3
    assert made_tls("n1").listening.minimum_version is ssl.TLSVersion.TLSv1_3

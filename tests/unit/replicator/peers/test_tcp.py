"""Connections over sockets: with TLS and without, between nodes and with strangers."""

import asyncio
import datetime
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from structlog.testing import capture_logs

from contrail_link.tcp.handshake import ONE_END, SILENT
from contrail_replicator.peers.certificates import (
    CertificateError,
    PeerTls,
    check_certified,
    loaded_tls,
    made_tls,
)
from contrail_replicator.peers.frames import BODY_BYTES_MAX, Bytes, Channel, Frame
from contrail_replicator.peers.hub import Node, PeerHub
from contrail_replicator.peers.ports import Wire
from contrail_replicator.peers.refusals import Complaints
from contrail_replicator.peers.tcp import PeerSockets
from tests.support.slices import assert_no_stall
from tests.unit.link.link_rig import bound

KEY = bytes(32)
CLUSTER = b"c" * 16
NOTE = 200


class Peer:
    """A node on loopback."""

    def __init__(self, name: str, tls: PeerTls | None = None) -> None:
        self.name = name
        self.listener = bound()
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.sockets = PeerSockets(tls or made_tls(name), encrypted_on_loopback=tls is not None)
        self.got: list[tuple[str, bytes]] = []
        self.up: set[str] = set()
        self.hub: PeerHub

    def start(self, others: Sequence["Peer"]) -> None:
        addresses = {one.name: one.address for one in others}
        node = Node(self.name, CLUSTER, 1, 1, sum(self.name.encode()))
        self.hub = PeerHub(self.sockets, node, addresses, lambda: [KEY])
        self.hub.on_link = self.note_link
        for channel in Channel:
            self.hub.handle(channel, NOTE, self.note)
        self.sockets.listen(self.listener, self.hub.accept)
        self.hub.start()

    def note(self, peer: str, given: Frame) -> None:
        self.got.append((peer, bytes(given.body)))

    def note_link(self, name: str, up: bool) -> None:
        (self.up.add if up else self.up.discard)(name)

    async def stop(self) -> None:
        self.hub.stop()
        await self.sockets.close()
        self.listener.close()


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def with_nodes(
    scene: Callable[[Peer, Peer], object], tls: Callable[[str], PeerTls | None] = lambda _: None
) -> None:
    async def run() -> None:
        nodes = [Peer(name, tls(name)) for name in ("a", "b")]
        for node in nodes:
            node.start(nodes)
        try:
            await scene(*nodes)  # type: ignore[misc]
        finally:
            for node in nodes:
                await node.stop()

    asyncio.run(run())


async def talk(a: Peer, b: Peer) -> None:
    await wait_until(lambda: "b" in a.up and "a" in b.up)
    large = bytes(range(256)) * (BODY_BYTES_MAX[Channel.APPEND] // 256)
    assert a.hub.send("b", Channel.APPEND, NOTE, 1, [large])
    assert a.hub.send("b", Channel.CONTROL, NOTE, 1, [b"small"])
    assert b.hub.send("a", Channel.CONTROL, NOTE, 1, [b"back"])
    await wait_until(lambda: len(b.got) == 2 and len(a.got) == 1)
    # Entries do not stand before a heartbeat.
    assert b.got == [("a", b"small"), ("a", large)]
    await wait_until(lambda: not a.hub.unsent("b", Channel.APPEND))


@pytest.mark.parametrize("encrypted", [False, True])
def test_nodes_talk(encrypted: bool) -> None:
    with_nodes(talk, made_tls if encrypted else lambda _: None)


def test_node_does_not_hold_the_port_of_one_that_is_not_there_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel gives the node the very port to which it tries to connect."""

    async def scene() -> None:
        nodes = [Peer(name) for name in ("a", "b")]
        port = nodes[1].listener.getsockname()[1]
        nodes[1].listener.close()
        loop = asyncio.get_running_loop()
        connect, connected = loop.sock_connect, 0

        async def connect_from_there(connection: socket.socket, where: Any) -> None:
            nonlocal connected
            if not connected:
                connection.bind(where)
            await connect(connection, where)
            connected += 1

        monkeypatch.setattr(loop, "sock_connect", connect_from_there)
        with capture_logs() as logs:
            nodes[0].start(nodes)
            await wait_until(lambda: any("leads to itself" in str(one) for one in logs))
            nodes[1].listener = bound(port)
            nodes[1].start(nodes)
            await talk(*nodes)
        for node in nodes:
            await node.stop()

    asyncio.run(scene())


@pytest.mark.parametrize("encrypted", [False, True])
def test_no_step_of_the_largest_frame_is_long(encrypted: bool) -> None:
    async def scene(a: Peer, b: Peer) -> None:
        await wait_until(lambda: "b" in a.up)
        body = bytes(BODY_BYTES_MAX[Channel.APPEND])

        async def send() -> None:
            b.got.clear()
            assert a.hub.send("b", Channel.APPEND, NOTE, 1, [body])
            await wait_until(lambda: bool(b.got))

        await assert_no_stall(send)

    with_nodes(scene, made_tls if encrypted else lambda _: None)


def test_nodes_say_that_only_one_of_them_is_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As through a tunnel: `a` speaks TLS, and `b` does not."""
    complaints: list[tuple[str, str]] = []

    def noted(_: Complaints, now: float, event: str, address: str, reason: str) -> None:
        complaints.append((event, reason))

    monkeypatch.setattr(Complaints, "log", noted)
    monkeypatch.setattr("contrail_replicator.peers.connections.HANDSHAKE_S", 0.3)

    def says(event: str, *parts: str) -> bool:
        return any(one == event and all(part in text for part in parts) for one, text in complaints)

    async def scene(_a: Peer, _b: Peer) -> None:
        await wait_until(lambda: says("peer_unreachable", "b: it speaks no TLS", ONE_END))
        await wait_until(lambda: says("peer_refused", "it speaks TLS", ONE_END))
        await wait_until(lambda: says("peer_unreachable", "a: ", SILENT))

    with_nodes(scene, lambda name: made_tls(name) if name == "a" else None)


# Certificates of an operator ---------------------------------------------------------------------
class Authority:
    """Signs certificates of nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        self.path = folder / "ca.pem"
        made = self.certificate(self.name, self.key.public_key(), ca=True)
        self.path.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def certificate(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        *,
        ca: bool = False,
        names: Sequence[str] = (),
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if names:
            found = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
            builder = builder.add_extension(found, critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def tls(self, name: str, names: Sequence[str]) -> PeerTls:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self.certificate(subject, key.public_key(), names=names)
        paths = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return loaded_tls(*paths, self.path)


def test_nodes_with_certificates_of_one_authority_talk(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with_nodes(talk, lambda name: authority.tls(name, [name, f"{name}.example"]))


def test_a_certificate_must_name_its_node(tmp_path: Path) -> None:
    authority = Authority(tmp_path)

    async def scene(a: Peer, b: Peer) -> None:
        with capture_logs() as logs:
            await wait_until(lambda: a.hub.counters.refused > 0 and b.hub.counters.refused > 0)
        reasons = [line["reason"] for line in logs if line["event"].startswith("peer_")]
        # As a listener, b is turned away by a; as a dialler too.
        assert any("is not valid for 'b'" in reason for reason in reasons)
        assert any("the certificate of b names somebody-else" in reason for reason in reasons)
        assert not a.up
        assert not b.up

    names = {"a": ["a"], "b": ["somebody-else"]}
    with_nodes(scene, lambda name: authority.tls(name, names[name]))


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    def tls(name: str) -> PeerTls:
        folder = tmp_path / name
        folder.mkdir()
        return Authority(folder).tls(name, [name])

    async def scene(a: Peer, b: Peer) -> None:
        await wait_until(lambda: a.hub.counters.refused > 0 and b.hub.counters.refused > 0)
        assert not a.up
        assert not b.up

    with_nodes(scene, tls)


def test_certificate_that_cannot_be_used_or_names_another_is_refused(tmp_path: Path) -> None:
    Authority(tmp_path).tls("a", ["a", "a.example"])
    files = [tmp_path / name for name in ("a.pem", "a.key", "ca.pem")]
    check_certified(files[0], "a")
    with pytest.raises(CertificateError, match=r"a.pem names a, a.example, not b"):
        check_certified(files[0], "b")
    with pytest.raises(CertificateError, match=r"ca.pem names nobody, not a"):
        check_certified(files[2], "a")
    for wrong in (tmp_path / "missing.key", files[0], tmp_path):
        with pytest.raises(CertificateError, match="cannot be used"):
            loaded_tls(files[0], wrong, files[2])


# Ends --------------------------------------------------------------------------------------------
class End:
    """One end of a connection, which only counts what happens to it."""

    def __init__(self) -> None:
        self.opened = 0
        self.closed = 0

    def wire_open(self) -> None:
        assert not self.closed
        self.opened += 1

    def wire_bytes(self, data: Bytes) -> None:
        raise AssertionError(data)

    def wire_drained(self) -> None:
        pass

    def wire_closed(self, _reason: str) -> None:
        self.closed += 1


async def close_after(passes: int, peer: Peer, *, accepted: bool) -> End:
    """Dial a node, and close one end that many passes of the event loop after it began."""
    wires: list[tuple[Wire, End]] = []

    def accept(wire: Wire) -> End:
        wires.append((wire, End()))
        return wires[-1][1]

    peer.sockets.listen(peer.listener, accept)
    end = End()
    wire = peer.sockets.dial(peer.address, peer.name, end)
    while accepted and not wires:
        await asyncio.sleep(0)
    if accepted:
        wire, end = wires[0]
    for _ in range(passes):
        await asyncio.sleep(0)
    wire.close()
    await wait_until(lambda: bool(end.closed))
    await peer.sockets.close()
    assert end.closed == 1
    return end


@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize("encrypted", [False, True])
def test_end_is_reported_whenever_a_connection_is_closed(encrypted: bool, accepted: bool) -> None:
    """Or the node would never dial that channel again."""
    tls = made_tls("a") if encrypted else None
    passes = opened = 0
    while opened < 5:

        async def once(passes: int = passes) -> End:
            peer = Peer("a", tls)
            with peer.listener:
                return await close_after(passes, peer, accepted=accepted)

        opened += uvloop.run(once()).opened
        passes += 1


# Strangers ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("encrypted", [False, True])
def test_strangers_are_turned_away_and_nodes_go_on(encrypted: bool) -> None:
    async def scene(a: Peer, b: Peer) -> None:
        port = int(a.address.rpartition(":")[2])
        refused = a.hub.counters.refused
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b"\x00" * 1_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            with suppress(ConnectionError):
                while await reader.read(1_000):
                    pass
            writer.close()
        await wait_until(lambda: a.hub.counters.refused >= refused + 3)
        await talk(a, b)

    with_nodes(scene, made_tls if encrypted else lambda _: None)


def test_an_old_protocol_of_tls_is_refused() -> None:
    async def scene(a: Peer, _: Peer) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        port = int(a.address.rpartition(":")[2])
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", port, ssl=context)

    with_nodes(scene, made_tls)


def test_nodes_find_each_other_whenever_they_begin() -> None:
    async def run() -> None:
        a, b = Peer("a"), Peer("b")
        a.start([a, b])
        # The address is known, and nobody answers there yet.
        await wait_until(lambda: a.hub._dialled["b", Channel.CONTROL]._backoff_s > 0.05)
        b.start([a, b])
        try:
            await talk(a, b)
        finally:
            await a.stop()
            await b.stop()

    asyncio.run(run())

"""What another release wrote or says is refused in a sentence, and never taken for damage."""

import re
from collections.abc import Callable

import pytest
from crc32c import crc32c

from contrail_link.tcp import handshake as link
from contrail_replicator.peers import handshake as peers
from contrail_replicator.peers.frames import Channel
from contrail_storage.wal import codec as wal

_KEY = b"k" * 32


def newer_log() -> None:
    salt = b"8 bytes."
    head = bytearray(wal.batch_header(salt, 1)[:-4])
    head[-4] = wal.SEALED_VERSION + 1
    batch = bytes(head) + crc32c(head).to_bytes(4, "little")
    wal.read_batch(memoryview(batch), 0, salt)


def node_with_another_handshake() -> None:
    own = hello()
    listener = peers.ListenerHandshake([_KEY], bytes(32), peers.PLAIN, lambda _: own)
    listener.feed(peers.MAGIC[:-1] + b"\x07")


def hello(protocol: int = peers.PROTOCOL_MAX) -> peers.Hello:
    return peers.Hello(
        *("n1", "n2", Channel.CONTROL, peers.NO_CLUSTER, 1, 1, 1),
        protocol_min=protocol,
        protocol_max=protocol,
    )


def node_with_another_protocol() -> None:
    peers.common_protocol(hello(), hello(7))


def storage_with_another_link() -> None:
    link.ClientHandshake(_KEY, bytes(32)).feed(link.MAGIC[:-1] + b"\x01")


def edge_with_another_link() -> None:
    link.ServerHandshake([_KEY], bytes(32)).feed(link.MAGIC[:-1] + b"\x07" + bytes(80))


_SENTENCES: list[tuple[Callable[[], None], type[Exception], str]] = [
    (newer_log, wal.UnsupportedVersionError, "WAL batch 1 has version 5, above 4"),
    (
        node_with_another_handshake,
        peers.HandshakeError,
        "it is of another release: it speaks version 7 of the handshake, and this node version 1",
    ),
    (
        node_with_another_protocol,
        peers.HandshakeError,
        "n1 is of another release: it speaks protocol 7 to 7, and n1 1 to 1",
    ),
    (
        storage_with_another_link,
        link.HandshakeError,
        "the peer is of another release: it speaks version 1 of the link, and this process version",
    ),
    (
        edge_with_another_link,
        link.HandshakeError,
        "the peer is of another release: it speaks version 7 of the link, and this process version",
    ),
]


@pytest.mark.parametrize(("happens", "error", "sentence"), _SENTENCES)
def test_what_another_release_made_is_refused(
    happens: Callable[[], None], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=re.escape(sentence)):
        happens()

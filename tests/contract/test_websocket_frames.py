"""What is not WebSocket, not JSON, or not a frame: documented close codes, nothing else breaks."""

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator

import pytest

from tests.contract.talk import (
    MSGPACK,
    OP_BINARY,
    OP_CLOSE,
    OP_CONT,
    OP_PING,
    OP_PONG,
    OP_TEXT,
    RawSocket,
    Talk,
    frame_bytes,
)
from tests.support.each import each
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.split

PING = b'{"op":"ping","id":1}'
PONG = b'{"op":"pong","id":1}'
MIB = 1 << 20
EDGES = 4
"""Processes of the split form that may be asked."""


@pytest.fixture
def raw(server: ServerProcess) -> Iterator[RawSocket]:
    with RawSocket(server.url) as opened:
        yield opened.opened()


@pytest.fixture
def connect(server: ServerProcess) -> Iterator[Callable[[], RawSocket]]:
    """Open one more socket."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(RawSocket(server.url)).opened()


def compressed(payload: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(payload) + packer.flush(zlib.Z_SYNC_FLUSH)[:-4]


@each(
    ("sent", "code"),
    [
        pytest.param(frame_bytes(OP_TEXT, PING, masked=False), 1002, id="unmasked"),
        pytest.param(frame_bytes(3, PING), 1002, id="reserved opcode"),
        pytest.param(frame_bytes(11, b""), 1002, id="reserved control opcode"),
        pytest.param(frame_bytes(OP_TEXT, PING, reserved=2), 1002, id="reserved bit"),
        pytest.param(
            frame_bytes(OP_TEXT, compressed(PING), reserved=4), 1002, id="compressed unasked"
        ),
        pytest.param(frame_bytes(OP_CONT, PING), 1002, id="continuation of nothing"),
        pytest.param(
            frame_bytes(OP_TEXT, b"{", final=False) + frame_bytes(OP_TEXT, PING),
            1002,
            id="message within a message",
        ),
        pytest.param(frame_bytes(OP_PING, b"x", final=False), 1002, id="fragmented control frame"),
        pytest.param(frame_bytes(OP_PING, b"x" * 126), 1002, id="long control frame"),
        pytest.param(frame_bytes(OP_CLOSE, b"\x03"), 1002, id="half a close code"),
        pytest.param(frame_bytes(OP_CLOSE, b"\x00\x01"), 1002, id="close code that is none"),
        pytest.param(frame_bytes(OP_TEXT, b'{"op":"\xff"}'), 1007, id="text that is not UTF-8"),
        pytest.param(frame_bytes(OP_TEXT, b"", length=8 * MIB + 1), 4513, id="too large"),
        pytest.param(frame_bytes(OP_TEXT, b"", length=1 << 62), 4513, id="far too large"),
        pytest.param(
            frame_bytes(OP_TEXT, b"x" * 5 * MIB, final=False)
            + frame_bytes(OP_CONT, b"", length=3 * MIB + 1),
            4513,
            id="too large in fragments",
        ),
        pytest.param(frame_bytes(OP_BINARY, PING), 4500, id="binary where text is spoken"),
        pytest.param(frame_bytes(OP_TEXT, b"{"), 4500, id="half of JSON"),
        pytest.param(frame_bytes(OP_TEXT, b""), 4500, id="empty"),
        pytest.param(frame_bytes(OP_TEXT, b"[" * 65 + b"]" * 65), 4500, id="deep JSON"),
        pytest.param(frame_bytes(OP_TEXT, b"[" * 100_000), 4500, id="very deep JSON"),
        pytest.param(frame_bytes(OP_TEXT, b"7"), 4500, id="a number"),
        pytest.param(frame_bytes(OP_TEXT, b'{"id":1}'), 4500, id="an object without op"),
        pytest.param(frame_bytes(OP_TEXT, b'[{"op":"ping"},7]'), 4500, id="an array of odd things"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", 1002, id="HTTP"),
    ],
)
def test_malformed_frame_ends_the_socket_with_its_code(
    connect: Callable[[], RawSocket], server: ServerProcess, sent: bytes, code: int
) -> None:
    raw = connect()
    raw.send(sent)
    assert raw.close_code() == code
    if code in (4500, 1007):
        raw.send(frame_bytes(OP_CLOSE, code.to_bytes(2, "big")))
    assert raw.ended()
    with Talk(server.url) as other:
        other.nothing_more()


def test_message_that_is_too_large_is_reported_though_all_of_it_is_sent(
    server: ServerProcess,
) -> None:
    for _ in range(EDGES):
        with RawSocket(server.url) as raw:
            raw.opened()
            raw.send(frame_bytes(OP_TEXT, bytes(12 * MIB)))
            assert raw.close_code() == 4513


@each("sent", [b"", b"\xc1", b"\x93\x01", b"\xdd\xff\xff\xff\xff", b"\x07"])
def test_what_is_no_msgpack_ends_the_socket(server: ServerProcess, sent: bytes) -> None:
    with Talk(server.url, MSGPACK) as talk:
        talk.socket.send(sent)
        assert talk.closed() == 4500


def test_text_where_msgpack_is_spoken_ends_the_socket(server: ServerProcess) -> None:
    with Talk(server.url, MSGPACK) as talk:
        talk.socket.send('{"op":"ping"}')
        assert talk.closed() == 4500


def test_fragments_with_pings_between_them_make_one_message(raw: RawSocket) -> None:
    raw.send(
        frame_bytes(OP_TEXT, PING[:3], final=False),
        frame_bytes(OP_PING, b"alive"),
        frame_bytes(OP_CONT, b"", final=False),
        *(frame_bytes(OP_CONT, PING[at : at + 1], final=False) for at in range(3, len(PING))),
        frame_bytes(OP_CONT, b""),
    )
    assert sorted([raw.frame(), raw.frame()]) == [(OP_TEXT, PONG), (OP_PONG, b"alive")]


def test_message_that_comes_byte_by_byte_is_read(raw: RawSocket) -> None:
    for byte in frame_bytes(OP_TEXT, PING):
        raw.send(bytes([byte]))
    assert raw.frame() == (OP_TEXT, PONG)


def test_message_of_the_largest_size_is_read(raw: RawSocket) -> None:
    blank = b" " * (8 * MIB - len(PING))
    raw.send(frame_bytes(OP_TEXT, PING + blank))
    assert raw.frame() == (OP_TEXT, PONG)


def test_array_of_frames_is_answered_one_by_one(raw: RawSocket) -> None:
    frames = [{"op": "ping", "id": number} for number in range(3)]
    raw.send(frame_bytes(OP_TEXT, b" \n" + json.dumps(frames).encode()))
    answers = [json.loads(raw.frame()[1]) for _ in frames]
    assert answers == [{"op": "pong", "id": number} for number in range(3)]


def test_empty_array_says_nothing(raw: RawSocket) -> None:
    raw.send(frame_bytes(OP_TEXT, b"[]"), frame_bytes(OP_TEXT, PING))
    assert raw.frame() == (OP_TEXT, PONG)


def test_close_is_answered_with_its_code_and_ends_the_connection(raw: RawSocket) -> None:
    raw.send(frame_bytes(OP_CLOSE, b"\x03\xe8bye"))
    assert raw.frame() == (OP_CLOSE, b"\x03\xe8bye")
    assert raw.ended()


def test_close_without_a_code_is_answered(raw: RawSocket) -> None:
    raw.send(frame_bytes(OP_CLOSE, b""))
    assert raw.frame() == (OP_CLOSE, b"")
    assert raw.ended()


def test_frames_after_a_malformed_one_are_not_read(raw: RawSocket, server: ServerProcess) -> None:
    raw.send(frame_bytes(OP_TEXT, b"{"), frame_bytes(OP_TEXT, PING))
    assert raw.close_code() == 4500


def test_frame_sent_together_with_the_handshake_is_read(server: ServerProcess) -> None:
    with RawSocket(server.url) as raw:
        raw.send(frame_bytes(OP_TEXT, PING))
        raw.opened()
        assert raw.frame() == (OP_TEXT, PONG)


@each(
    ("frame", "name"),
    [
        ({"op": "unheard-of"}, "operation_unknown"),
        ({"op": "watch", "sid": "w", "bucket": "b"}, "operation_unavailable"),
        ({"op": "pub"}, "invalid_field"),
        ({"op": "pub", "subject": "a", "data": "", "odd": 1}, "invalid_field"),
        ({"op": "sub", "sid": "", "stream": "S"}, "invalid_field"),
        ({"op": "sub", "sid": "s", "stream": "S", "credit": {"msgs": -1}}, "invalid_field"),
        ({"op": "credit", "sid": "nobody"}, "subscription_not_found"),
        ({"op": "ack", "sid": "nobody", "seqs": [1]}, "subscription_not_found"),
        ({"op": "unsub", "sid": "nobody"}, "subscription_not_found"),
        ({"op": "connect", "heartbeat": "1ms"}, "invalid_field"),
        ({"op": "connect", "heartbeat": "soon"}, "invalid_field"),
    ],
)
def test_frame_that_cannot_be_done_is_refused_with_its_id(
    server: ServerProcess, frame: dict[str, object], name: str
) -> None:
    with Talk(server.url) as talk:
        for identity in ("mine", 7, -1, "2026"):
            talk.send({**frame, "id": identity})
            answer = talk.next("error")
            assert (answer["id"], answer["problem"]["name"]) == (identity, name)
        talk.send(frame)
        assert "id" not in talk.next("error")
        talk.nothing_more()


def test_bad_frame_in_an_array_leaves_the_others_alone(server: ServerProcess) -> None:
    with Talk(server.url) as talk:
        talk.send({"op": "ping", "id": 1}, {"op": "ping", "odd": 2, "id": 2}, {"op": "ping"})
        assert talk.next()["op"] == "pong"
        assert talk.next("error")["problem"]["errors"][0]["pointer"] == "/odd"
        assert talk.next()["op"] == "pong"


@each("identity", [True, 1.5, [], {}, None, 1 << 80])
def test_id_that_is_neither_text_nor_number_does_not_come_back(
    server: ServerProcess, identity: object
) -> None:
    with Talk(server.url) as talk:
        talk.send({"op": "unheard-of", "id": identity})
        assert "id" not in talk.next("error")

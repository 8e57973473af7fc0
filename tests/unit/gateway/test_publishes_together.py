"""Frames that arrive together have the effect and the answers that they have one by one."""

import asyncio
import os
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.ack_tokens import AckTokens
from contrail_common.model import PublishMessage
from contrail_edge.http.budgets import BodyBudget, UnreadBudget
from contrail_edge.http.cors import Cors
from contrail_edge.http.requests import EdgeState
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.ws.frame_reader import TOGETHER_MAX
from contrail_edge.ws.socket_metrics import SocketCounts
from contrail_edge.ws.websocket import EdgeSocket, Opening
from contrail_gateway.sockets.codec import CODECS
from contrail_gateway.sockets.endpoint import Sockets
from contrail_link.contract import StorageLink
from contrail_link.contract.publish import PublishAck, PublishOutcome, PubResult
from tests.bench.socket_scripts import JSON, MSGPACK, client_frame

PAYLOAD_MAX = 100
SETTINGS = EdgeSettings(ack_keys=[os.urandom(32)], payload_bytes_max=PAYLOAD_MAX)


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Storage:
    """Stores everything, and answers when told to."""

    def __init__(self) -> None:
        self.stored: list[PublishMessage] = []
        self._calls: list[Any] = []

    def publish_each_then(
        self, messages: list[PublishMessage], done: Callable[[list[int], PublishOutcome], None]
    ) -> None:
        self._calls.append((len(self.stored), len(messages), done))
        self.stored += messages

    def answer(self) -> None:
        for before, count, done in self._calls:
            results = [PubResult(before + 1, count=count)]
            done(list(range(count)), PublishAck("S", results, "fsync"))


async def sent(form: str, pieces: list[bytes], authenticated: bool) -> tuple[Any, ...]:
    """What comes of the bytes: what is stored, what is answered, and what is counted."""
    storage, transport, counts = Storage(), Transport(), SocketCounts()
    state = EdgeState(BodyBudget(1 << 20), UnreadBudget(1 << 20, 1), Cors(frozenset()), 1)
    link = cast(StorageLink, storage)
    sockets = Sockets(link, AckTokens("default", SETTINGS.ack_keys), SETTINGS)
    socket = EdgeSocket(CODECS[form].opcode, SETTINGS, state, counts)
    opening = Opening(form, authenticated, lambda token: token == "right")
    socket.begin(cast(asyncio.Transport, transport), set(), b"", sockets, opening)
    for piece in pieces:
        socket.data_received(piece)
        while socket.busy:
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    refusals, transport.written = transport.written, b""
    storage.answer()
    await asyncio.sleep(0)
    stored = [msgspec.structs.astuple(one) for one in storage.stored]
    socket.connection_lost(None)
    return stored, refusals, transport.written, counts.frames_in, counts.frames_out


SUBJECTS = ("a.b", "a.c", "a b", "a.*", "", "x" * 5_000)
usual = st.fixed_dictionaries(
    {"op": st.just("pub"), "subject": st.sampled_from(["a.b", "a.c"]), "data": st.just("x")},
    optional={"id": st.integers(0, 9) | st.text(max_size=3), "msg_id": st.sampled_from("12")},
)
odd = st.fixed_dictionaries(
    {"op": st.just("pub"), "subject": st.sampled_from(SUBJECTS), "data": st.just("x")},
    optional={
        "id": st.just(1),
        "msg_id": st.sampled_from(["", "i\n", "i" * 1_100, "i" * 5_000]),
        "headers": st.just({"A": ["b"]}),
        "ttl": st.just("1h"),
        "more": st.just(1),
    },
)
others = st.sampled_from(
    [
        {"op": "ping", "id": 7},
        {"op": "nothing", "id": 8},
        {"op": "connect", "id": 9, "token": "right"},
        {"op": "pub", "id": 1, "subject": "a.b", "data": "x" * (PAYLOAD_MAX + 1)},
        {"op": "pub", "id": 1, "subject": "a.b"},
        ["no object"],
    ]
)
frames = st.lists(usual | usual | usual | odd | others, min_size=1, max_size=12)


def as_sent(form: str, value: Any) -> bytes:
    if form == MSGPACK and isinstance(value, dict) and "data" in value:
        value = {**value, "data": value["data"].encode()}
    return client_frame(form, value)


@pytest.mark.parametrize("form", [JSON, MSGPACK])
@given(values=frames, authenticated=st.sampled_from([True, True, False]))
def test_frames_that_come_together_are_handled_as_one_by_one(
    form: str, values: list[Any], authenticated: bool
) -> None:
    each = [as_sent(form, value) for value in values]
    together = asyncio.run(sent(form, [b"".join(each)], authenticated))
    assert together == asyncio.run(sent(form, each, authenticated))


@pytest.mark.parametrize("count", [TOGETHER_MAX, TOGETHER_MAX + 1, 5_000])
@pytest.mark.parametrize("form", [JSON, MSGPACK])
def test_many_messages_are_stored_in_order(form: str, count: int) -> None:
    each = [
        as_sent(form, {"op": "pub", "id": at, "subject": "a.b", "data": str(at)})
        for at in range(count)
    ]
    stored, refusals, answers, frames_in, _ = asyncio.run(sent(form, [b"".join(each)], True))
    assert [payload for _, _, payload, *_ in stored] == [str(at).encode() for at in range(count)]
    assert refusals.count(b"\x81") + refusals.count(b"\x82") == 1, "only `info`"
    assert frames_in == answers.count(b"durability") == count

"""Opening a socket: who may, with what, and how a refusal looks."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.contract.conftest import assert_problem
from tests.contract.talk import (
    JSON,
    MSGPACK,
    OP_CONT,
    OP_TEXT,
    PATH,
    RawSocket,
    Talk,
    frame_bytes,
)
from tests.support.each import each
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.split

TOKEN = "open-sesame"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("guarded") / "data", token=TOKEN) as running:
        yield running


@pytest.mark.parametrize("form", [JSON, MSGPACK])
def test_first_frame_of_all_names_the_server_and_its_limits(
    server: ServerProcess, form: str
) -> None:
    with Talk(server.url, form) as talk:
        assert talk.socket.subprotocol == form
        assert talk.info["server"].startswith("contrail/")
        assert talk.info["max_payload"] == 1 << 20
        assert talk.info["heartbeat"] == "15s"
        assert talk.info["node"]


def test_first_known_of_the_offered_subprotocols_is_chosen(server: ServerProcess) -> None:
    with RawSocket(server.url, form=f"other, {MSGPACK}, {JSON}") as raw:
        status, headers = raw.head()
        assert status == 101
        assert headers["sec-websocket-protocol"] == MSGPACK


def test_offered_compression_is_not_taken(server: ServerProcess) -> None:
    with RawSocket(server.url, "Sec-WebSocket-Extensions: permessage-deflate") as raw:
        status, headers = raw.head()
        assert status == 101
        assert "sec-websocket-extensions" not in headers


@each(
    ("lines", "status", "name"),
    [
        (["Sec-WebSocket-Protocol: contrail.v2.json"], 400, "subprotocol_unknown"),
        (["Sec-WebSocket-Protocol: "], 400, "subprotocol_unknown"),
        (["Sec-WebSocket-Version: 8"], 426, "upgrade_required"),
        (["Sec-WebSocket-Version: "], 426, "upgrade_required"),
        (["Sec-WebSocket-Key: c2hvcnQ="], 400, "bad_request"),
        (["Sec-WebSocket-Key: "], 400, "bad_request"),
        (["Origin: http://evil.example"], 403, "foreign_origin"),
        (["Host: evil.example"], 403, "foreign_host"),
        (["Upgrade: "], 426, "upgrade_required"),
        (["Connection: "], 426, "upgrade_required"),
    ],
)
def test_refused_handshake_is_a_problem(
    server: ServerProcess, lines: list[str], status: int, name: str
) -> None:
    with RawSocket(server.url, *lines) as raw:
        found, problem, headers = raw.problem()
    assert (found, problem["name"]) == (status, name)
    assert problem["instance"] == PATH
    assert problem["request_id"] == headers["x-request-id"]
    if status == 426:
        assert headers["upgrade"] == "websocket"
        assert headers["sec-websocket-version"] == "13"


def test_origin_on_an_allowed_host_may_open_a_socket(server: ServerProcess) -> None:
    with RawSocket(server.url, "Origin: http://localhost:3000") as raw:
        raw.opened()


def test_plain_request_for_the_socket_is_asked_to_upgrade(client: httpx.Client) -> None:
    problem = assert_problem(client.get(PATH), 426)
    assert problem["name"] == "upgrade_required"
    assert client.post(PATH).status_code == 405


def test_upgrade_offered_elsewhere_is_ignored(server: ServerProcess) -> None:
    with RawSocket(server.url, path="/livez") as raw:
        status, _ = raw.head()
        assert status == 200


@pytest.mark.long
def test_handshake_with_the_token_needs_no_connect(guarded: ServerProcess) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with Talk(guarded.url, additional_headers=headers) as talk:
        talk.nothing_more()


def test_handshake_with_a_bad_token_is_refused(guarded: ServerProcess) -> None:
    with RawSocket(guarded.url, "Authorization: Bearer wrong") as raw:
        status, problem, _ = raw.problem()
        assert (status, problem["name"]) == (401, "unauthenticated")


def test_token_may_come_with_connect(guarded: ServerProcess) -> None:
    with Talk(guarded.url) as talk:
        talk.done("connect", token=TOKEN, client="browser")
        talk.nothing_more()


@each(
    "frame",
    [
        {"op": "connect", "id": 1},
        {"op": "connect", "id": 1, "token": "wrong"},
        {"op": "ping"},
        {"op": "pub", "id": 1, "subject": "a", "data": ""},
        {"op": "unheard-of"},
    ],
)
def test_socket_without_a_good_token_is_closed_at_its_first_frame(
    guarded: ServerProcess, frame: dict[str, str]
) -> None:
    with Talk(guarded.url) as talk:
        talk.send(frame)
        assert talk.closed() == 4501


UNPROVEN_BYTES_MAX = 8 << 10


@pytest.mark.parametrize(
    ("pieces", "code"),
    [
        ([frame_bytes(OP_TEXT, b"x" * UNPROVEN_BYTES_MAX)], 4500),
        ([frame_bytes(OP_TEXT, b"", length=UNPROVEN_BYTES_MAX + 1)], 4513),
        (
            [
                frame_bytes(OP_TEXT, b"x" * UNPROVEN_BYTES_MAX, final=False),
                frame_bytes(OP_CONT, b"", length=1),
            ],
            4513,
        ),
    ],
)
def test_socket_without_a_token_sends_a_few_kib_at_most(
    guarded: ServerProcess, pieces: list[bytes], code: int
) -> None:
    with RawSocket(guarded.url) as raw:
        raw.opened()
        raw.send(*pieces)
        assert raw.close_code() == code


def test_socket_that_has_shown_its_token_sends_large_messages(guarded: ServerProcess) -> None:
    with Talk(guarded.url) as talk:
        talk.done("connect", token=TOKEN, client="c" * 4096)
        missing = talk.refused("pub", subject="nobody.takes.it", data="x" * 1_000_000)
        assert missing["name"] == "no_stream_for_subject"


def test_bad_token_on_an_authenticated_socket_closes_it(guarded: ServerProcess) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with Talk(guarded.url, additional_headers=headers) as talk:
        talk.send({"op": "connect", "token": "wrong"})
        assert talk.closed() == 4501


def test_open_server_takes_any_connect(server: ServerProcess) -> None:
    with Talk(server.url) as talk:
        talk.done("connect", token="whatever", client="c", heartbeat="30s")


@pytest.mark.long
def test_sockets_and_frames_are_counted(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as running, running.client() as client:
        with Talk(running.url) as talk:
            talk.nothing_more()
            text = client.get("/metrics").text
            assert "contrail_sockets_open 1.0" in text
            assert "contrail_socket_frames_in_total 1.0" in text
            assert "contrail_socket_frames_out_total 2.0" in text
            assert "contrail_socket_unread_bytes 0.0" in text
        assert 'contrail_socket_closes_total{code="1000"} 1.0' in client.get("/metrics").text

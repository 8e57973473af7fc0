"""Every form of the server answers every route alike, or says that storage went away."""

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from contrail_link.tcp.frames import REQUEST, FrameReader
from contrail_link.tcp.limits import LinkLimits
from tests.contract.answers import Answer, assert_same
from tests.contract.exchanges import (
    DEFAULT_HEADERS,
    SETTINGS,
    Ask,
    Conversation,
    answers,
    conversation,
)
from tests.support.ports import HOST, free_port
from tests.support.servers import SECRET, Process, ServerProcess, SplitServers, WholeServers
from tests.unit.link.link_rig import Wire

DOCUMENT: Final = Path(__file__).parents[2] / "openapi" / "openapi.json"
LOCAL: Final = {"GET /livez", "GET /readyz", "GET /metrics", "POST /v1/tickets"}
"""Operations that do not ask storage."""
IN_CLUSTERS: Final = {"POST /v1/streams/{stream}/leader/stepdown"}
"""Operations that a node alone always refuses."""
READ_FIRST: Final = {
    "PATCH /v1/streams/{stream}", "PATCH /v1/streams/{stream}/consumers/{consumer}",
    "POST /v1/streams/{stream}/seal", "PUT /v1/streams/{stream}/restore",
    "POST /v1/streams/{stream}/consumers/{consumer}/next",
    "POST /v1/streams/{stream}/messages/get",
}  # fmt: skip
"""Operations whose first call to storage stores nothing, or nothing that the client has seen."""
NOT_APPLIED: Final = (503, "not_ready")
UNKNOWN: Final = (504, "outcome_unknown")
BAD: Final = 400
PATIENCE_S: Final = 60.0
METHODS: Final = ("get", "put", "post", "patch", "delete")


def operations() -> dict[str, re.Pattern[str]]:
    """The documented operations, with a pattern of their targets."""
    paths = json.loads(DOCUMENT.read_text(encoding="utf-8"))["paths"]
    return {
        f"{method.upper()} {path}": re.compile(
            f"{method.upper()} " + re.sub(r"\{\w+\}", "[^/]+", path) + r"(\?.*)?"
        )
        for path, item in paths.items()
        for method in item
        if method in METHODS
    }


OPERATIONS: Final = operations()
READS: Final = {name for name in OPERATIONS if name.startswith("GET ")}


def operation_of(ask: Ask) -> str | None:
    target = f"{ask.method} {ask.path}"
    return next((name for name, form in OPERATIONS.items() if form.fullmatch(target)), None)


@pytest.fixture(scope="module")
def fast_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("fast") / "data", **SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def expected_answers(fast_server: ServerProcess) -> list[Answer]:
    """What one process answers through the fast lane."""
    with fast_server.client() as client:
        return answers(client)


def test_every_operation_is_asked_once_well_and_once_badly() -> None:
    asked = Counter((operation_of(ask), ask.status < BAD) for ask in conversation())
    missing = [(name, well) for name in OPERATIONS for well in (True, False)]
    refused = [(name, True) for name in IN_CLUSTERS]
    assert [each for each in missing if not asked[each] and each not in refused] == []


@pytest.mark.other_form
def test_declared_routes_answer_as_the_fast_lane(
    expected_answers: list[Answer], tmp_path: Path
) -> None:
    server = ServerProcess(tmp_path / "data", fast_lane="off", **SETTINGS)
    with server, server.client() as client:
        assert_same(expected_answers, answers(client))


# A form that differs -----------------------------------------------------------------------------
class Altered(httpx.HTTPTransport):
    """Lets a fault change one answer: that to a request whose target has ``part``."""

    def __init__(self, part: str, fault: Callable[[httpx.Response], None]) -> None:
        super().__init__()
        self._part, self._fault = part, fault

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = super().handle_request(request)
        if self._part in f"{request.method} {request.url.path}":
            answer = httpx.Response(
                answer.status_code, headers=answer.headers, content=answer.read()
            )
            self._fault(answer)
        return answer


def _without(name: str) -> Callable[[httpx.Response], None]:
    return lambda answer: answer.headers.__delitem__(name)


def _with(name: str) -> Callable[[httpx.Response], None]:
    return lambda answer: answer.headers.__setitem__(name, "x")


def _body(old: bytes, new: bytes) -> Callable[[httpx.Response], None]:
    def change(answer: httpx.Response) -> None:
        assert old in answer.content
        answer._content = answer.content.replace(old, new)

    return change


def _status(answer: httpx.Response) -> None:
    answer.status_code = 200


FAULTS: Final = {
    "a lost header": ("POST /v1/subjects", _without("durability")),
    "another header": ("GET /v1/streams/P/messages/1", _with("cache-control")),
    "a header of CORS": ("PUT /v1/streams/P", _without("access-control-allow-origin")),
    "a lost field": ("POST /v1/subjects", _body(b',"duplicate":false', b"")),
    "another value": ("GET /v1/streams/P", _body(b'"limits"', b'"interest"')),
    "null for a time": ("GET /v1/streams/P", _body(b'"created":"', b'"created":null,"c":"')),
    "another payload": ("GET /v1/streams/P/messages/1", _body(b"x", b"y")),
    "another reason": ("DELETE /v1/streams/none", _body(b"10059", b"10058")),
    "another status": ("PUT /v1/streams/P", _status),
}
SHORT: Final = [
    Ask("PUT", "/v1/streams/P", 201, json={"subjects": ["planted.>"]}),
    Ask("POST", "/v1/subjects/planted.a/messages", 201, content=b"x"),
    Ask("GET", "/v1/streams/P/messages/1", 200),
    Ask("GET", "/v1/streams/P", 200),
    Ask("DELETE", "/v1/streams/none", 404),
    Ask("DELETE", "/v1/streams/P", 204),
]


def test_planted_difference_is_found(fast_server: ServerProcess) -> None:
    with fast_server.client() as client:
        right = answers(client, SHORT)
        assert_same(right, answers(client, SHORT))
    for part, fault in FAULTS.values():
        with fast_server.client(transport=Altered(part, fault)) as client:
            with pytest.raises(AssertionError):
                assert_same(right, answers(client, SHORT))
            client.delete("/v1/streams/P", headers=DEFAULT_HEADERS)


# Storage goes away -------------------------------------------------------------------------------
class HeldLink:
    """The link to a storage process, through a wire that can swallow requests and break."""

    def __init__(self, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._wire = Wire(port)
        self._wire.on_held = self._break

    def __enter__(self) -> "HeldLink":
        self._thread.start()
        self._call(self._wire.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._wire.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    @property
    def port(self) -> int:
        """Where the edges find storage."""
        return self._wire.port

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """Break with the next request, which does not reach storage."""
        self._loop.call_soon_threadsafe(self._hold, True)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._hold, False)

    def _hold(self, hold: bool) -> None:
        self._wire.hold_requests = hold
        if not hold:
            self._wire.cut()

    def _break(self, held: bytes) -> None:
        if is_request(held):
            self._wire.cut()


def is_request(data: bytes) -> bool:
    frames = FrameReader(LinkLimits().frame_bytes_max).feed(data)
    return any(frame.kind == REQUEST for frame in frames)


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HeldLink, list[Process]]]:
    """An api and a gateway whose links to storage can be broken."""
    folder = tmp_path_factory.mktemp("linked")
    common = {"cluster_secret": SECRET, **SETTINGS}
    link_port, api_port, gateway_port = free_port(), free_port(), free_port()
    storage = Process(
        "storage", folder / "storage.log", data_dir=folder / "data", link_port=link_port,
        **common,
    )  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(storage)
        link = stack.enter_context(HeldLink(link_port))
        common["storage"] = f"{HOST}:{link.port}"
        edges = [
            Process("api", folder / "api.log", port=api_port,
                    gateways=f"{HOST}:{gateway_port}", **common),
            Process("gateway", folder / "gateway.log", port=gateway_port,
                    apis=f"{HOST}:{api_port}", **common),
        ]  # fmt: skip
        for edge in edges:
            stack.enter_context(edge)
        SplitServers.wait_until_ready(edges)
        yield link, edges


@contextmanager
def as_new(edge: Process) -> Iterator[httpx.Client]:
    """A client of servers that have no streams, as new ones have none."""
    with edge.client(headers=DEFAULT_HEADERS) as client:
        for stream in client.get("/v1/streams").json()["items"]:
            client.delete(f"/v1/streams/{stream['config']['name']}")
    with edge.client() as client:
        yield client


@pytest.mark.other_form
@pytest.mark.parametrize("edge", [0, 1], ids=["api", "gateway"])
def test_each_edge_of_the_split_form_answers_as_one_process(
    expected_answers: list[Answer], linked: tuple[HeldLink, list[Process]], edge: int
) -> None:
    with as_new(linked[1][edge]) as client:
        assert_same(expected_answers, answers(client))


@pytest.mark.other_form
def test_node_of_a_cluster_answers_as_one_process_although_others_lead(
    expected_answers: list[Answer], tmp_path: Path
) -> None:
    with WholeServers(tmp_path, **SETTINGS) as nodes, as_new(nodes.storages[1]) as client:
        assert_same(expected_answers, answers(client))


@pytest.mark.other_form
def test_each_operation_whose_storage_is_lost_reports_it_and_works_again(
    expected_answers: list[Answer], linked: tuple[HeldLink, list[Process]]
) -> None:
    link, edges = linked
    wanting = set(OPERATIONS) - LOCAL - IN_CLUSTERS
    expected, lost, found = {}, {}, []
    with as_new(edges[0]) as client:
        conversing = Conversation(client)
        for ask in conversation():
            name = operation_of(ask)
            if ask.status >= BAD:
                continue
            if name in wanting:
                wanting.remove(name)
                expected[name] = NOT_APPLIED if name in READS or name in READ_FIRST else UNKNOWN
                with link.breaking():
                    lost[name] = conversing.lose(ask)
                SplitServers.wait_until_ready(edges)
            found.append(conversing.ask(ask))
    assert lost == expected
    assert wanting == set()
    assert_same([answer for answer in expected_answers if answer.status < BAD], found)

"""What the contract tests share: a stream of their own, and problems checked in full."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.contract.replays import Recorder, Twin, Twins
from tests.support.servers import ServerProcess, SplitServers

AnyServer = ServerProcess | SplitServers
"""One process, or several that are asked in turn."""

FORMS = {"fast": None, "declared": "declared", "split": "split"}
"""The forms of the server, each with the marker of the tests that run against it as well."""

_numbers = itertools.count(1)


@dataclass
class Stream:
    """A stream that one test has for itself; it captures every subject below its prefix."""

    client: httpx.Client
    name: str
    prefix: str

    @property
    def path(self) -> str:
        return f"/v1/streams/{self.name}"

    def subject(self, rest: str = "a") -> str:
        """A subject that the stream captures."""
        return f"{self.prefix}.{rest}"

    def publish(self, payload: bytes = b"x", rest: str = "a", **headers: str) -> httpx.Response:
        """Publish one message; underscores in header names stand for hyphens."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        target = f"/v1/subjects/{self.subject(rest)}/messages"
        return self.client.post(target, content=payload, headers=given)

    def fill(self, count: int) -> None:
        """Publish ``count`` messages, on subjects ``0`` to ``4`` in turn, payloads by number."""
        messages = [
            {"subject": self.subject(str(number % 5)), "data": str(number)}
            for number in range(1, count + 1)
        ]
        answer = self.client.post(f"{self.path}/messages", json={"messages": messages})
        assert answer.status_code == 201, answer.text

    def configure(self, **config: Any) -> httpx.Response:
        """Create the stream or replace its configuration."""
        return self.client.put(self.path, json={"subjects": [f"{self.prefix}.>"], **config})

    def consumer(self, name: str = "c", **config: Any) -> str:
        """Create a consumer, unless it is there; answers its path."""
        path = f"{self.path}/consumers/{name}"
        answer = self.client.put(path, json=config)
        assert answer.status_code in (200, 201), answer.text
        return path

    def next(self, consumer: str, **pull: Any) -> list[dict[str, Any]]:
        """Pull without waiting unless the pull says otherwise."""
        pull.setdefault("no_wait", "expires" not in pull)
        answer = self.client.post(f"{consumer}/next", json=pull)
        assert answer.status_code in (200, 204), answer.text
        deliveries: list[dict[str, Any]] = answer.json()["messages"] if answer.content else []
        return deliveries

    def ack(self, consumer: str, *tokens: str, kind: str = "ack", **more: Any) -> list[Any]:
        """Acknowledge durably; answers the results."""
        acks = [{"token": token, "kind": kind, **more} for token in tokens]
        answer = self.client.post(f"{consumer}/ack", json={"acks": acks, "sync": True})
        assert answer.status_code == 200, answer.text
        results: list[Any] = answer.json()["results"]
        return results

    def state(self) -> dict[str, Any]:
        """The stream's state."""
        state: dict[str, Any] = self.client.get(self.path).json()["state"]
        return state


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test of the server against one process, and the other forms that it is marked with.

    That all forms answer alike is what test_forms.py shows, and the fixture ``client`` for the fast
    lane and the declared routes.
    """
    if "server" in metafunc.fixturenames:
        marks = {mark.name for mark in metafunc.definition.iter_markers()}
        forms = [
            pytest.param(form, marks=[pytest.mark.other_form] if mark else [])
            for form, mark in FORMS.items()
            if mark is None or mark in marks
        ]
        metafunc.parametrize("server", forms, indirect=True, scope="session")


@pytest.fixture(scope="session")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One process, which answers through the dispatcher."""
    with ServerProcess(tmp_path_factory.mktemp("fast") / "data") as running:
        yield running


@pytest.fixture(scope="session")
def declared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One process, which answers through the routes declared with FastAPI."""
    with ServerProcess(tmp_path_factory.mktemp("declared") / "data", fast_lane="off") as running:
        yield running


@pytest.fixture(scope="session")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SplitServers]:
    """A storage process, two apis and two gateways, which are asked in turn."""
    with SplitServers(tmp_path_factory.mktemp("split")) as running:
        yield running


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> AnyServer:
    """A running server that tests share, in one of its forms."""
    running: AnyServer = request.getfixturevalue(request.param)
    return running


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    """Two servers that get nothing but what tests have sent to another one."""
    folder = tmp_path_factory.mktemp("twins")
    with (
        Twin(folder / "fast") as one,
        Twin(folder / "declared", fast_lane="off") as other,
    ):
        yield Twins(one, other)


@pytest.fixture(scope="session")
def compared(request: pytest.FixtureRequest) -> Twins | None:
    """The servers that compare what tests send, unless tests of other forms are left out."""
    if "not other_form" in request.config.getoption("markexpr"):
        return None
    twins: Twins = request.getfixturevalue("twins")
    return twins


@pytest.fixture
def client(server: AnyServer, compared: Twins | None) -> Iterator[httpx.Client]:
    """An HTTP client of the running server.

    What a test sends to the fast lane is sent again when the test has ended, and the answers there
    are compared with those of declared routes.
    """
    is_fast = isinstance(server, ServerProcess) and server.settings.get("fast_lane") != "off"
    if compared is None or not is_fast:
        with server.client() as opened:
            yield opened
        return
    recorder = Recorder()
    with server.client(transport=recorder) as opened:
        yield opened
    found = compared.differences(recorder.exchanges, opened.base_url.netloc.decode())
    assert not found, "the declared routes answer otherwise:\n" + "\n".join(found)


@pytest.fixture(scope="session")
def live(fast: ServerProcess) -> ServerProcess:
    """A server that the tests of the client share; none of them ends it."""
    return fast


@pytest.fixture
def unused(client: httpx.Client) -> Stream:
    """Name and subjects of a stream that is not there yet."""
    number = next(_numbers)
    return Stream(client, f"T{number}", f"t{number}")


@pytest.fixture
def stream(unused: Stream) -> Iterator[Stream]:
    """A stream of the test's own."""
    answer = unused.configure()
    assert answer.status_code == 201, answer.text
    yield unused
    unused.client.delete(unused.path)


PROBLEM_FIELDS = {"type", "title", "status", "detail", "code", "name", "retryable", "errors"}


def assert_problem(
    answer: httpx.Response, status: int, code: int | None = None, pointer: str | None = None
) -> dict[str, Any]:
    """The answer is the whole problem document, with ``status``, ``code`` and a bad ``pointer``."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem.keys() >= PROBLEM_FIELDS | {"instance", "request_id"}
    assert problem["status"] == status
    assert problem["instance"] == answer.request.url.raw_path.decode().partition("?")[0]
    assert problem["request_id"] == answer.headers["x-request-id"]
    if code is not None:
        assert problem["code"] == code, problem
    if pointer is not None:
        assert pointer in [error["pointer"] for error in problem["errors"]], problem
    if status in (429, 503):
        assert answer.headers["retry-after"].isdigit()
    return problem

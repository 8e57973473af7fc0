"""Small bodies that ask for much work: refused early, and told of in few words."""

import asyncio
import json
import sys
from types import FrameType
from typing import Any

import pytest

from contrail_api.batch import BATCH_DIRECT_BYTES_MAX
from contrail_api.candidates import PackedItem, uniform_batch
from contrail_common.edge.json_body import VALUES_MAX
from contrail_common.edge.message_items import header_problem
from contrail_common.subjects import subject_problem
from contrail_gateway.core.pull_rules import ACKS_BYTES_MAX, ACKS_MAX
from tests.unit.api.edge_rig import Edge, Exchange

MIB = 1 << 20
CALLS_MAX = 300_000
"""Calls of functions that a request may make: some 30 ms."""
ANSWER_BYTES_MAX = 128 << 10

TEXTS = list(map(str, range(4_000)))
STREAM, CONSUMER = "/v1/streams/S", "/v1/streams/S/consumers/c"
ACK, NEXT = f"{CONSUMER}/ack", f"{CONSUMER}/next"


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def naks(count: int, delay: str) -> list[dict[str, str]]:
    return [{"token": "x", "kind": "nak", "delay": delay}] * count


HOSTILE = {
    "list of bad items": ("PUT", STREAM, b'{"subjects":[' + b"1," * 500_000 + b"1]}", 413),
    "as many as may be": ("PUT", STREAM, encoded({"subjects": [1] * (VALUES_MAX - 2)}), 422),
    "unknown fields": ("PUT", STREAM, encoded({f"f{at}": 0 for at in range(80_000)}), 413),
    "some unknown fields": ("PUT", STREAM, encoded({f"f{at}": 0 for at in range(4_000)}), 422),
    "long unknown field": ("PUT", STREAM, encoded({"~" * 1_000_000: 0}), 422),
    "bad metadata": ("PUT", STREAM, encoded({"metadata": dict.fromkeys(TEXTS, 0)}), 422),
    "long duration": ("PUT", STREAM, encoded({"max_age": "1ns" * 300_000}), 422),
    "long subject": ("PUT", STREAM, encoded({"subjects": ["a." * 500_000 + "a"]}), 422),
    "long name": ("POST", "/v1/streams", encoded({"name": "x" * 1_000_000}), 422),
    "huge number": ("PUT", STREAM, b'{"max_msgs":' + b"9" * 1_000_000 + b"}", 400),
    "deep lists": ("PUT", STREAM, b"[" * 500_000 + b"]" * 500_000, 400),
    "many lists": ("PUT", STREAM, b"[" + b"[]," * 300_000 + b"[]]", 413),
    "bad durations": ("PUT", CONSUMER, encoded({"backoff": ["x"] * 4_000}), 422),
    "long delays": ("POST", ACK, encoded({"acks": naks(1_000, "1ns" * 300)}), 422),
    "too many acks": ("POST", ACK, encoded({"acks": naks(50_000, "1s")}), 413),
    "acks of no kind": ("POST", ACK, b'{"acks":[' + b"1," * 2_000_000 + b"1]}", 422),
    "too many bytes of acks": ("POST", ACK, b" " * (ACKS_BYTES_MAX + 1), 413),
    "pull with delays": ("POST", NEXT, encoded({"acks": naks(900, "1ns" * 300)}), 422),
}  # fmt: skip


class Calls:
    """Counts calls of functions while it is entered."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "Calls":
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        self.count += event in ("call", "c_call")


@pytest.mark.parametrize("name", HOSTILE)
def test_body_that_asks_for_much_work_is_refused_early_and_in_few_words(name: str) -> None:
    method, target, body, status = HOSTILE[name]
    calls = Calls()

    async def scenario() -> Exchange:
        edge = Edge()
        await edge.app.load()
        with calls:
            return await edge.call(method, target, body, {"content-type": "application/json"})

    answer = asyncio.run(scenario())
    problem = answer.json()
    assert answer.status == status, problem
    assert len(answer.body) <= ANSWER_BYTES_MAX
    assert len(problem["errors"]) <= 100
    assert all(len(one["pointer"]) <= 256 for one in problem["errors"])
    assert len(problem["detail"]) <= 1024
    assert calls.count <= CALLS_MAX, calls.count


def test_body_with_as_many_values_as_there_may_be_is_looked_at() -> None:
    async def statuses() -> list[int]:
        edge = Edge()
        headers = {"content-type": "application/json"}
        bodies = [{"subjects": ["a"] * count, "x": 1} for count in (VALUES_MAX - 3, VALUES_MAX - 2)]
        return [(await edge.call("PUT", STREAM, encoded(one), headers)).status for one in bodies]

    assert asyncio.run(statuses()) == [422, 413]


@pytest.mark.parametrize(("over", "status"), [(0, 200), (1, 413)])
def test_acks_at_and_beyond_their_number(over: int, status: int) -> None:
    async def answer() -> int:
        body = encoded({"acks": [{"token": "x"}] * (ACKS_MAX + over)})
        headers = {"content-type": "application/json"}
        return (await Edge().call("POST", ACK, body, headers)).status

    assert asyncio.run(answer()) == status


def test_what_is_too_long_is_not_kept() -> None:
    subject, name = "s" * 5_000, "h" * 200
    before = sys.getrefcount(subject), sys.getrefcount(name)
    assert subject_problem(subject) is not None
    assert header_problem({name: ["x"]}) is not None
    uniform_batch([PackedItem("a", {name: ["x"]}, b"")], 1)
    assert (sys.getrefcount(subject), sys.getrefcount(name)) == before


# Batches -----------------------------------------------------------------------------------------
BATCH = f"{STREAM}/messages"
LARGE = "x" * (BATCH_DIRECT_BYTES_MAX // 3)


async def batch_of(messages: list[Any], edge: Edge) -> Exchange:
    body = encoded({"messages": messages})
    return await edge.call("POST", BATCH, body, {"content-type": "application/json"})


@pytest.mark.parametrize(
    ("item", "status", "pointer"),
    [
        ({"subject": "a.b", "data": "x", "json": 1}, 422, "/messages/4"),
        ({"subject": "a.b", "data": 1}, 422, "/messages/4/data"),
        ({"subject": "a.b", "data": "", "x": 1}, 422, "/messages/4/x"),
        ({"data": ""}, 422, "/messages/4/subject"),
        (7, 422, "/messages/4"),
    ],
)
def test_large_batch_is_refused_as_a_small_one_is(item: Any, status: int, pointer: str) -> None:
    async def answers() -> list[Exchange]:
        edge = Edge()
        good = [{"subject": "a.b", "data": text} for text in (LARGE, "", LARGE, LARGE)]
        small = [{**one, "data": ""} for one in good]
        return [await batch_of([*some, item], edge) for some in (good, small)]

    large, small = asyncio.run(answers())
    for answer in (large, small):
        assert answer.status == status
        assert [one["pointer"] for one in answer.json()["errors"]] in ([pointer], [""])
    assert large.json()["detail"] == small.json()["detail"]


def test_large_batch_is_stored_in_order_and_others_have_their_turn() -> None:
    turns = 0

    async def scenario() -> None:
        nonlocal turns
        edge = Edge()
        messages = [{"subject": "a.b", "data": str(at).zfill(200)} for at in range(9_999)]
        headers = {f"H{at}": ["v"] for at in range(100_000)}
        messages.append({"subject": "a.b", "data": "", "headers": headers})
        asked = asyncio.ensure_future(batch_of(messages, edge))
        while not asked.done():
            await asyncio.sleep(0)
            turns += 1
        answer = asked.result()
        assert answer.status == 207
        results = answer.json()["results"]
        assert [one.get("seq") for one in results] == [*range(1, 10_000), None]
        assert results[-1]["problem"]["name"] == "headers_too_large"
        stored = [one.payload for many in edge.link.published for one in many]
        assert stored == [str(at).zfill(200).encode() for at in range(9_999)]

    asyncio.run(scenario())
    assert turns > 20


def test_large_batch_that_is_not_utf_8_is_400() -> None:
    async def answer() -> int:
        body = encoded({"messages": [{"subject": "a.b", "data": LARGE}] * 4})
        broken = body.replace(b'x"', b'\xff"')
        headers = {"content-type": "application/json"}
        return (await Edge().call("POST", BATCH, broken, headers)).status

    assert asyncio.run(answer()) == 400


@pytest.mark.parametrize(
    ("form", "query", "body", "status"),
    [
        ("x-ndjson", "", b"\n" * (4 * MIB), 201),
        ("x-ndjson", "?atomic=true", b"\n" * (4 * MIB), 422),
        ("json", "", b'{"messages":[{"subject":"a","json":' + b"[" * 60 + b"[]," * MIB, 400),
    ],
)
def test_large_batch_is_looked_through_in_slices(
    form: str, query: str, body: bytes, status: int
) -> None:
    async def turns() -> tuple[int, int]:
        edge = Edge()
        await edge.app.load()
        headers = {"content-type": f"application/{form}"}
        asked = asyncio.create_task(edge.call("POST", BATCH + query, body, headers))
        count = 0
        while not asked.done():
            await asyncio.sleep(0)
            count += 1
        return asked.result().status, count

    answered, count = asyncio.run(turns())
    assert answered == status
    assert count >= len(body) // (256 << 10)


@pytest.mark.parametrize("form", ["x-ndjson", "json"])
def test_large_body_of_too_many_messages_is_refused_early(form: str) -> None:
    many = b"1\n" * MIB if form == "x-ndjson" else b'{"messages":[' + b"1," * MIB + b"1]}"
    tail = many + b" " * MIB + b"}{"  # what is not JSON is not even reached
    headers = {"content-type": f"application/{form}"}
    answer = asyncio.run(Edge().call("POST", BATCH, tail, headers))
    assert (answer.status, answer.json()["name"]) == (413, "batch_too_large")

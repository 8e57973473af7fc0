"""Small bodies that ask for much work: refused early, and told of in few words."""

import asyncio
import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import pytest

from contrail_api.publishing.batch import BATCH_DIRECT_BYTES_MAX
from contrail_api.publishing.candidates import PackedItem, uniform_batch
from contrail_common.ack_tokens import AckTokens
from contrail_common.subjects import subject_problem
from contrail_edge.http import turns
from contrail_edge.http.problems import REFUSALS_SHOWN_MAX
from contrail_edge.inputs.json_body import VALUES_MAX
from contrail_edge.inputs.message_items import header_problem
from contrail_edge.inputs.negotiation import MSGPACK_TYPE
from contrail_gateway.core.pull_rules import ACKS_BYTES_MAX, ACKS_MAX
from tests.support.each import each
from tests.unit.edge.calls_of_turns import CallsOfTurns
from tests.unit.edge.edge_rig import ACK_KEY, Edge, Exchange

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


@pytest.mark.long
@each("name", HOSTILE)
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


@each(
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


@pytest.mark.long
def test_large_batch_is_stored_in_order_and_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "TURN_NS", 0)  # every step is a turn
    count = 0

    async def scenario() -> None:
        nonlocal count
        edge = Edge()
        messages = [{"subject": "a.b", "data": str(at).zfill(200)} for at in range(9_999)]
        headers = {f"H{at}": ["v"] for at in range(100_000)}
        messages.append({"subject": "a.b", "data": "", "headers": headers})
        asked = asyncio.ensure_future(batch_of(messages, edge))
        while not asked.done():
            await asyncio.sleep(0)
            count += 1
        answer = asked.result()
        assert answer.status == 207
        results = answer.json()["results"]
        assert [one.get("seq") for one in results] == [*range(1, 10_000), None]
        assert results[-1]["problem"]["name"] == "headers_too_large"
        stored = [one.payload for many in edge.link.published for one in many]
        assert stored == [str(at).zfill(200).encode() for at in range(9_999)]

    asyncio.run(scenario())
    assert count > 20


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
    form: str, query: str, body: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN_NS", 0)  # every step is a turn

    async def counted() -> tuple[int, int]:
        edge = Edge()
        await edge.app.load()
        headers = {"content-type": f"application/{form}"}
        asked = asyncio.create_task(edge.call("POST", BATCH + query, body, headers))
        count = 0
        while not asked.done():
            await asyncio.sleep(0)
            count += 1
        return asked.result().status, count

    answered, count = asyncio.run(counted())
    assert answered == status
    assert count >= len(body) // (256 << 10)


@pytest.mark.parametrize("form", ["x-ndjson", "json"])
def test_large_body_of_too_many_messages_is_refused_early(form: str) -> None:
    many = b"1\n" * MIB if form == "x-ndjson" else b'{"messages":[' + b"1," * MIB + b"1]}"
    tail = many + b" " * MIB + b"}{"  # what is not JSON is not even reached
    headers = {"content-type": f"application/{form}"}
    answer = asyncio.run(Edge().call("POST", BATCH, tail, headers))
    assert (answer.status, answer.json()["name"]) == (413, "batch_too_large")


# In steps ----------------------------------------------------------------------------------------
CALLS_OF_TURN_MAX = 60_000
"""Calls of functions between two turns of the loop: some 6 ms."""
TYPES = {
    "json": "application/json",
    "ndjson": "application/x-ndjson",
    "pack": MSGPACK_TYPE,
}
MANY_HEADERS = {f"a{at}": ["x"] for at in range(200_000)}
ITEM = {"subject": "a.b", "data": ""}
pack = msgspec.msgpack.encode


def line_of_numbers() -> bytes:
    return b'{"subject":"a.b","json":[' + b"1," * MIB + b"1]}"


IN_STEPS: dict[str, tuple[str, Callable[[], bytes], int, str]] = {
    "headers": (
        "json",
        lambda: encoded({"messages": [{**ITEM, "headers": MANY_HEADERS}]}),
        207,
        "headers_too_large",
    ),
    "packed headers": (
        "pack",
        lambda: pack([1, [["a.b", MANY_HEADERS, b""]]]),
        207,
        "headers_too_large",
    ),
    "packed names": (
        "pack",
        lambda: pack([1, [["a.b", dict(list(MANY_HEADERS.items())[:20_000]), b""]]]),
        207,
        "headers_too_large",
    ),
    "odd head": (
        "pack",
        lambda: b"\xdc\x00\x02" + pack([1] * MIB) + b"\x90",
        413,
        "body_too_large",
    ),
    "numbers": (
        "json",
        lambda: b'{"messages":[' + line_of_numbers() + b"]}",
        207,
        "message_too_large",
    ),
    "line": ("ndjson", line_of_numbers, 207, "message_too_large"),
    "deep line": (
        "ndjson",
        lambda: b'{"subject":"a.b","json":' + b"[" * MIB,
        400,
        "malformed_body",
    ),
    "bad messages": (
        "json",
        lambda: encoded({"messages": [{**ITEM, "subject": ""}] * 10_000}),
        207,
        "invalid_subject",
    ),
    "bad packed messages": (
        "pack",
        lambda: pack([1, [["", {"A": ["b"]}, b""]] * 10_000]),
        207,
        "invalid_subject",
    ),
    "bad lines": ("ndjson", lambda: encoded(ITEM) + b"\n" + b"1\n" * 9_999, 207, "invalid_field"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", IN_STEPS)
def test_batch_that_asks_for_much_work_is_read_in_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN_NS", 0)  # every step is a turn
    form, make, status, refusal = IN_STEPS[name]
    body = make()
    calls = CallsOfTurns()

    async def scenario() -> Exchange:
        edge = Edge()
        await edge.app.load()
        with calls:
            return await edge.call("POST", BATCH, body, {"content-type": TYPES[form]})

    answer = asyncio.run(scenario())
    found = answer.json()
    assert answer.status == status
    assert (found["results"][-1]["problem"] if status == 207 else found)["name"] == refusal
    assert calls.most <= CALLS_OF_TURN_MAX, calls.most


@pytest.mark.parametrize("form", ["json", "pack"])
def test_batch_of_refusals_reports_the_first_thousand_in_full(form: str) -> None:
    count = REFUSALS_SHOWN_MAX + 2
    bad = [f"a..{at}" for at in range(count)]
    if form == "json":
        body = encoded({"messages": [{**ITEM, "subject": one} for one in bad]})
    else:
        body = pack([1, [[one, {"A": ["b"]}, b""] for one in bad]])
    answer = asyncio.run(Edge().call("POST", BATCH, body, {"content-type": TYPES[form]}))
    problems = [one["problem"] for one in answer.json()["results"]]
    assert [one["name"] for one in problems] == ["invalid_subject"] * count
    assert len(problems[REFUSALS_SHOWN_MAX - 1]["errors"]) == 1
    assert problems[REFUSALS_SHOWN_MAX]["errors"] == []
    assert problems[REFUSALS_SHOWN_MAX]["detail"] == problems[REFUSALS_SHOWN_MAX]["title"]


def test_batch_in_msgpack_is_read_alike_large_and_small() -> None:
    """The pointers of what is wrong are the same, and so is what is stored."""

    async def answers(item: list[Any]) -> list[Any]:
        found = []
        for data in (b"x" * 20_000, b""):
            edge = Edge()
            headers = {"A": ["b"], "C": ["d"]}
            body = pack([1, [*[["a.b", headers, data]] * 150, item]])
            answer = await edge.call("POST", BATCH, body, {"content-type": TYPES["pack"]})
            stored = [(one.subject, one.headers) for many in edge.link.published for one in many]
            problem = answer.json()
            found.append((answer.status, problem.get("errors"), problem.get("detail"), stored))
        return found

    for item in (["a.c", {"A": ["1"]}, b""], ["a.c", {"A": [1]}, b""], ["a.c", 1, b""], ["a"], 7):
        large, small = asyncio.run(answers(item))
        assert large == small


@pytest.mark.long
@pytest.mark.parametrize("genuine", [True, False])
def test_as_many_acks_as_there_may_be_are_looked_at_in_steps(
    genuine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN_NS", 0)
    tokens = [f"x{at}" for at in range(ACKS_MAX)]
    if genuine:  # every second sequence, so that each token has a head of its own
        seqs = range(1, 2 * ACKS_MAX, 2)
        tokens = AckTokens("default", (ACK_KEY,)).sign_each("S", "c", (0, 7, 3), seqs)
    body = encoded({"acks": [{"token": token} for token in tokens]})
    calls = CallsOfTurns()

    async def scenario() -> Exchange:
        edge = Edge()
        await edge.app.load()
        with calls:
            return await edge.call("POST", ACK, body, {"content-type": TYPES["json"]})

    answer = asyncio.run(scenario())
    assert answer.status == 200
    assert [one.get("ok", False) for one in answer.json()["results"]] == [genuine] * ACKS_MAX
    assert calls.most <= CALLS_OF_TURN_MAX, calls.most

"""Batches of texts in JSON: read straight to columns, with the answers of the general way."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_api.publishing import batch, ndjson, text_items
from contrail_common import model
from contrail_common.columns.message_batch import MessageBatch
from contrail_edge.http.steps import at_once
from contrail_edge.inputs import item_steps
from tests.support.each import each
from tests.unit.edge.edge_rig import Edge, messages_of

BATCH = "/v1/streams/S/messages"
JSON, NDJSON = "application/json", "application/x-ndjson"
PAYLOAD_MAX = 8

subjects = st.sampled_from(["a.b", "a.b", "a.c", "a.grün", "a.*", "", "a b", "a." + "x" * 4096, 1])
texts = st.sampled_from(["", "x", "[{", 'q"\\\n', "grün", "\U0001f600", "\x00", "x" * 9, None, 7])
ids = st.sampled_from(["k", "k2", "grün", "", "two words", "l\n", "k" * 1025, None, 3])
others = st.sampled_from([("data_base64", "eA=="), ("json", {"a": [1]}), ("headers", {"X": ["1"]})])
more = st.sampled_from([("headers", None), ("ttl", 5), ("subject", "a.d"), ("data", "y"), ("z", 1)])
blanks = st.sampled_from(["", "", "", " ", "\t", "\r", "\n"])


@st.composite
def usual(draw: st.DrawFn, with_ids: bool) -> str:
    given = [
        ("subject", draw(st.sampled_from(["a.b", "a.c"]))),
        ("data", draw(st.text(max_size=4))),
    ]
    if with_ids:
        given.append(("msg_id", draw(st.text(min_size=1, max_size=3))))
    return spelled(draw, given)


@st.composite
def odd(draw: st.DrawFn) -> str:
    given: list[tuple[str, Any]] = [("subject", draw(subjects))]
    given += draw(st.lists(st.tuples(st.just("data"), texts), min_size=1, max_size=1) | st.just([]))
    given += draw(st.lists(st.tuples(st.just("msg_id"), ids), max_size=1))
    given += draw(st.lists(others | more, max_size=2))
    return spelled(draw, given)


def spelled(draw: st.DrawFn, fields: list[tuple[str, Any]]) -> str:
    """Write an object in any order and with any blanks; fields may come twice."""
    escaped = draw(st.booleans())
    written = [
        f"{json.dumps(name)}{draw(blanks)}:{json.dumps(value, ensure_ascii=escaped)}"
        for name, value in draw(st.permutations(fields))
    ]
    if escaped and draw(st.booleans()):
        written = [one.replace("data", "d\\u0061ta") for one in written]
    return "{" + f"{draw(blanks)},".join(written) + "}"


junk = st.sampled_from(["", "{", "}", "]", "[1]", "null", '{"subject":"a.b"', '"data":"x"}', "\v"])
broken = st.sampled_from([b"", b"", b"", b"\xff", b"\\ud800", b"\x00", b"\n", b"\xef\xbb\xbf"])
separators = {False: [",", ",", ",", "\n", ""], True: ["\n", "\n", "\n", "\r\n", " ", ","]}
heads = ['{"messages":[', '{"messages":[', '{ "m\\u0065ssages":[', "["]
tails = ["]}", "]}", "]}", '],"messages":[]}', '],"more":1}', "]", "]} {}"]


@st.composite
def bodies(draw: st.DrawFn, lines: bool) -> bytes:
    """The messages of a body, of one form or mixed, and what only looks like them."""
    form = usual(with_ids=draw(st.booleans()))
    items = draw(st.lists(form, max_size=7) | st.lists(form | odd() | junk, max_size=7))
    text = draw(st.sampled_from(separators[lines])).join(items)
    if not lines:
        text = draw(st.sampled_from(heads)) + text + draw(st.sampled_from(tails))
    body, at = text.encode(), draw(st.integers(0, len(text)))
    return body[:at] + draw(broken) + body[at:]


def answer(body: bytes, content_type: str, query: str) -> tuple[int, Any, Any]:
    """What the client sees, and what is stored."""
    edge = Edge(payload_bytes_max=PAYLOAD_MAX)
    told = asyncio.run(edge.call("POST", BATCH + query, body, {"content-type": content_type}))
    shown = told.json()
    for one in [shown, *(got.get("problem", {}) for got in shown.get("results", []))]:
        one.pop("request_id", None)
    return told.status, shown, edge.link.published


def both_answer_the_same(body: bytes, content_type: str, query: str = "") -> None:
    with pytest.MonkeyPatch.context() as patch:
        found = answer(body, content_type, query)
        patch.setattr(batch, "text_body", lambda *_: None)
        for module in (batch, ndjson):
            patch.setattr(module, "text_parts", lambda *_: iter(()))
        assert found == answer(body, content_type, query)


@pytest.mark.parametrize("content_type", [JSON, NDJSON])
@given(st.data())
def test_general_way_answers_the_same(content_type: str, data: st.DataObject) -> None:
    body = data.draw(bodies(lines=content_type == NDJSON))
    query = data.draw(st.sampled_from(["", "", "?atomic=true"]))
    most = data.draw(st.sampled_from([3, 10_000]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "BATCH_MESSAGES_MAX", most)
        patch.setattr(batch, "BATCH_MESSAGES_MAX", most)
        # Short bodies then go the ways of long ones.
        patch.setattr(item_steps, "PLAIN_BYTES", data.draw(st.sampled_from([20, 80, 256 << 10])))
        patch.setattr(item_steps, "_PLAIN_VALUES", data.draw(st.sampled_from([8, 4096])))
        patch.setattr(text_items, "_BODY_BYTES_MAX", data.draw(st.sampled_from([0, 1 << 20])))
        patch.setattr(text_items, "_STEP_BYTES", data.draw(st.sampled_from([100, 1 << 20])))
        patch.setattr(text_items, "_PARTS_IN_STEP", data.draw(st.sampled_from([1, 2, 500])))
        both_answer_the_same(body, content_type, query)


A = b'{"subject":"a.b","data":"x"}'


@each("plain_values", [0, 4096])
@each(
    "items",
    [
        [A] * 10_001,
        [A, A[:-1] + b',"msg_id":"k"}'],
        [A[:-1] + b',"msg_id":"k"}', A],
        [A[:-1] + b',"msg_id":""}'],
        [A[:-1] + b',"msg_id":"a\\nb"}'],
        [A[:-1] + b',"msg_id":"' + b"k" * 1025 + b'"}'],
        [A[:-1] + b',"msg_id":"' + b"k" * 4097 + b'"}'],
        [A, A.replace(b"x", b"x" * 9), A],
        [A, A.replace(b"a.b", b"a.*")],
        [A, A.replace(b"a.b", b"a b")],
        [A, A[:-1] + b',"subject":"a.c"}'],
        [A, A[:-1] + b',"z":1}'],
        [A + A, A[:16], A[17:]],
        [A + b" " + A, A[:16], b"," + A[17:]],
        [A + b"," + A, A[:16], A[17:]],
        [A + b"\r" + A],
        [A, b"", A],
    ],
)
def test_general_way_answers_the_same_at_the_edges(items: list[bytes], plain_values: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(item_steps, "PLAIN_BYTES", 0)
        patch.setattr(item_steps, "_PLAIN_VALUES", plain_values)
        both_answer_the_same(b"\n".join(items), NDJSON)
        body = b'{"messages":[' + b",".join(items) + b"]}"
        both_answer_the_same(body, JSON)
        both_answer_the_same(b'{"messages":[],' + body[1:], JSON)


def item(at: int, msg_id: bool) -> bytes:
    ids = {"msg_id": f"k{at}"} if msg_id else {}
    return json.dumps({"subject": f"a.{at % 3}", "data": "ü" * (at % 4), **ids}).encode()


@pytest.mark.parametrize("msg_id", [False, True])
@pytest.mark.parametrize("count", [0, 1, 17, 1200])
def test_usual_batches_are_read_straight_to_columns(count: int, msg_id: bool) -> None:
    parts = [item(at, msg_id) for at in range(count)]
    body = b'{"messages":[' + b",".join(parts) + b"]}"
    both = (
        text_items.text_body(body, PAYLOAD_MAX),
        at_once(text_items.text_parts(parts, PAYLOAD_MAX)),
    )
    for found in both:
        assert isinstance(found, MessageBatch)
        assert [(one.subject, one.payload, one.msg_id) for one in messages_of(found)] == [
            (f"a.{at % 3}", ("ü" * (at % 4)).encode(), f"k{at}" if msg_id else None)
            for at in range(count)
        ]

"""Batches as columns: stored, answered and refused as the same messages in rows are."""

import asyncio
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contrail_api.publishing.packed import packed_batch
from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import BATCH_MESSAGES_MAX, HEADER_BYTES_MAX, MSG_ID
from contrail_edge.http.steps import at_once
from contrail_edge.inputs.message_items import MSG_ID_BYTES_MAX, PLAIN_ID_MAX
from tests.support.each import each
from tests.unit.edge.edge_rig import Edge, messages_of

BATCH = "/v1/streams/S/messages"
MSGPACK = "application/vnd.msgpack"
PAYLOAD_MAX = 8
Message = tuple[str, str | None, bytes]

subjects = st.sampled_from(["a.b", "a.ü", "a.c.d"]) | st.sampled_from(
    ["", "a..b", "a.*", "a b", "x" * 4097]
)
ids = st.none() | st.text(min_size=1, max_size=3) | st.sampled_from(["i-1", "i-2", "é\n", "\x01"])
lengths = st.sampled_from(
    [PLAIN_ID_MAX - 1, PLAIN_ID_MAX, MSG_ID_BYTES_MAX - 1, MSG_ID_BYTES_MAX, HEADER_BYTES_MAX]
)
payloads = st.binary(max_size=PAYLOAD_MAX) | st.just(bytes(PAYLOAD_MAX + 1))
# A number stands for an id of so many bytes: a failing example should not show them all.
drawn = st.tuples(subjects, ids | lengths, payloads)
plain = st.tuples(st.sampled_from(["a.b", "a.c"]), st.just(None) | st.just("i"), st.just(b"x"))


def u32(numbers: Any) -> bytes:
    return np.array(list(numbers), "<u4").tobytes()


def messages_from(found: list[Any]) -> list[Message]:
    return [
        (subject, "ü" + "x" * (each - 1) if isinstance(each, int) else each, data)
        for subject, each, data in found
    ]


def texts(each: list[bytes]) -> tuple[bytes, bytes]:
    return u32(accumulate(map(len, each), initial=0)), b"".join(each)


def columns(sent: list[Message]) -> list[Any]:
    names = list(dict.fromkeys(subject for subject, _, _ in sent))
    index = u32(names.index(subject) for subject, _, _ in sent)
    ids = texts([(each or "").encode() for _, each, _ in sent])
    return [names, index, *texts([payload for _, _, payload in sent]), ids if ids[1] else None]


def in_columns(sent: list[Message]) -> bytes:
    return msgspec.msgpack.encode((2, columns(sent)))


def in_rows(sent: list[Message]) -> bytes:
    return msgspec.msgpack.encode(
        (1, [(subject, {MSG_ID: [each]} if each else None, data) for subject, each, data in sent])
    )


def admitted(body: bytes) -> Any:
    found = at_once(packed_batch(body, PAYLOAD_MAX))
    assert found.batch.is_sound()
    refused = {at: (one.spec, str(one), one.fields) for at, one in found.refused.items()}
    return messages_of(found.batch), refused


def answer(body: bytes, accept: str = "application/json", edge: Edge | None = None) -> Any:
    headers = {"content-type": MSGPACK, "accept": accept}
    edge = edge or Edge(payload_bytes_max=PAYLOAD_MAX)
    return asyncio.run(edge.call("POST", BATCH, body, headers))


@given(st.lists(drawn, max_size=6) | st.lists(plain, max_size=6))
@example([("a.b", "i", b"x")] * 3)
@example([("a.b", None, b""), ("a.b", "i", b""), ("a.c", None, b"y")])
def test_columns_are_what_the_same_rows_are(found: list[Any]) -> None:
    sent = messages_from(found)
    assert admitted(in_columns(sent)) == admitted(in_rows(sent))


@given(st.lists(drawn, max_size=6))
def test_columns_are_answered_as_rows_are(found: list[Any]) -> None:
    sent = messages_from(found)
    rows, both = answer(in_rows(sent)), answer(in_columns(sent))
    assert (rows.status, rows.body) == (both.status, both.body)
    runs = answer(in_columns(sent), MSGPACK)
    assert (runs.status, runs.headers["content-type"]) == (rows.status, MSGPACK)
    expanded: list[Any] = []
    for run in msgspec.msgpack.decode(runs.body)["runs"]:
        for at in range(run["count"]):
            if "problem" in run:
                expanded.append({"problem": run["problem"]})
            else:
                seq = run["first_seq"] + at
                expanded.append({"seq": seq, "duplicate": run.get("duplicate", False)})
    assert expanded == rows.json()["results"]


def test_answer_of_columns_is_one_run() -> None:
    runs = answer(in_columns([("a.b", "i", b"x")] * 1_000), MSGPACK)
    assert msgspec.msgpack.decode(runs.body) == {"runs": [{"count": 1_000, "first_seq": 1}]}


SENT: list[Message] = [("a.b", "i", b"xy"), ("a.c", "é", b"z")]


@each(
    ("at", "value", "pointer"),
    [
        (0, ["a.b"], "/1/1"),
        (0, [], "/1/1"),
        (0, ["a.b", "a.b"], "/1/0"),
        (0, ["a.b", "a.c", "a.d"], "/1/0"),
        (0, ["a.b", 7], "/1/0/1"),
        (1, b"\0\0\0\0\1\0\0", "/1/1"),
        (1, u32([0]), "/1/2"),
        (1, u32([0, 2]), "/1/1"),
        (2, u32([0, 3, 2]), "/1/2"),
        (2, u32([1, 2, 3]), "/1/2"),
        (2, u32([0, 2]), "/1/2"),
        (2, b"", "/1/2"),
        (3, b"x", "/1/2"),
        (3, "xyz", "/1/3"),
        (4, [u32([0, 1, 2]), b"ab", b"c"], "/1/4"),
        (4, [u32([0, 1, 2]), b"a"], "/1/4/0"),
        (4, [u32([0, 1]), b"a"], "/1/4/0"),
    ],
)
def test_columns_that_do_not_fit_are_refused_as_a_whole(at: int, value: Any, pointer: str) -> None:
    given = columns(SENT)
    given[at] = value
    edge = Edge()
    refused = answer(msgspec.msgpack.encode((2, given)), edge=edge)
    assert (refused.status, refused.json()["name"]) == (422, "invalid_field")
    assert refused.json()["errors"][0]["pointer"] == pointer
    assert edge.link.published == []


@each(
    "ids",
    [
        (u32([0, 2, 3]), "iéé".encode()[:3]),  # cut within a character
        (u32([0, 1, 2]), b"i\xff"),
        (u32([0, 1, 1 + PLAIN_ID_MAX + 1]), b"i" + b"\xff" * (PLAIN_ID_MAX + 1)),
    ],
)
def test_ids_that_are_not_utf8_are_malformed(ids: tuple[bytes, bytes]) -> None:
    given = columns(SENT)
    given[4] = ids
    refused = answer(msgspec.msgpack.encode((2, given)))
    assert (refused.status, refused.json()["name"]) == (400, "malformed_body")


@each(
    "body",
    [
        msgspec.msgpack.encode((2, [["s"] * (BATCH_MESSAGES_MAX + 1), b"", b"", b"", None])),
        msgspec.msgpack.encode(
            (2, [["a.b"], bytes(4 * (BATCH_MESSAGES_MAX + 1)), bytes(4), b"", None])
        ),
    ],
)
def test_too_many_messages_are_refused_before_they_are_read(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        at_once(packed_batch(body, PAYLOAD_MAX))
    assert refused.value.spec is errors.BATCH_TOO_LARGE


@given(st.binary(max_size=80), st.data())
def test_damaged_columns_raise_no_other_error(junk: bytes, data: st.DataObject) -> None:
    whole = bytearray(in_columns(SENT))
    at = data.draw(st.integers(2, len(whole)))
    whole[at : at + data.draw(st.integers(0, 4))] = junk
    answered = answer(bytes(whole))
    assert answered.status in (201, 207, 400, 413, 422)

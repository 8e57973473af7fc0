"""NDJSON batches: lines however they arrive, pieces, limits on the way, acks as a stream."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_api.publishing.ndjson import PIECE_BYTES_MAX, PIECE_LINES_MAX, Lines
from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import BATCH_MESSAGES_MAX
from tests.unit.edge.edge_rig import Edge, Exchange

BATCH = "/v1/streams/S/messages"
NDJSON = {"content-type": "application/x-ndjson"}
ACKED = {**NDJSON, "accept": "application/x-ndjson"}


def line(data: str = "x", subject: str = "a.b") -> bytes:
    return json.dumps({"subject": subject, "data": data}).encode() + b"\n"


def publish(
    body: bytes | Iterable[bytes], headers: dict[str, str] = NDJSON, edge: Edge | None = None
) -> Exchange:
    return asyncio.run((edge or Edge()).call("POST", BATCH, body, headers))


def lines_of(answer: Exchange) -> list[Any]:
    return [json.loads(one) for one in answer.body.splitlines()]


@given(st.lists(st.binary(max_size=12).filter(lambda b: b"\n" not in b), max_size=12), st.data())
def test_lines_are_the_same_however_the_body_is_cut(
    texts: list[bytes], data: st.DataObject
) -> None:
    body = b"\n".join(texts)
    lines = Lines()
    while body:
        cut = data.draw(st.integers(1, len(body)))
        lines.feed(body[:cut])
        body = body[cut:]
    lines.finish()
    assert lines.take() == [text for text in texts if text.strip()]
    assert len(lines) == 0


def test_piece_is_bounded_by_lines_and_by_bytes() -> None:
    lines = Lines()
    lines.feed(b"x\n" * (PIECE_LINES_MAX + 1))
    assert lines.fill_a_piece
    assert len(lines.take()) == PIECE_LINES_MAX
    assert len(lines.take()) == 1
    lines.feed(b"y" * PIECE_BYTES_MAX + b"\nz\n")
    assert lines.fill_a_piece
    assert len(lines.take()) == 1
    assert not lines.fill_a_piece


def test_all_lines_are_stored_in_order() -> None:
    edge = Edge()
    answer = publish(b"".join(line(str(n)) for n in range(3)), edge=edge)
    assert answer.status == 201
    assert [one["seq"] for one in answer.json()["results"]] == [1, 2, 3]
    assert [one.payload for one in edge.link.published[0]] == [b"0", b"1", b"2"]
    assert answer.headers["durability"] == "fsync"


@pytest.mark.parametrize("body", [b"", b"\n \r\n\n"])
def test_body_without_lines_stores_nothing(body: bytes) -> None:
    answer = publish(body)
    assert (answer.status, answer.json()) == (201, {"results": []})


def test_bad_line_is_refused_for_itself() -> None:
    answer = publish(line() + b'{"subject":\n' + b'{"subject":"a.b","dat":"x"}\n' + line())
    assert answer.status == 207
    results = answer.json()["results"]
    assert [one.get("problem", {}).get("code") for one in results] == [None, 10025, 20030, None]


def test_body_that_is_not_ndjson_at_all_is_400() -> None:
    edge = Edge()
    assert publish(b"<xml>\n" + line(), edge=edge).status == 400
    assert edge.link.published == []


def test_declared_body_of_too_many_lines_is_refused_before_anything_is_stored() -> None:
    edge = Edge()
    answer = publish(line() * (BATCH_MESSAGES_MAX + 1), edge=edge)
    assert (answer.status, answer.json()["name"]) == (413, "batch_too_large")
    assert edge.link.published == []


def test_long_body_is_published_in_pieces() -> None:
    edge = Edge()
    answer = publish(line() * 5000, edge=edge)
    assert answer.status == 201
    assert [len(piece) for piece in edge.link.published] == [2000, 2000, 1000]
    assert len(answer.json()["results"]) == 5000


@pytest.mark.parametrize("headers", [NDJSON, ACKED])
def test_chunked_body_that_grows_too_long_keeps_what_was_stored(headers: dict[str, str]) -> None:
    edge = Edge()
    answer = publish([line() * 2500] * 5, headers, edge=edge)
    results = answer.json()["results"] if headers is NDJSON else lines_of(answer)
    stored = sum(map(len, edge.link.published))
    assert answer.status == (207 if headers is NDJSON else 200)
    assert [one["seq"] for one in results[:-1]] == list(range(1, stored + 1))
    assert results[-1]["problem"]["name"] == "batch_too_large"


def test_chunked_body_over_the_byte_limit_keeps_what_was_stored() -> None:
    edge = Edge(body_bytes_max=PIECE_BYTES_MAX * 2)
    big = line("x" * 1000) * 300
    results = publish([big] * 3, edge=edge).json()["results"]
    assert results[-1]["problem"]["name"] == "body_too_large"
    assert len(results) - 1 == sum(map(len, edge.link.published)) > 0


def test_short_body_is_acked_with_the_exact_status() -> None:
    assert publish(line() * 2, ACKED).status == 201
    refused = publish(line() + line(subject="a.*"), ACKED)
    assert refused.status == 207
    assert lines_of(refused)[1]["problem"]["name"] == "invalid_subject"


def test_streamed_body_is_acked_while_it_still_comes() -> None:
    edge = Edge()
    answer = publish([line("1"), line("2")[:5], line("2")[5:] + line("3")], ACKED, edge=edge)
    assert answer.status == 200
    assert [len(piece) for piece in edge.link.published] == [1, 2]
    assert [one["seq"] for one in lines_of(answer)] == [1, 2, 3]
    assert answer.ended


def test_failure_of_the_first_piece_is_the_answer() -> None:
    edge = Edge()
    edge.link.failures = [ApiError(errors.STREAM_NOT_FOUND)]
    assert publish(line() * 5000, edge=edge).status == 404


def test_failure_of_a_later_piece_is_reported_line_by_line() -> None:
    edge = Edge()
    edge.link.failures = [None, ApiError(errors.OUTCOME_UNKNOWN)]
    answer = publish(line() * 5000, edge=edge)
    assert answer.status == 207
    names = [one.get("problem", {}).get("name") for one in answer.json()["results"]]
    assert names == [None] * 2000 + ["outcome_unknown"] * 2000 + [None] * 1000

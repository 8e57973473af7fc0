"""The bodies of batch publishes, decoded again: messages, ids, sizes and refused rows."""

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from contrail_spark import bodies
from contrail_spark.bodies import Rows
from contrail_spark.errors import RowError
from contrail_spark.layout import IdSource, Layout
from tests.support.each import each

BY_ROW = Layout(IdSource.ROW, None, None)
BY_SOURCE = Layout(IdSource.SOURCE, None, "S")
BY_COLUMN = Layout(IdSource.COLUMN, None, None)
HEADERS = pa.map_(pa.string(), pa.string())
LISTS = pa.map_(pa.string(), pa.list_(pa.string()))

Message = tuple[str, dict[str, list[str]], bytes]


def frame(**columns: Any) -> pa.RecordBatch:
    count = max(map(len, columns.values()))
    given = {"subject": ["a"] * count, "data": [b""] * count, **columns}
    return pa.record_batch(given)


def cut(offsets: bytes, heap: bytes) -> list[bytes]:
    return [heap[start:end] for start, end in pairwise(np.frombuffer(offsets, "<u4").tolist())]


def decoded(packed: bytes) -> list[Message]:
    """The messages of a body in either form, with their ids as headers."""
    form, content = msgspec.msgpack.decode(packed)
    if form == 1:
        return [(subject, headers, payload) for subject, headers, payload in content]
    subjects, index, offsets, payload, ids = content
    assert len(set(subjects)) == len(subjects)
    numbers = np.frombuffer(index, "<u4").tolist()
    assert set(numbers) == set(range(len(subjects)))
    return [
        (subjects[number], {"Nats-Msg-Id": [msg_id.decode()]}, data)
        for number, data, msg_id in zip(numbers, cut(offsets, payload), cut(*ids), strict=True)
    ]


def messages(batch: pa.RecordBatch, layout: Layout = BY_ROW, first_row: int = 1) -> list[Message]:
    found = list(Rows(batch, layout, "q:7:3", first_row).bodies())
    ends = np.cumsum([0, *(body.rows for body in found)]).tolist()
    assert [body.start for body in found] == ends[:-1]
    each_body = [decoded(body.packed) for body in found]
    assert [len(one) for one in each_body] == [body.rows for body in found]
    return [message for one in each_body for message in one]


def ids(batch: pa.RecordBatch, layout: Layout = BY_ROW, first_row: int = 1) -> list[str]:
    return [headers["Nats-Msg-Id"][0] for _, headers, _ in messages(batch, layout, first_row)]


@pytest.mark.parametrize("start", [0, 2])
def test_rows_without_headers_become_columns(start: int) -> None:
    batch = frame(subject=["a", "b", "é", "a"], data=[b"1", None, b"", b"\xff22"])
    found = messages(batch.slice(start))
    expected = [("a", b"1"), ("b", b""), ("é", b""), ("a", b"\xff22")]
    assert [(subject, data) for subject, _, data in found] == expected[start:]


def test_texts_are_sent_in_utf8() -> None:
    assert messages(frame(data=["é"]))[0][2] == "é".encode()


def test_subject_of_the_option_is_that_of_all_rows() -> None:
    batch = pa.record_batch({"data": [b"1", b"2"]})
    found = messages(batch, Layout(IdSource.ROW, "a.b", None))
    assert [subject for subject, _, _ in found] == ["a.b", "a.b"]


def test_row_numbers_go_on_from_the_batch_before() -> None:
    assert ids(frame(data=[b"x"] * 3), first_row=41) == ["q:7:3:41", "q:7:3:42", "q:7:3:43"]


def test_ids_name_the_source_message() -> None:
    source = {"shard": pa.array([0, 1, 1], pa.int32()), "seq": [7, 7, 8]}
    assert ids(frame(**source), BY_SOURCE) == ["S:0:7", "S:1:7", "S:1:8"]
    named = frame(**source, stream=["A", "B", "A"])
    assert ids(named, Layout(IdSource.SOURCE, None, None)) == ["A:0:7", "B:1:7", "A:1:8"]


def test_ids_of_the_column_are_sent_as_they_are() -> None:
    assert ids(frame(msg_id=["x", "y"]), BY_COLUMN) == ["x", "y"]


@pytest.mark.parametrize("start", [0, 1, 3])
def test_headers_are_sent_with_the_id(start: int) -> None:
    texts = pa.array([[("A", "1"), ("B", "é")], None, [], [("A", None)], [("C", "")]], HEADERS)
    lists = pa.array([[("A", ["1"]), ("B", ["é"])], None, [], [("A", None)], [("C", [""])]], LISTS)
    expected = [{"A": ["1"], "B": ["é"]}, {}, {}, {}, {"C": [""]}][start:]
    for column in (texts, lists):
        found = messages(frame(headers=column).slice(start))
        own = [
            {name: headers[name] for name in headers if name[0] != "N"} for _, headers, _ in found
        ]
        assert own == expected
        assert found[0][1]["Nats-Msg-Id"] == ["q:7:3:1"]


def test_several_values_of_a_header_are_kept_and_an_id_is_replaced() -> None:
    ids = [("Nats-Msg-Id", ["old"]), ("nats-msg-id", ["older"])]
    column = pa.array([[("A", ["1", None, "2"]), *ids]], LISTS)
    [(_, headers, _)] = messages(frame(headers=column, msg_id=["new"]), BY_COLUMN)
    assert headers == {"A": ["1", "2"], "Nats-Msg-Id": ["new"]}


def test_conditions_of_copied_messages_are_left_out() -> None:
    conditions = [("Nats-Expected-Last-Sequence", "7"), ("nats-expected-stream", "S")]
    given = [*conditions, ("Nats-TTL", "1h")]
    batch = frame(headers=pa.array([given], HEADERS), shard=[0], seq=[8])
    [(_, copied, _)], [(_, written, _)] = messages(batch, BY_SOURCE), messages(batch)
    assert copied == {"Nats-TTL": ["1h"], "Nats-Msg-Id": ["S:0:8"]}
    assert written.keys() == {name for name, _ in given} | {"Nats-Msg-Id"}


@pytest.mark.parametrize("headers", [[None, []], [None, None]])
def test_rows_whose_headers_are_all_empty_become_columns(headers: list[Any]) -> None:
    column = pa.array(headers, HEADERS)
    [body] = Rows(frame(headers=column), BY_ROW, "q:", 1).bodies()
    assert msgspec.msgpack.decode(body.packed)[0] == 2


def test_bodies_have_few_enough_rows_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_BYTES_MAX", 1_000)
    monkeypatch.setattr(bodies, "BODY_ROWS_MAX", 7)
    data = [b"x" * size for size in (900, 200, 2_000, 50, 970, *[1] * 20)]
    batch = frame(data=data)
    assert [data for _, _, data in messages(batch)] == data
    found = list(Rows(batch, BY_ROW, "q", 1).bodies())
    assert [body.rows for body in found] == [1, 1, 1, 1, 1, 7, 7, 6]
    headers = pa.array([[("A", "x" * 700)]] * 3, HEADERS)
    assert len(list(Rows(frame(headers=headers), BY_ROW, "q", 1).bodies())) == 3


def test_no_rows_have_no_bodies() -> None:
    assert messages(frame(data=pa.array([], pa.binary()))) == []


@each(
    ("columns", "layout", "sentence"),
    [
        ({"subject": ["a", None]}, BY_ROW, "row 42 has no subject: the column subject is null"),
        ({"msg_id": ["x", None]}, BY_COLUMN, "row 42 with subject 'a' has no id: msg_id is null"),
        ({"msg_id": ["x", ""]}, BY_COLUMN, "row 42 with subject 'a' has no id: msg_id is null or"),
        (
            {"shard": [0, 0], "seq": [None, 1]},
            BY_SOURCE,
            "row 41 with subject 'a' has no id: stream, shard or seq are null",
        ),
        ({"shard": [0, 0], "seq": [1, 1]}, BY_SOURCE, "several rows come from the message S:0:1"),
        ({"data": [b"", bytes(16 << 20)]}, BY_ROW, "row 42 with subject 'a' has 167772"),
    ],
)
def test_wrong_row_is_named(columns: dict[str, Any], layout: Layout, sentence: str) -> None:
    with pytest.raises(RowError) as refused:
        messages(frame(**columns), layout, first_row=41)
    assert sentence in str(refused.value)


def test_text_that_is_not_utf8_is_refused() -> None:
    bad = pa.array([b"\xff"]).view(pa.string())
    entry = pa.MapArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array(["A"]), bad)
    for columns in ({"subject": bad}, {"headers": entry}):
        with pytest.raises(RowError, match="is not UTF-8"):
            messages(frame(**columns))

"""The requests of a write: what is sent, which answers are retried, and the sentence for others."""

from collections.abc import Iterator
from typing import Self

import pyarrow as pa
import pytest

from contrail_spark import transport
from contrail_spark.bodies import Body, Rows
from contrail_spark.errors import (
    ContrailSparkError,
    ProtocolError,
    ServerRefusedError,
    UnavailableError,
)
from contrail_spark.layout import IdSource, Layout
from contrail_spark.options import parse_write_options
from contrail_spark.publisher import NumberedBatch, Publisher
from tests.spark.publish_server import Answer, PublishServer, problem, runs
from tests.support.each import each

BATCH = NumberedBatch("q-1", 8, "batch 7", "Start anew")
STORED = {"count": 3, "first_seq": 1}
UNKNOWN = {"status": 504, "name": "outcome_unknown", "code": 20050, "retryable": True}
NOT_CAPTURED = {
    "status": 409,
    "name": "subject_not_captured",
    "code": 20002,
    "detail": "the stream does not capture s.2",
}
FORGOTTEN = {"status": 409, "name": "number_forgotten", "code": 20090}


@pytest.fixture
def server() -> Iterator[PublishServer]:
    server = PublishServer()
    yield server
    server.close()


class Task:
    """A publisher of a task, and rows 11 to 13 of its partition in one body."""

    def __init__(self, server: PublishServer, **options: str) -> None:
        given = {"url": server.url, "stream": "S", "publishRetries": "2", **options}
        self.pauses: list[float] = []
        self.publisher = Publisher(parse_write_options(given), BATCH, self.pauses.append)
        batch = pa.record_batch({"subject": ["s.1", "s.2", "s.3"], "data": [b"x"] * 3})
        self.rows = Rows(batch, Layout(IdSource.ROW, None, None), "q", 11)
        [self.body] = self.rows.bodies()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.publisher.close()

    def publish(self) -> int:
        return self.publisher.publish(self.body, self.rows)


def test_requests_name_the_batch_and_share_a_connection(server: PublishServer) -> None:
    server.answers += [runs(STORED), runs({"count": 2, "first_seq": 9, "duplicate": True}, STORED)]
    with Task(server, token="secret") as task:
        assert task.publish() == 0
        task.body = Body(0, 5, task.body.packed)
        assert task.publish() == 2
    path, headers, body = server.requests[0]
    assert path == "/v1/streams/S/messages?producer=q-1&number=8"
    assert body == task.body.packed
    assert headers["Content-Type"] == headers["Accept"] == "application/vnd.msgpack"
    assert headers["Authorization"] == "Bearer secret"
    assert server.connections == 1


@each(
    "answer",
    [
        None,
        problem(503, "not_leader"),
        problem(429, "too_many"),
        Answer(201, b"\x81\xa4ru", announced=100),
        Answer(201, b"", announced=100),
        runs({"count": 2, "first_seq": 1}, {"count": 1, "problem": UNKNOWN}, status=207),
    ],
)
def test_failures_that_pass_are_retried_with_the_same_body(answer: Answer | None) -> None:
    server = PublishServer()
    server.answers += [answer, answer, runs(STORED)]
    with Task(server) as task:
        assert task.publish() == 0
    assert {body for _, _, body in server.requests} == {task.body.packed}
    assert len(task.pauses) == 2
    server.close()


def test_retries_end_and_start_again_for_the_next_request(server: PublishServer) -> None:
    server.answers += [None, None, runs(STORED), None, None, None]
    with Task(server) as task:
        task.publish()
        with pytest.raises(UnavailableError, match=r"write batch 7 to stream S at .* \(3 attempts"):
            task.publish()


def test_pause_is_as_long_as_the_server_asks_for(server: PublishServer) -> None:
    server.answers += [problem(503, "overloaded", Retry_After="17"), runs(STORED)]
    with Task(server) as task:
        task.publish()
    assert task.pauses == [17]


@each(
    ("answer", "kind", "sentence"),
    [
        (
            runs({"count": 1, "first_seq": 1}, {"count": 2, "problem": NOT_CAPTURED}, status=207),
            ServerRefusedError,
            "write batch 7 to stream S: row 12 with subject 's.2': 20002 subject_not_captured: the "
            "stream does not capture s.2",
        ),
        (
            # A refusal counts more than an outcome that is not known.
            runs({"count": 1, "problem": UNKNOWN}, {"count": 2, "problem": NOT_CAPTURED}),
            ServerRefusedError,
            "row 12 with subject 's.2': 20002 subject_not_captured",
        ),
        (
            runs({"count": 3, "problem": FORGOTTEN}, status=207),
            ServerRefusedError,
            "no longer knows which messages of it are stored, because too many others were stored "
            "since it began. Start anew",
        ),
        (problem(409, "number_forgotten"), ServerRefusedError, "too many others were stored since"),
        (
            runs({"count": 2, "first_seq": 7}, {"count": 1, "first_seq": 0, "duplicate": True}),
            ServerRefusedError,
            "the stream has a later batch already. The checkpoint is older than the last run",
        ),
        (problem(404, "stream_not_found"), ServerRefusedError, "404 stream_not_found: about str"),
        (runs({"count": 2, "first_seq": 1}), ProtocolError, "2 results for 3 messages"),
        (
            Answer(201, b"\x81"),
            ProtocolError,
            "the answer cannot be read: Input data was truncated",
        ),
        (
            Answer(200, b"", kind="text/html"),
            ProtocolError,
            "expected application/vnd.msgpack, but received text/html",
        ),
    ],
)
def test_other_answers_end_the_task(
    answer: Answer, kind: type[ContrailSparkError], sentence: str
) -> None:
    server = PublishServer()
    server.answers.append(answer)
    with Task(server) as task, pytest.raises(kind) as refused:
        task.publish()
    assert sentence in str(refused.value)
    assert task.pauses == []
    server.close()


def test_answer_that_is_too_large_is_not_kept(
    server: PublishServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "ANSWER_BYTES_MAX", 4)
    server.answers.append(runs(STORED))
    with pytest.raises(ProtocolError, match="the answer has 4 bytes or more"):
        Task(server).publish()

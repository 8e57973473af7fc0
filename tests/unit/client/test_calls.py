"""Requests, answers and retries as values."""

import msgspec
import pytest

from contrail_client.calls import (
    Answer,
    Call,
    Failure,
    Request,
    Retries,
    conclude,
    given,
    path_of,
    query_items,
)
from contrail_client.errors import (
    ApiProblem,
    ContrailError,
    FieldError,
    OutcomeUnknown,
    UnexpectedAnswer,
    Unreachable,
)
from tests.support.each import each

NOT_FOUND = b"""{"type": "urn:contrail:error:stream_not_found", "title": "stream not found",
 "status": 404, "detail": "no stream is called A", "instance": "/v1/streams/A", "code": 10059,
 "name": "stream_not_found", "retryable": false, "errors": [], "request_id": "r1"}"""
INVALID = b"""{"title": "invalid field", "status": 422, "detail": "/max_age: bad", "code": 20011,
 "name": "invalid_field", "retryable": false, "applied": false,
 "errors": [{"pointer": "/max_age", "message": "bad"}]}"""
BUSY = b"""{"title": "overloaded", "status": 503, "detail": "try later", "code": 20015,
 "name": "overloaded", "retryable": true, "errors": [], "applied": false}"""
UNKNOWN = b"""{"title": "outcome unknown", "status": 504, "detail": "leader lost", "code": 20016,
 "name": "outcome_unknown", "retryable": true, "errors": []}"""

READ = Call(Request("GET", "/v1/streams"), lambda answer: answer.body, repeatable=True)
WRITE = Call(Request("POST", "/v1/streams"), lambda answer: answer.body, repeatable=False)
REPEATABLE_WRITE = Call(WRITE.request, WRITE.parse, repeatable=True)


def problem(body: bytes, **headers: str) -> Answer:
    status = msgspec.json.decode(body)["status"]
    return Answer(status, {"content-type": "application/problem+json", **headers}, body)


def test_path_segments_are_percent_encoded() -> None:
    assert path_of("subjects", "a.*/ü>", "messages") == "/v1/subjects/a.%2A%2F%C3%BC%3E/messages"


@each("name", ["", ".", ".."])
def test_name_that_would_change_the_path_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        path_of("streams", "S", "consumers", name)


def test_query_leaves_out_what_is_not_given() -> None:
    assert query_items({"a": None, "b": 0, "c": True, "d": ""}) == (
        ("b", "0"),
        ("c", "true"),
        ("d", ""),
    )


def test_json_body_leaves_out_what_is_not_given() -> None:
    assert given(a=None, b=0, c=False) == {"b": 0, "c": False}


def test_success_is_parsed() -> None:
    assert conclude(READ, Answer(201, {}, b"body")) == b"body"


def test_problem_document_becomes_a_problem_with_every_field() -> None:
    with pytest.raises(ApiProblem, match="404 stream_not_found: no stream is called A") as caught:
        conclude(READ, problem(NOT_FOUND))
    found = caught.value
    assert (found.status, found.code, found.name) == (404, 10059, "stream_not_found")
    assert (found.retryable, found.applied, found.retry_after_s) == (False, None, None)
    assert found.request_id == "r1"


def test_bad_fields_are_listed() -> None:
    with pytest.raises(ApiProblem) as caught:
        conclude(WRITE, problem(INVALID))
    assert caught.value.errors == (FieldError("/max_age", "bad"),)


def test_retry_after_is_read() -> None:
    with pytest.raises(ApiProblem) as caught:
        conclude(WRITE, problem(BUSY, **{"retry-after": "3"}))
    assert (caught.value.retry_after_s, caught.value.applied) == (3.0, False)


def test_unknown_outcome_keeps_the_servers_problem() -> None:
    with pytest.raises(OutcomeUnknown) as caught:
        conclude(WRITE, problem(UNKNOWN))
    assert caught.value.problem is not None
    assert caught.value.problem.status == 504


@each("body", [b"", b"<html>bad gateway</html>", b"[1, 2]"])
def test_refusal_without_a_problem_document_is_unexpected(body: bytes) -> None:
    with pytest.raises(UnexpectedAnswer, match="status 502"):
        conclude(READ, Answer(502, {}, body))


def test_success_that_cannot_be_parsed_is_unexpected() -> None:
    call = Call(READ.request, lambda answer: msgspec.json.decode(answer.body), repeatable=True)
    with pytest.raises(UnexpectedAnswer, match="GET /v1/streams"):
        conclude(call, Answer(200, {}, b"not json"))


@each(
    ("call", "sent", "expected"),
    [
        (READ, False, Unreachable),
        (READ, True, Unreachable),
        (WRITE, False, Unreachable),
        (WRITE, True, OutcomeUnknown),
    ],
)
def test_missing_answer_is_unknown_only_for_a_write_that_was_sent(
    call: Call[bytes], sent: bool, expected: type[ContrailError]
) -> None:
    with pytest.raises(expected, match="reset by peer"):
        conclude(call, Failure(sent, "reset by peer"))


RETRYABLE = ApiProblem(503, name="no_leader", retryable=True)
NOT_APPLIED = ApiProblem(503, name="overloaded", retryable=True, applied=False)
FINAL = ApiProblem(409, name="stream_exists", applied=False)


@each(
    ("call", "error", "again"),
    [
        (READ, RETRYABLE, True),
        (READ, FINAL, False),
        (READ, Unreachable("refused"), True),
        (READ, UnexpectedAnswer("html"), False),
        (WRITE, RETRYABLE, False),
        (WRITE, NOT_APPLIED, True),
        (WRITE, FINAL, False),
        (WRITE, Unreachable("refused"), True),
        (WRITE, OutcomeUnknown("reset"), False),
        (REPEATABLE_WRITE, RETRYABLE, True),
        (REPEATABLE_WRITE, OutcomeUnknown("reset"), True),
    ],
)
def test_only_what_is_safe_and_may_pass_is_tried_again(
    call: Call[bytes], error: ContrailError, again: bool
) -> None:
    pause_s = Retries().pause_s(call, error, attempt=1, chance=0.5)
    assert (pause_s is not None) == again


def test_attempts_are_bounded() -> None:
    retries = Retries(attempts=3)
    tried = [retries.pause_s(READ, RETRYABLE, attempt, 0.0) is not None for attempt in range(1, 5)]
    assert tried == [True, True, False, False]


def test_pauses_grow_are_spread_and_stay_below_the_longest() -> None:
    retries = Retries(first_pause_s=1.0, longest_pause_s=4.0)
    assert [retries.backoff_s(attempt, 0.0) for attempt in (1, 2, 3, 9)] == [0.5, 1.0, 2.0, 2.0]
    assert retries.backoff_s(9, 0.999) < 4.0


def test_server_that_names_a_pause_is_given_it() -> None:
    asked = ApiProblem(429, name="too_many_requests", retryable=True, retry_after_s=4.0)
    assert Retries().pause_s(READ, asked, attempt=1, chance=0.0) == 4.0


def test_pause_beyond_the_longest_is_left_to_the_caller() -> None:
    asked = ApiProblem(429, name="too_many_requests", retryable=True, retry_after_s=60.0)
    assert Retries().pause_s(READ, asked, attempt=1, chance=0.0) is None

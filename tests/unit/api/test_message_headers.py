"""Message headers on raw HTTP, both ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_api.message_headers import from_request, payload_type, to_response
from contrail_common.errors import ApiError
from contrail_common.model import Headers, StoredMessage
from contrail_edge.inputs.message_items import header_problem
from tests.support.each import each

VALUES = st.text(
    st.characters(exclude_characters="\x00\r\n", exclude_categories=["Cs"]), max_size=40
)
NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,20}[A-Za-z0-9]", fullmatch=True)


def received(headers: dict[str, str]) -> Headers | None:
    return from_request(
        [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    )


def test_request_without_message_headers_gives_none() -> None:
    assert received({"Host": "localhost", "Content-Length": "3", "Nat": "x"}) is None


@each("kind", ["application/octet-stream", "application/x-www-form-urlencoded", ""])
def test_content_type_that_says_nothing_is_not_stored(kind: str) -> None:
    assert received({"Content-Type": kind}) is None


def test_content_type_of_the_payload_is_stored_unless_the_message_names_its_own() -> None:
    assert received({"Content-Type": "text/csv"}) == {"Content-Type": ["text/csv"]}
    both = {"Content-Type": "text/csv", "Msg-Header-Content-Type": "text/html"}
    assert (
        received(both) == received(dict(reversed(both.items()))) == {"Content-Type": ["text/html"]}
    )


@each(
    ("headers", "kind"),
    [
        (None, "application/octet-stream"),
        ({"Content-Type": ["text/csv; header=present"]}, "text/csv; header=present"),
        ({"content-type": ["text/csv"]}, "text/csv"),
        ({"Content-Type": [""]}, "application/octet-stream"),
        ({"Content-Type": ["text/csv\r\nSet-Cookie: a=b"]}, "application/octet-stream"),
        ({"Content-Type": ["text/ünknown"]}, "application/octet-stream"),
    ],
)
def test_raw_message_has_the_type_it_was_published_with(headers: Headers | None, kind: str) -> None:
    assert payload_type(StoredMessage(1, "s", 1, headers, b"")) == kind.encode()


def test_prefix_is_taken_off_and_the_name_stored_in_title_case() -> None:
    assert received({"Msg-Header-x-ORDER-id": "7"}) == {"X-Order-Id": ["7"]}


def test_idempotency_key_is_the_message_id() -> None:
    assert received({"Idempotency-Key": "k1"}) == {"Nats-Msg-Id": ["k1"]}
    assert received({"Idempotency-Key": "k1", "Nats-Msg-Id": "k1"}) == {"Nats-Msg-Id": ["k1"]}


def test_idempotency_key_that_disagrees_is_refused() -> None:
    with pytest.raises(ApiError, match="differs"):
        received({"Idempotency-Key": "k1", "Nats-Msg-Id": "k2"})


def test_jetstream_headers_keep_their_spelling() -> None:
    assert received({"nats-ttl": "1s", "nats-expected-stream": "S"}) == {
        "Nats-TTL": ["1s"],
        "Nats-Expected-Stream": ["S"],
    }


def test_trace_context_is_kept_under_its_own_name() -> None:
    assert received({"traceparent": "00-a-b-01"}) == {"traceparent": ["00-a-b-01"]}


def test_repeated_header_keeps_its_values_in_order() -> None:
    raw = [(b"msg-header-a", b"1"), (b"host", b"x"), (b"msg-header-a", b"2")]
    assert from_request(raw) == {"A": ["1", "2"]}


def test_extended_form_is_decoded() -> None:
    assert received({"Msg-Header-City*": "UTF-8''Z%C3%BCrich"}) == {"City": ["Zürich"]}


@each(
    "value",
    [
        "Zurich",
        "UTF-8''%zz",
        "UTF-8''%FF",
        "latin-1''x",
        "UTF-8''a b",
        "UTF-8''%0d%0aX",
        "UTF-8''%00",
    ],
)
def test_broken_extended_form_is_refused(value: str) -> None:
    with pytest.raises(ApiError, match="RFC 8187"):
        received({"Msg-Header-City*": value})


def test_value_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(ApiError, match="UTF-8"):
        from_request([(b"msg-header-a", b"\xff\xfe")])


def test_prefix_alone_is_refused() -> None:
    with pytest.raises(ApiError, match="is not a valid name for a message header"):
        received({"Msg-Header-": "x"})


@each(
    ("headers", "problem"),
    [
        ({"A": ["x"]}, None),
        ({"X-Ünï": ["x"]}, "not a valid header name"),
        ({"A b": ["x"]}, "not a valid header name"),
        ({"": ["x"]}, "not a valid header name"),
        ({"A*": ["x"]}, "not a valid header name"),
        ({"A:": ["x"]}, "not a valid header name"),
        ({"A" * 129: ["x"]}, "not a valid header name"),
        ({"A": []}, "no value"),
        ({"A": ["x\r\nB: y"]}, "line break"),
        ({"A": ["\x00"]}, "line break or NUL"),
        ({"A": ["tab\tand é are fine"]}, None),
    ],
)
def test_headers_given_as_they_are_must_be_sendable(headers: Headers, problem: str | None) -> None:
    found = header_problem(headers)
    assert (found is None) if problem is None else (problem in str(found))


@given(st.dictionaries(NAMES, st.lists(VALUES, min_size=1, max_size=3), max_size=4))
def test_what_a_raw_read_sends_is_what_a_raw_publish_would_store(headers: Headers) -> None:
    headers = {
        name: values for name, values in headers.items() if not name.lower().startswith("nats-")
    }
    lowered = {name.lower() for name in headers}
    if len(lowered) < len(headers) or "traceparent" in lowered:
        return  # raw HTTP knows no case: such headers cannot come back apart
    stored = StoredMessage(7, "a.b", 0, headers, b"")
    sent = to_response("S", stored)
    assert all(name.isascii() and value.isascii() for name, value in sent)
    back = from_request([one for one in sent if one[0].startswith(b"msg-header-")])
    titled = {"-".join(map(str.capitalize, name.split("-"))): v for name, v in headers.items()}
    assert (back or {}) == titled


def test_metadata_cannot_be_forged_by_a_stored_header() -> None:
    stored = StoredMessage(7, "a.b", 0, {"Nats-Sequence": ["99"], "Nats-Msg-Id": ["k"]}, b"")
    sent = to_response("S", stored)
    assert [value for name, value in sent if name == b"nats-sequence"] == [b"7"]
    assert (b"msg-header-nats-sequence", b"99") in sent
    assert (b"nats-msg-id", b"k") in sent


def test_subject_beyond_ascii_is_sent_in_extended_form() -> None:
    sent = dict(to_response("S", StoredMessage(7, "städte.x", 0, None, b"")))
    assert sent[b"nats-subject*"] == b"UTF-8''st%C3%A4dte.x"


@each("name", ["A\r\nB: c", "A b", "A:", "\u00e4", ""])
def test_header_name_that_http_cannot_carry_is_not_sent(name: str) -> None:
    with pytest.raises(ApiError, match="cannot be sent"):
        to_response("S", StoredMessage(1, "a", 1, {"K": ["v"], name: ["v"]}, b""))

"""What the headers of a message ask for, and what is refused before anything is proposed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common import errors, model
from contrail_common.errors import ApiError, ErrorSpec
from contrail_common.model import TTL_NEVER, Expected, Headers, PublishMessage
from contrail_common.timeunits import INT64_MAX, NS_PER_S
from contrail_edge.inputs.message_items import (
    MSG_ID_BYTES_MAX,
    checked,
    interpret,
    with_control,
)
from tests.support.each import each

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
sequences = st.none() | st.integers(0, 10**19 - 1)
expectations = st.builds(
    lambda stream, seq, subject_seq, subject, last_id: Expected(
        stream=stream,
        last_seq=seq,
        last_subject_seq=subject_seq,
        last_subject_seq_subject=subject if subject_seq is not None else None,
        last_msg_id=last_id,
    ),
    st.none() | texts,
    sequences,
    sequences,
    st.none() | st.sampled_from(["a", "a.*", ">"]),
    st.none() | texts,
)


def message(headers: Headers | None, subject: str = "a.b", payload: bytes = b"") -> PublishMessage:
    return PublishMessage(subject, headers, payload)


def refusal(candidate: PublishMessage, payload_max: int = 100) -> ErrorSpec | None:
    found = checked(candidate, payload_max)
    if not isinstance(found, ApiError):
        assert found is candidate
        return None
    assert found.applied is False
    return found.spec


@given(st.text(min_size=1, max_size=8).filter(str.isprintable), expectations)
def test_control_written_into_headers_is_read_back(message_id: str, expected: Expected) -> None:
    read = message(with_control({"Own": ["x"]}, message_id, expected))
    interpret(read)
    assert read.msg_id == message_id
    assert (read.expected or Expected()) == expected


def test_headers_without_control_are_left_as_they_are() -> None:
    headers: Headers = {"Own": ["x"]}
    assert with_control(headers, None, None) is headers
    assert with_control(None, None, None) is None
    read = message(headers)
    interpret(read)
    assert (read.msg_id, read.expected) == (None, None)


def test_control_does_not_change_the_headers_it_was_given() -> None:
    headers: Headers = {"Own": ["x"]}
    assert with_control(headers, "id", None) == {"Own": ["x"], model.MSG_ID: ["id"]}
    assert headers == {"Own": ["x"]}


@each("name", ["Nats-Msg-Id", "nats-msg-id", "NATS-MSG-ID"])
def test_control_headers_are_found_in_any_case(name: str) -> None:
    read = message({name: ["one", "two"]})
    interpret(read)
    assert read.msg_id == "one"


@pytest.mark.parametrize("headers", [{model.MSG_ID: [""]}, {model.MSG_ID: []}])
def test_empty_message_id_is_no_message_id(headers: Headers) -> None:
    read = message(headers)
    interpret(read)
    assert read.msg_id is None


def test_empty_message_id_is_not_refused() -> None:
    assert refusal(message({model.MSG_ID: [""]})) is None


def test_empty_expected_id_expects_a_last_message_without_one() -> None:
    read = message({model.EXPECTED_LAST_MSG_ID: [""]})
    interpret(read)
    assert read.expected == Expected(last_msg_id="")


@each(
    ("headers", "spec"),
    [
        ({"Nats-Rollup": ["every"]}, errors.ROLLUP_REFUSED),
        ({"nats-ttl": ["999ms"]}, errors.TTL_INVALID),
        ({"Nats-TTL": ["0"]}, errors.TTL_INVALID),
        ({"Nats-TTL": ["0s"]}, errors.TTL_INVALID),
        ({"Nats-TTL": ["-1"]}, errors.TTL_INVALID),
        ({"Nats-TTL": [""]}, errors.TTL_INVALID),
        ({"Nats-Schedule": ["@every 1s"]}, errors.FEATURE_HEADER),
        ({"Nats-Schedule-Target": ["a"]}, errors.FEATURE_HEADER),
        ({"Nats-Batch-Id": ["b"]}, errors.FEATURE_HEADER),
        ({"Nats-Incr": ["+1"]}, errors.FEATURE_HEADER),
        ({"Nats-Stream-Source": ["s"]}, errors.FEATURE_HEADER),
        ({model.MSG_ID: ["x" * (MSG_ID_BYTES_MAX + 1)]}, errors.INVALID_FIELD),
        ({model.EXPECTED_LAST_SUBJECT_SEQ_SUBJECT: ["a"]}, errors.EXPECTED_SUBJECT_ALONE),
        (
            {
                model.EXPECTED_LAST_SUBJECT_SEQ: ["1"],
                model.EXPECTED_LAST_SUBJECT_SEQ_SUBJECT: ["a..b"],
            },
            errors.INVALID_SUBJECT,
        ),
        ({"X": ["x" * model.HEADER_BYTES_MAX]}, errors.HEADERS_TOO_LARGE),
    ],
)
def test_header_that_asks_for_what_cannot_be_done_is_refused(
    headers: Headers, spec: ErrorSpec
) -> None:
    assert refusal(message(headers)) is spec


@each("text", ["", "-1", "+1", "1.0", "0x1", " 1", "1 ", "\u0661", "1" * 20, "one"])
@each("name", [model.EXPECTED_LAST_SEQ, model.EXPECTED_LAST_SUBJECT_SEQ])
def test_expected_sequence_that_is_no_sequence_is_refused(name: str, text: str) -> None:
    assert refusal(message({name: [text]})) is errors.INVALID_FIELD


@each(
    ("text", "ttl_ns"),
    [
        ("1", NS_PER_S),
        ("1s", NS_PER_S),
        ("1.5s", 1_500_000_000),
        ("1h30m", 5_400 * NS_PER_S),
        ("90", 90 * NS_PER_S),
        ("never", TTL_NEVER),
        ("NeVer", TTL_NEVER),
        (f"{INT64_MAX}ns", INT64_MAX),
    ],
)
def test_time_to_live_is_read_from_its_header(text: str, ttl_ns: int) -> None:
    read = message({"nats-ttl": [text, "7s"]})
    interpret(read)
    assert read.ttl_ns == ttl_ns


@each("text", ["", "-2", "-1s", "999ms", "x", "5 s", "soon", "1" * 20, "\u0661", "0.5", "1e9"])
def test_what_is_no_time_to_live_is_refused(text: str) -> None:
    assert refusal(message({model.TTL: [text]})) is errors.TTL_INVALID


def test_unknown_nats_header_is_stored_like_any_other() -> None:
    assert refusal(message({"Nats-Something": ["x"]})) is None


def test_headers_up_to_the_limit_pass() -> None:
    assert refusal(message({"X": ["x" * (model.HEADER_BYTES_MAX - 5)]})) is None


@each("subject", ["", "a.*", "a b", "a..b"])
def test_subject_that_cannot_be_published_to_is_refused(subject: str) -> None:
    assert refusal(message(None, subject)) is errors.INVALID_SUBJECT


@pytest.mark.parametrize(("size", "spec"), [(100, None), (101, errors.MESSAGE_TOO_LARGE)])
def test_payload_is_bounded(size: int, spec: ErrorSpec | None) -> None:
    assert refusal(message(None, payload=b"x" * size)) is spec


@given(st.dictionaries(texts | st.sampled_from(["Nats-Msg-Id", "nats-ttl"]), st.lists(texts)))
def test_any_headers_are_taken_or_refused_with_a_known_error(headers: Headers) -> None:
    for read in (interpret, lambda one: checked(one, 100)):
        try:
            found = read(message(headers))
        except ApiError as error:
            found = error
        assert found is None or isinstance(found, PublishMessage | ApiError)

"""Candidates of a publish: what they become, and why some are refused."""

from typing import Any, TypeVar

import msgspec
import pytest

from contrail_api.publishing.batch import JsonBatch
from contrail_api.publishing.candidates import (
    BareItem,
    IdItem,
    PackedItem,
    admitted,
    bare_batch,
    id_batch,
    uniform_batch,
)
from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import TTL_NEVER, Expected, PublishMessage
from contrail_common.timeunits import NS_PER_S
from contrail_edge.http.steps import at_once
from contrail_edge.inputs.message_items import (
    MessageItem,
    candidate,
    check_count,
    checked,
    payload_of,
)
from tests.support.each import each
from tests.unit.edge.edge_rig import messages_of

PAYLOAD_MAX = 1000


def item(**fields: Any) -> MessageItem:
    return msgspec.json.decode(msgspec.json.encode({"subject": "a.b", **fields}), type=MessageItem)


def candidate_of(**fields: Any) -> PublishMessage | ApiError:
    one = item(**fields)
    return candidate(one, payload_of(one, "", 63), PAYLOAD_MAX, None)


def message(**fields: Any) -> PublishMessage:
    found = candidate_of(**fields)
    assert isinstance(found, PublishMessage)
    return found


def refusal(**fields: Any) -> ApiError:
    found = candidate_of(**fields)
    assert isinstance(found, ApiError)
    return found


Item = TypeVar("Item")


def packed(kind: type[Item], *items: Any) -> list[Item]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(items), type=list[kind])  # type: ignore[valid-type]


def looked_at_closely(*items: Any) -> list[PublishMessage | ApiError]:
    found = [checked(one, PAYLOAD_MAX) for one in packed(PackedItem, *items)]
    return [
        one if isinstance(one, ApiError) else PublishMessage(*msgspec.structs.astuple(one))
        for one in found
    ]


@each(
    ("fields", "payload"),
    [
        ({"data": "grün"}, "grün".encode()),
        ({"data": ""}, b""),
        ({"data_base64": "AP8="}, b"\x00\xff"),
        ({"json": {"b": [1, 2.50], "a": None}}, b'{"b":[1,2.5],"a":null}'),
        ({"json": None}, b"null"),
    ],
)
def test_payload_is_taken_from_the_one_form_given(fields: dict[str, Any], payload: bytes) -> None:
    assert message(**fields).payload == payload


def test_json_payload_is_stored_compact_and_otherwise_as_written() -> None:
    raw = b'{"subject":"a","json": { "b" : 1.50 , "a": [ 12345678901234567890 ] } }'
    one = msgspec.json.decode(raw, type=MessageItem)
    assert payload_of(one, "", 63) == b'{"b":1.50,"a":[12345678901234567890]}'


@each("fields", [{}, {"data": "x", "json": 1}, {"data": "", "data_base64": ""}])
def test_anything_but_one_payload_form_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="exactly one") as refused:
        candidate_of(**fields)
    assert refused.value.spec is errors.INVALID_FIELD


def test_json_payload_that_is_not_utf_8_is_refused() -> None:
    one = msgspec.json.decode(b'{"subject":"a","json":"\xff"}', type=MessageItem)
    with pytest.raises(ApiError) as refused:
        payload_of(one, "", 63)
    assert refused.value.spec is errors.MALFORMED_BODY


def test_json_payload_that_nests_too_deep_is_refused() -> None:
    one = item(json=0)
    one.json = msgspec.Raw(b"[" * 64 + b"]" * 64)
    with pytest.raises(ApiError, match="nested deeper"):
        payload_of(one, "", 63)


def test_message_id_and_expectations_become_the_headers_that_jetstream_stores() -> None:
    found = message(data="x", msg_id="k", expected={"last_seq": 4}, headers={"A": ["1"]})
    assert found.headers == {
        "A": ["1"],
        "Nats-Msg-Id": ["k"],
        "Nats-Expected-Last-Sequence": ["4"],
    }
    assert found.msg_id == "k"
    assert found.expected is not None
    assert found.expected.last_seq == 4


def test_message_id_in_the_headers_counts_whatever_its_spelling() -> None:
    assert message(data="x", headers={"nats-msg-id": ["k"]}).msg_id == "k"


@each(
    ("fields", "spec"),
    [
        ({"subject": "a.*"}, errors.INVALID_SUBJECT),
        ({"subject": ""}, errors.INVALID_SUBJECT),
        ({"subject": "a b"}, errors.INVALID_SUBJECT),
        ({"data": "x" * (PAYLOAD_MAX + 1)}, errors.MESSAGE_TOO_LARGE),
        ({"headers": {"A": ["x" * 70_000]}}, errors.HEADERS_TOO_LARGE),
        ({"headers": {"A": ["x\ny"]}}, errors.INVALID_FIELD),
        ({"headers": {"A": []}}, errors.INVALID_FIELD),
        ({"msg_id": "k", "headers": {"nats-msg-id": ["other"]}}, errors.INVALID_FIELD),
        ({"msg_id": "a\r\nb"}, errors.INVALID_FIELD),
        ({"msg_id": "k" * 5000}, errors.INVALID_FIELD),
        ({"expected": {"last_seq": -1}}, errors.INVALID_FIELD),
        ({"expected": {"last_subject_seq_subject": "a"}}, errors.EXPECTED_SUBJECT_ALONE),
        ({"ttl": "500ms"}, errors.TTL_INVALID),
        ({"ttl": -2}, errors.TTL_INVALID),
        ({"ttl": 10**30}, errors.TTL_INVALID),
        ({"ttl": "5s", "headers": {"nats-ttl": ["6s"]}}, errors.INVALID_FIELD),
        ({"headers": {"Nats-Rollup": ["every"]}}, errors.ROLLUP_REFUSED),
        ({"headers": {"Nats-Schedule": ["@every 1s"]}}, errors.FEATURE_HEADER),
    ],
)
def test_item_that_cannot_be_stored_is_refused_for_itself(
    fields: dict[str, Any], spec: errors.ErrorSpec
) -> None:
    found = refusal(**{"data": "x", **fields})
    assert found.spec is spec
    assert found.applied is False or spec is errors.INVALID_FIELD


@each(
    ("fields", "headers", "ttl_ns"),
    [
        ({"ttl": 5}, {"Nats-TTL": ["5"]}, 5 * NS_PER_S),
        ({"ttl": "1m"}, {"Nats-TTL": ["1m"]}, 60 * NS_PER_S),
        ({"ttl": "never", "headers": {"A": ["b"]}}, {"A": ["b"], "Nats-TTL": ["never"]}, TTL_NEVER),
        ({"ttl": "5s", "headers": {"nats-ttl": ["5s"]}}, {"nats-ttl": ["5s"]}, 5 * NS_PER_S),
    ],
)
def test_time_to_live_of_an_item_is_stored_as_its_header(
    fields: dict[str, Any], headers: dict[str, list[str]], ttl_ns: int
) -> None:
    found = message(**{"data": "x", **fields})
    assert (found.headers, found.ttl_ns) == (headers, ttl_ns)


def test_batch_without_headers_is_put_into_columns_as_it_is() -> None:
    items = ["a", None, b"1"], ["b", None, b""], ["a", None, b"22"]
    batch = bare_batch(packed(BareItem, *items), PAYLOAD_MAX)
    assert batch is not None
    assert messages_of(batch) == looked_at_closely(*items)


@each("message_id", ["k", "k" * 1_024, "grün"])
def test_batch_with_ids_alone_is_what_a_closer_look_makes_of_it(message_id: str) -> None:
    headers = [{"Nats-Msg-Id": [one]} for one in (message_id, "other", message_id)]
    items = [["a", each, b"%d" % at] for at, each in enumerate(headers)]
    batch = id_batch(packed(IdItem, *items), PAYLOAD_MAX)
    assert batch is not None
    assert messages_of(batch) == looked_at_closely(*items)
    assert messages_of(batch)[0].msg_id == message_id


@each(
    ("subject", "headers", "payload"),
    [
        ("a.*", {"Nats-Msg-Id": ["k"]}, b""),
        ("a", {"Nats-Msg-Id": ["k"]}, b"x" * (PAYLOAD_MAX + 1)),
        ("a", {"Nats-Msg-Id": [""]}, b""),
        ("a", {"Nats-Msg-Id": ["k\n"]}, b""),
        ("a", {"Nats-Msg-Id": ["k" * 1_025]}, b""),
    ],
)
def test_batch_with_something_odd_in_it_needs_a_closer_look(
    subject: str, headers: Any, payload: bytes
) -> None:
    good = ["a", {"Nats-Msg-Id": ["good"]}, b""]
    assert id_batch(packed(IdItem, good, [subject, headers, payload]), PAYLOAD_MAX) is None


@each(
    "headers",
    [
        None,
        {},
        {"nats-msg-id": ["k"]},
        {"Nats-Msg-Id": ["k", "l"]},
        {"Nats-Msg-Id": []},
        {"Nats-Msg-Id": ["k"], "A": ["1"]},
    ],
)
def test_other_headers_are_not_taken_for_an_id_alone(headers: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        packed(IdItem, ["a", {"Nats-Msg-Id": ["good"]}, b""], ["a", headers, b""])


@each("names", [["Content-Type", "Nats-Msg-Id", "X"], ["Nats-Msg-Id"], ["Content-Type"]])
def test_batch_with_the_same_headers_is_what_a_closer_look_makes_of_it(names: list[str]) -> None:
    items = [["a", {name: [f"{name} {at}"] for name in names}, b"%d" % at] for at in range(3)]
    batch = uniform_batch(packed(PackedItem, *items), PAYLOAD_MAX)
    assert batch is not None
    assert messages_of(batch) == looked_at_closely(*items)


@each(
    "odd",
    [
        None,
        {"Content-Type": ["x"]},
        {"Content-Type": ["x"], "Nats-Msg-Id": ["k"]},
        {"Nats-Msg-Id": ["k"], "Content-Type": ["x", "y"]},
        {"Nats-Msg-Id": ["k"], "Content-Type": ["x\n"]},
        {"Nats-Msg-Id": [""], "Content-Type": ["x"]},
        {"Nats-Msg-Id": ["k"], "Content-Type": ["x" * 70_000]},
    ],
)
def test_batch_whose_headers_differ_or_are_odd_needs_a_closer_look(odd: Any) -> None:
    good = {"Nats-Msg-Id": ["good"], "Content-Type": ["text/plain"]}
    items = packed(PackedItem, ["a", good, b""], ["a", odd, b""])
    assert uniform_batch(items, PAYLOAD_MAX) is None


@each(
    "name", ["nats-msg-id", "nats-ttl", "Nats-Expected-Stream", "NATS-Whatever", "b ad", "", "x*"]
)
def test_header_that_may_ask_for_something_or_is_invalid_needs_a_closer_look(name: str) -> None:
    items = packed(PackedItem, ["a", {name: ["1"]}, b""])
    assert uniform_batch(items, PAYLOAD_MAX) is None


def test_batch_with_times_to_live_is_put_into_columns_as_it_is() -> None:
    items = [
        ["a", {"Nats-TTL": [text], "Nats-Msg-Id": [str(at)]}, b"x"]
        for at, text in enumerate(["5", "1m", "never", "5"])
    ]
    batch = uniform_batch(packed(PackedItem, *items), PAYLOAD_MAX)
    assert batch is not None
    assert messages_of(batch) == looked_at_closely(*items)
    assert batch.ttls == {0: 5 * NS_PER_S, 1: 60 * NS_PER_S, 2: TTL_NEVER, 3: 5 * NS_PER_S}


def test_batch_with_a_time_to_live_that_is_none_needs_a_closer_look() -> None:
    items = [["a", {"Nats-TTL": [text]}, b"x"] for text in ("5", "soon")]
    assert uniform_batch(packed(PackedItem, *items), PAYLOAD_MAX) is None


def test_empty_batch_is_a_batch() -> None:
    batch = bare_batch([], PAYLOAD_MAX)
    assert batch is not None
    assert batch.count == 0


def test_packed_headers_are_interpreted() -> None:
    found = looked_at_closely(
        ["a", {"Nats-Msg-Id": ["k"]}, b"1"],
        ["a", {"Nats-Expected-Last-Sequence": ["3"], "X": ["y"]}, b"2"],
    )
    batch = at_once(admitted(found)).batch
    assert messages_of(batch) == found
    assert [one.msg_id for one in messages_of(batch)] == ["k", None]
    assert batch.expected == {1: Expected(last_seq=3)}


@each(
    "bad",
    [
        ["a.*", None, b"x"],
        ["a", None, b"x" * (PAYLOAD_MAX + 1)],
        ["a", {"A": []}, b"x"],
        ["a", {"Nats-TTL": ["1ms"]}, b"x"],
        ["a", {"Nats-Msg-Id": ["k" * 5000]}, b"x"],
        ["a b", {"Nats-Msg-Id": ["k"]}, b"x"],
    ],
)
def test_one_bad_packed_item_leaves_the_others(bad: list[Any]) -> None:
    found = at_once(admitted(looked_at_closely(["a", None, b"1"], bad)))
    assert found.batch.count == 1
    assert list(found.refused) == [1]


@each("kind", [BareItem, IdItem, PackedItem])
@each(
    "bad",
    [
        ["a", None],
        ["a", None, "text"],
        [1, None, b"x"],
        ["a", None, b"x", "smuggled-id"],
        ["a", None, b"x", None, {"last_seq": 1}],
        ["a", None, b"x", None, None, "all"],
        ["a", None, b"x", None, None, None, 5],
        ["a", None, b"x", None, None, None, None, None],
        {"subject": "a"},
    ],
)
def test_packed_item_of_another_shape_is_not_decoded(kind: type, bad: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        packed(kind, bad)


def test_json_batch_refuses_unknown_fields() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"messages":[],"more":1}', type=JsonBatch)


def test_more_messages_than_a_request_may_hold_are_refused() -> None:
    check_count(10_000)
    with pytest.raises(ApiError) as refused:
        check_count(10_001)
    assert refused.value.spec is errors.BATCH_TOO_LARGE

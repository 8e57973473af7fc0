"""Calls that manage streams: their requests, and answers read from literal bodies."""

import msgspec
import pytest

from contrail_client.calls import Answer, conclude
from contrail_client.errors import UnexpectedAnswer
from contrail_client.operations import streams

INFO = b"""{"config": {"name": "ORDERS", "subjects": ["orders.>"], "max_age": "7d",
  "max_msgs": -1}, "created": "2026-01-31T08:00:00.500000000Z",
  "state": {"messages": 2, "bytes": 64, "first_seq": 3,
    "first_ts": "2026-01-31T08:00:01.000000000Z", "last_seq": 4,
    "last_ts": "2026-01-31T08:00:02.000000000Z", "num_subjects": 1, "num_deleted": 0,
    "consumer_count": 1},
  "cluster": {"leader": "n1", "replicas": []}, "some_later_field": 1}"""
EMPTY = b"""{"config": {"name": "E"}, "created": "2026-01-31T08:00:00.000000000Z",
  "state": {"messages": 0, "bytes": 0, "first_seq": 1, "first_ts": null, "last_seq": 0,
    "last_ts": null}}"""


def test_create_posts_the_configuration_with_the_name() -> None:
    call = streams.create("ORDERS", {"subjects": ["orders.>"]})
    assert (call.request.method, call.request.path) == ("POST", "/v1/streams")
    assert msgspec.json.decode(call.request.body) == {"name": "ORDERS", "subjects": ["orders.>"]}
    assert call.repeatable  # the second time it finds what the first one made
    with pytest.raises(ValueError, match="cannot be"):
        streams.create("..", {})


def test_put_replaces_the_configuration() -> None:
    request = streams.put("ORDERS", {"subjects": ["orders.>"], "max_age": "7d"}).request
    assert (request.method, request.path) == ("PUT", "/v1/streams/ORDERS")
    assert msgspec.json.decode(request.body) == {"subjects": ["orders.>"], "max_age": "7d"}
    assert request.headers == (("Content-Type", "application/json"),)


def test_put_without_fields_sends_an_empty_object() -> None:
    assert streams.put("ORDERS", {}).request.body == b"{}"


def test_guards_become_preconditions() -> None:
    assert ("If-Match", '"3"') in streams.put("S", {}, if_match='"3"').request.headers
    assert ("If-None-Match", "*") in streams.put("S", {}, only_create=True).request.headers


def test_update_is_a_merge_patch_in_which_none_restores_a_default() -> None:
    request = streams.update("S", {"max_msgs": 5, "description": None}, if_match='"2"').request
    assert request.method == "PATCH"
    assert request.headers == (
        ("Content-Type", "application/merge-patch+json"),
        ("If-Match", '"2"'),
    )
    assert msgspec.json.decode(request.body) == {"max_msgs": 5, "description": None}


def test_what_a_second_time_could_undo_is_not_repeatable() -> None:
    assert not streams.put("S", {}).repeatable
    assert not streams.delete("S").repeatable
    assert streams.get("S").repeatable


def test_info_is_read_with_its_etag_and_unknown_fields_are_ignored() -> None:
    info = conclude(streams.get("ORDERS"), Answer(200, {"etag": '"7"'}, INFO))
    assert (info.name, info.etag) == ("ORDERS", '"7"')
    assert info.config["max_age"] == "7d"
    assert (info.state.messages, info.state.first_seq, info.state.last_seq) == (2, 3, 4)
    assert info.cluster["leader"] == "n1"


def test_empty_stream_has_no_times() -> None:
    info = conclude(streams.get("E"), Answer(200, {}, EMPTY))
    assert (info.state.first_ts, info.state.last_ts) == (None, None)


def test_info_without_state_is_unexpected() -> None:
    with pytest.raises(UnexpectedAnswer, match="state"):
        conclude(streams.get("E"), Answer(200, {}, b'{"config": {}, "created": ""}'))


def test_page_is_read_with_its_token() -> None:
    call = streams.page(subject="orders.*", prefix=None, limit=1, token="t")
    assert call.request.query == (("subject", "orders.*"), ("limit", "1"), ("page_token", "t"))
    body = b'{"items": [' + INFO + b'], "next_page_token": "t2"}'
    page = conclude(call, Answer(200, {}, body))
    assert [info.name for info in page.items] == ["ORDERS"]
    assert page.next_page_token == "t2"


def test_purge_sends_what_is_given_and_answers_the_count() -> None:
    call = streams.purge("S", subject=None, up_to_seq=9, keep=None)
    assert (call.request.path, call.request.body) == ("/v1/streams/S/purge", b'{"up_to_seq":9}')
    assert conclude(call, Answer(200, {}, b'{"purged": 8}')) == 8


def test_delete_needs_no_body_in_its_answer() -> None:
    conclude(streams.delete("S"), Answer(204, {}))


def test_snapshot_asks_for_the_archive_with_or_without_consumers() -> None:
    asked = streams.snapshot("S", consumers=True)
    assert (asked.method, asked.path, asked.query) == ("GET", "/v1/streams/S/snapshot", ())
    assert streams.snapshot("S", consumers=False).query == (("consumers", "false"),)


def test_restore_is_not_repeated_and_names_what_it_sends() -> None:
    call = streams.restore("S")
    assert (call.request.method, call.request.path) == ("PUT", "/v1/streams/S/restore")
    assert call.request.headers == (("Content-Type", "application/vnd.contrail.snapshot"),)
    assert not call.repeatable

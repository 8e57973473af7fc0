"""Streams: create, ensure, change, list, delete, purge, seal."""

from typing import Any

import httpx
import pytest

from tests.contract.conftest import Stream, assert_problem
from tests.support.each import each

MERGE_PATCH = {"content-type": "application/merge-patch+json"}
CONFIG_FIELDS = {
    "name", "description", "subjects", "retention", "storage", "discard",
    "discard_new_per_subject", "max_msgs", "max_bytes", "max_age", "max_msgs_per_subject",
    "max_msg_size", "max_consumers", "duplicate_window", "num_replicas", "placement", "mirror",
    "sources", "subject_transform", "republish", "allow_direct", "sealed", "deny_delete",
    "deny_purge", "allow_rollup_hdrs", "compression", "first_seq", "consumer_limits", "metadata",
    "allow_msg_ttl", "subject_delete_marker_ttl", "allow_atomic", "allow_msg_schedules",
    "allow_msg_counter", "shards", "shard_by", "encrypted", "erasure",
}  # fmt: skip
STATE_FIELDS = {
    "messages", "bytes", "first_seq", "first_ts", "last_seq", "last_ts", "num_subjects",
    "num_deleted", "consumer_count",
}  # fmt: skip


# PUT ---------------------------------------------------------------------------------------------
def test_put_creates_then_finds_the_same(unused: Stream) -> None:
    created, found = unused.configure(max_age="90s"), unused.configure(max_age="1m30s")
    assert (created.status_code, found.status_code) == (201, 200)
    assert created.headers["location"] == unused.path
    assert created.json()["config"] == found.json()["config"]
    assert created.headers["etag"] == found.headers["etag"]


def test_put_answers_the_whole_stream(unused: Stream) -> None:
    body = unused.configure().json()
    assert body.keys() >= {"config", "created", "state", "cluster"}
    assert body["config"].keys() == CONFIG_FIELDS
    assert body["state"].keys() == STATE_FIELDS
    assert body["cluster"].keys() == {"leader", "replicas"}
    assert body["created"].endswith("Z")
    assert len(body["created"]) == len("2026-01-31T08:00:00.123456789Z")


def test_put_replaces_and_resets_what_it_omits(stream: Stream) -> None:
    stream.configure(description="first", max_msgs=5)
    answer = stream.configure(max_msgs=7)
    assert answer.status_code == 200
    config = answer.json()["config"]
    assert (config["description"], config["max_msgs"]) == ("", 7)


def test_put_of_what_a_get_answered_changes_nothing(stream: Stream) -> None:
    stream.configure(max_age="7d", max_msgs=10, metadata={"k": "v"}, deny_purge=True)
    shown = stream.client.get(stream.path)
    again = stream.client.put(stream.path, json=shown.json()["config"])
    assert again.status_code == 200
    assert again.headers["etag"] == shown.headers["etag"]


@each("limit", ["max_msgs", "max_bytes", "max_msg_size", "max_consumers"])
@each("value", [0, -5])
def test_unlimited_is_stored_as_minus_one(unused: Stream, limit: str, value: int) -> None:
    assert unused.configure(**{limit: value}).json()["config"][limit] == -1


@each(
    ("given", "shown"),
    [("90s", "90s"), ("1h30m", "90m"), ("7d", "7d"), ("1500ms", "1500ms"), (2_000_000_000, "2s")],
)
def test_durations_are_taken_in_any_form_and_shown_in_one(
    unused: Stream, given: str | int, shown: str
) -> None:
    assert unused.configure(max_age=given).json()["config"]["max_age"] == shown


@each("query", ["pedantic=true", "pedantic=1", "pedantic"])
def test_pedantic_refuses_a_silent_change(unused: Stream, query: str) -> None:
    config = {"subjects": [f"{unused.prefix}.>"], "max_msgs": 0}
    answer = unused.client.put(f"{unused.path}?{query}", json=config)
    assert_problem(answer, 422, 10157)
    assert unused.client.get(unused.path).status_code == 404


@pytest.mark.long
@each(
    ("config", "code", "pointer"),
    [
        ({"subjects": ["a b"]}, 10052, "/subjects/0"),
        ({"subjects": ["a..b"]}, 10052, "/subjects/0"),
        ({"subjects": ["a.>.b"]}, 10052, "/subjects/0"),
        ({"subjects": ["x.a", "x.*"]}, 10052, "/subjects"),
        ({"subjects": ["$CONTRAIL.x"]}, 10052, "/subjects/0"),
        ({"max_age": "-1s"}, 10052, "/max_age"),
        ({"max_age": "50ms"}, 10052, "/max_age"),
        ({"duplicate_window": "2h", "max_age": "1h"}, 10052, "/duplicate_window"),
        ({"subject_delete_marker_ttl": "999ms"}, 10052, "/subject_delete_marker_ttl"),
        ({"allow_msg_ttl": "yes"}, None, "/allow_msg_ttl"),
        ({"num_replicas": 6}, 10052, "/num_replicas"),
        ({"num_replicas": 3}, 10074, "/num_replicas"),
        ({"num_replicas": -1}, 10133, "/num_replicas"),
        ({"sealed": True}, 10052, "/sealed"),
        ({"description": "x" * 5000}, 10052, "/description"),
        ({"name": "other"}, 10056, "/name"),
        ({"mirror": {"name": "X"}}, 10052, "/mirror"),
        ({"sources": [{"name": "X"}]}, 10052, "/sources"),
        ({"allow_msg_counter": True}, 10052, "/allow_msg_counter"),
        ({"shards": 0}, 10052, "/shards"),
        ({"shards": 65}, 10052, "/shards"),
        ({"shards": 2, "first_seq": 5}, 10052, "/first_seq"),
        ({"shards": 3, "max_msgs": 2}, 10052, "/max_msgs"),
        ({"shards": 3, "max_bytes": 2}, 10052, "/max_bytes"),
        ({"shards": 2, "shard_by": [1, 0]}, 10052, "/shard_by/1"),
        ({"shards": 2, "shard_by": [257]}, 10052, "/shard_by/0"),
        ({"shards": 2, "shard_by": [1, 1]}, 10052, "/shard_by"),
        ({"shards": 2, "shard_by": list(range(1, 18))}, 10052, "/shard_by"),
        ({"shards": 2, "shard_by": ["1"]}, None, "/shard_by/0"),
        ({"erasure": "shred"}, None, "/erasure"),
        ({"erasure": "subject_key", "storage": "memory"}, 10052, "/erasure"),
        ({"erasure": "subject_key", "compression": "lz4"}, 10052, "/compression"),
        ({"allow_msg_schedules": True}, 10052, "/allow_msg_schedules"),
        ({"no_ack": True}, None, "/no_ack"),
        ({"nonsense": 1}, None, "/nonsense"),
        ({"max_msgs": "5"}, None, "/max_msgs"),
        ({"max_msgs": 5.0}, None, "/max_msgs"),
        ({"max_msgs": True}, None, "/max_msgs"),
        ({"max_msgs": 2**63}, None, "/max_msgs"),
        ({"subjects": "a"}, None, "/subjects"),
        ({"subjects": [1]}, None, "/subjects/0"),
        ({"max_age": "soon"}, None, "/max_age"),
        ({"max_age": 1.5}, None, "/max_age"),
        ({"discard": "oldest"}, None, "/discard"),
        ({"metadata": {"k": 1}}, None, "/metadata/k"),
        ({"deny_delete": 1}, None, "/deny_delete"),
    ],
)
def test_invalid_config_is_422_at_its_field(
    unused: Stream, config: dict[str, Any], code: int | None, pointer: str
) -> None:
    assert_problem(unused.configure(**config), 422, code, pointer)
    assert unused.client.get(unused.path).status_code == 404


@each("name", ["a.b", "a*b", "a%20b", "a%3Eb", "x" * 256])
def test_invalid_name_is_422(client: httpx.Client, name: str) -> None:
    assert_problem(client.put(f"/v1/streams/{name}", json={}), 422, 10052, "/name")


@pytest.mark.parametrize("name", ["a%2Fb", "a%5Cb", "a%2F%20b"])
def test_name_with_a_path_separator_is_422_with_its_own_code(
    client: httpx.Client, name: str
) -> None:
    target = f"/v1/streams/{name}"
    assert_problem(client.put(target, json={}), 422, 10128, "/name")
    assert_problem(client.put(f"{target}/restore", content=b"x"), 422, 10128, "/name")


def test_name_beyond_ascii_is_taken(client: httpx.Client) -> None:
    answer = client.put("/v1/streams/Größe", json={"subjects": ["größe.>"]})
    assert answer.status_code == 201
    assert answer.headers["location"] == "/v1/streams/Gr%C3%B6%C3%9Fe"
    assert client.get(answer.headers["location"]).json()["config"]["name"] == "Größe"
    assert client.delete(answer.headers["location"]).status_code == 204


@pytest.mark.parametrize(
    ("before", "after", "pointer"),
    [
        ({"deny_delete": True}, {}, "/deny_delete"),
        ({"deny_purge": True}, {}, "/deny_purge"),
        ({"first_seq": 9}, {}, "/first_seq"),
        ({"allow_msg_ttl": True}, {}, "/allow_msg_ttl"),
    ],
)
def test_forbidden_change_is_409(
    unused: Stream, before: dict[str, Any], after: dict[str, Any], pointer: str
) -> None:
    assert unused.configure(**before).status_code == 201
    assert_problem(unused.configure(**after), 409, 10052, pointer)


def test_subjects_of_another_stream_are_409(stream: Stream) -> None:
    answer = stream.client.put(f"/v1/streams/{stream.name}X", json={"subjects": [stream.subject()]})
    assert_problem(answer, 409, 10065)


# Conditions --------------------------------------------------------------------------------------
def test_if_none_match_star_only_creates(unused: Stream) -> None:
    config = {"subjects": [f"{unused.prefix}.>"]}
    only_new = {"if-none-match": "*"}
    assert unused.client.put(unused.path, json=config, headers=only_new).status_code == 201
    assert_problem(unused.client.put(unused.path, json=config, headers=only_new), 412)


def test_if_match_guards_the_version(stream: Stream) -> None:
    old = stream.client.get(stream.path).headers["etag"]
    config = {"subjects": [f"{stream.prefix}.>"], "max_msgs": 5}
    changed = stream.client.put(stream.path, json=config, headers={"if-match": old})
    assert changed.status_code == 200
    assert changed.headers["etag"] != old
    assert_problem(stream.client.put(stream.path, json={}, headers={"if-match": old}), 412)
    assert stream.client.get(stream.path).json()["config"]["max_msgs"] == 5


def test_etag_of_a_deleted_stream_is_none_of_its_successor(stream: Stream) -> None:
    old = {"if-match": stream.client.get(stream.path).headers["etag"]}
    config = {"subjects": [f"{stream.prefix}.>"]}
    assert stream.client.delete(stream.path).status_code == 204
    assert stream.client.put(stream.path, json=config).status_code == 201
    assert_problem(stream.client.put(stream.path, json=config, headers=old), 412)
    assert_problem(stream.client.delete(stream.path, headers=old), 412)


def test_if_match_on_a_stream_that_is_not_there_is_412(unused: Stream) -> None:
    for tag in ('"1"', "*"):
        assert_problem(unused.client.put(unused.path, json={}, headers={"if-match": tag}), 412)


def test_etag_is_of_the_config_and_get_never_304(stream: Stream) -> None:
    before = stream.client.get(stream.path)
    stream.publish()
    after = stream.client.get(stream.path, headers={"if-none-match": before.headers["etag"]})
    assert after.status_code == 200
    assert after.headers["etag"] == before.headers["etag"]


def test_delete_and_patch_heed_if_match(stream: Stream) -> None:
    stale = {"if-match": '"0"'}
    assert_problem(stream.client.delete(stream.path, headers=stale), 412)
    patch = stream.client.patch(stream.path, content=b"{}", headers={**MERGE_PATCH, **stale})
    assert_problem(patch, 412)
    assert_problem(stream.client.put(stream.path, json={}, headers={"if-match": "3"}), 400)


# POST --------------------------------------------------------------------------------------------
def test_post_only_creates(unused: Stream) -> None:
    config = {"name": unused.name, "subjects": [f"{unused.prefix}.>"]}
    created = unused.client.post("/v1/streams", json=config)
    assert (created.status_code, created.headers["location"]) == (201, unused.path)
    assert unused.client.post("/v1/streams", json=config).status_code == 200
    other = unused.client.post("/v1/streams", json={**config, "max_msgs": 5})
    assert_problem(other, 409, 10058)
    assert unused.client.get(unused.path).json()["config"]["max_msgs"] == -1


def test_post_needs_a_name(client: httpx.Client) -> None:
    assert_problem(client.post("/v1/streams", json={}), 422, None, "/name")


@pytest.mark.parametrize(
    "config",
    [
        {"storage": "memory", "retention": "interest", "discard": "new", "max_msgs": 7},
        {"retention": "workqueue", "max_age": "90s", "duplicate_window": "30s"},
        {"subject_delete_marker_ttl": "2s", "max_age": "1m", "deny_purge": True},
        {"compression": "s2", "consumer_limits": {"max_ack_pending": 7}, "first_seq": 5},
        {"shards": 4, "shard_by": [2], "max_bytes": 4_000_000, "erasure": "subject_key"},
        {"discard": "new", "discard_new_per_subject": True, "max_msgs_per_subject": 1},
        {"metadata": {"_nats.ver": "2.12.0", "_nats.level": "2", "_nats.req.level": "1"}},
        {"sealed": True, "max_age": "1h", "allow_rollup_hdrs": True},
    ],
)
def test_stream_of_any_kind_is_the_same_when_it_is_sent_back(
    unused: Stream, config: dict[str, Any]
) -> None:
    asked = dict(config)
    seals = asked.pop("sealed", False)
    assert unused.configure(**asked).status_code == 201
    if seals:
        assert unused.client.post(f"{unused.path}/seal").status_code == 200
    shown = unused.client.get(unused.path)
    for target in (unused.path, f"{unused.path}?pedantic=true"):
        again = unused.client.put(target, json=shown.json()["config"])
        assert (again.status_code, again.headers["etag"]) == (200, shown.headers["etag"])
        assert again.json()["config"] == shown.json()["config"]
    changed = unused.client.patch(unused.path, json={"description": "d"}, headers=MERGE_PATCH)
    assert changed.status_code == 200, changed.text
    assert changed.json()["config"] == {**shown.json()["config"], "description": "d"}
    assert changed.json()["config"]["metadata"].keys() <= {"_nats.req.level"}


# PATCH -------------------------------------------------------------------------------------------
def test_patch_changes_only_what_it_names(stream: Stream) -> None:
    stream.configure(description="kept", max_age="1h", metadata={"a": "1", "b": "2"})
    patch = {"max_age": "2h", "metadata": {"a": None, "c": "3"}}
    answer = stream.client.patch(stream.path, json=patch, headers=MERGE_PATCH)
    assert answer.status_code == 200
    config = answer.json()["config"]
    assert (config["description"], config["max_age"]) == ("kept", "2h")
    assert config["metadata"] == {"b": "2", "c": "3"}


def test_patch_with_null_resets(stream: Stream) -> None:
    stream.configure(max_msgs=5, description="gone")
    patch = {"max_msgs": None, "description": None}
    config = stream.client.patch(stream.path, json=patch, headers=MERGE_PATCH).json()["config"]
    assert (config["max_msgs"], config["description"]) == (-1, "")


@each(
    ("patch", "status", "pointer"),
    [
        ({"nonsense": 1}, 422, "/nonsense"),
        ({"max_msgs": "x"}, 422, "/max_msgs"),
        ({"name": "other"}, 422, "/name"),
        ({"retention": "forever"}, 422, "/retention"),
        ([], 422, ""),
    ],
)
def test_bad_patch_is_refused(stream: Stream, patch: Any, status: int, pointer: str) -> None:
    answer = stream.client.patch(stream.path, json=patch, headers=MERGE_PATCH)
    assert_problem(answer, status, None, pointer)


def test_patch_takes_merge_patch_only(stream: Stream) -> None:
    assert_problem(stream.client.patch(stream.path, json={}), 415)


def test_patch_of_an_unknown_stream_is_404(unused: Stream) -> None:
    assert_problem(unused.client.patch(unused.path, json={}, headers=MERGE_PATCH), 404, 10059)


# GET, list, DELETE -------------------------------------------------------------------------------
def test_state_follows_the_messages(stream: Stream) -> None:
    assert stream.state()["first_ts"] is None
    stream.fill(10)
    state = stream.state()
    assert (state["messages"], state["first_seq"], state["last_seq"]) == (10, 1, 10)
    assert state["num_subjects"] == 5
    assert state["first_ts"] <= state["last_ts"]
    assert state["bytes"] > 0


def test_list_is_paged_and_filtered(unused: Stream) -> None:
    names = [f"{unused.name}-{number}" for number in range(5)]
    for name in names:
        unused.client.put(f"/v1/streams/{name}", json={"subjects": [f"{unused.prefix}.{name}.>"]})
    query = {"prefix": f"{unused.name}-", "limit": 2}
    found: list[str] = []
    token = ""
    while token is not None:
        page = unused.client.get("/v1/streams", params={**query, "page_token": token}).json()
        assert page.keys() == {"items", "next_page_token"}
        assert len(page["items"]) <= 2
        found += [item["config"]["name"] for item in page["items"]]
        token = page["next_page_token"]
    assert found == names
    by_subject = unused.client.get(
        "/v1/streams", params={"subject": f"{unused.prefix}.{names[3]}.x"}
    )
    assert [item["config"]["name"] for item in by_subject.json()["items"]] == [names[3]]
    for name in names:
        unused.client.delete(f"/v1/streams/{name}")


@each("query", ["limit=0", "limit=1001", "limit=x", "subject=a..b"])
def test_bad_list_parameter_is_422(client: httpx.Client, query: str) -> None:
    assert_problem(client.get(f"/v1/streams?{query}"), 422, None, query.partition("=")[0])


def test_foreign_page_token_is_refused(client: httpx.Client) -> None:
    assert client.get("/v1/streams?page_token=%21%21").status_code in (400, 422)


def test_delete_removes_the_stream_once(stream: Stream) -> None:
    stream.fill(3)
    answer = stream.client.delete(stream.path)
    assert (answer.status_code, answer.content) == (204, b"")
    assert_problem(stream.client.get(stream.path), 404, 10059)
    assert_problem(stream.client.delete(stream.path), 404, 10059)
    assert_problem(stream.publish(), 404, 20001)
    stream.configure()
    assert stream.state()["last_seq"] == 0


def test_head_answers_as_get_without_a_body(stream: Stream) -> None:
    answer = stream.client.head(stream.path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["etag"] == stream.client.get(stream.path).headers["etag"]


# Purge and seal ----------------------------------------------------------------------------------
def test_purge_removes_all_and_keeps_the_sequence(stream: Stream) -> None:
    stream.fill(10)
    assert stream.client.post(f"{stream.path}/purge").json() == {"purged": 10}
    state = stream.state()
    assert (state["messages"], state["first_seq"], state["last_seq"]) == (0, 11, 10)
    assert stream.publish().json()["seq"] == 11


def test_purge_refuses_keep_with_up_to_seq(stream: Stream) -> None:
    answer = stream.client.post(f"{stream.path}/purge", json={"keep": 1, "up_to_seq": 3})
    assert_problem(answer, 422, 10003)


@pytest.mark.parametrize(
    "purge", [{"keep": -1}, {"up_to_seq": 0}, {"keep": "1"}, {"more": 1}, {"subject": "a..b"}, []]
)
def test_bad_purge_is_422(stream: Stream, purge: Any) -> None:
    stream.fill(2)
    assert_problem(stream.client.post(f"{stream.path}/purge", json=purge), 422)
    assert stream.state()["messages"] == 2


def test_denied_purge_is_409(stream: Stream) -> None:
    stream.configure(deny_purge=True)
    assert_problem(stream.client.post(f"{stream.path}/purge"), 409, 10110)


def test_purge_of_an_unknown_stream_is_404(unused: Stream) -> None:
    assert_problem(unused.client.post(f"{unused.path}/purge"), 404, 10059)


def test_seal_of_another_version_is_412(stream: Stream) -> None:
    stale = {"if-match": stream.client.get(stream.path).headers["etag"]}
    stream.configure(description="newer")
    assert_problem(stream.client.post(f"{stream.path}/seal", headers=stale), 412, 20043)
    current = {"if-match": stream.client.get(stream.path).headers["etag"]}
    assert stream.client.post(f"{stream.path}/seal", headers=current).status_code == 200


def test_sealed_stream_takes_and_gives_up_nothing(stream: Stream) -> None:
    stream.fill(2)
    answer = stream.client.post(f"{stream.path}/seal")
    assert answer.status_code == 200
    assert answer.json()["config"]["sealed"] is True
    assert_problem(stream.publish(), 409, 10109)
    assert_problem(stream.client.delete(f"{stream.path}/messages/1"), 409)
    assert_problem(stream.client.post(f"{stream.path}/purge"), 409)
    assert_problem(stream.configure(), 409, 10052)
    assert stream.client.get(f"{stream.path}/messages/1").content == b"1"

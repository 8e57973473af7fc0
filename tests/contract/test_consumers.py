"""Consumers: create, ensure, change, list, delete."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.contract.conftest import Stream, assert_problem
from tests.support.each import each

MERGE_PATCH = {"content-type": "application/merge-patch+json"}
INFO_FIELDS = {
    "stream", "name", "created", "config", "delivered", "ack_floor", "num_ack_pending",
    "num_redelivered", "num_waiting", "num_pending", "push_bound", "paused",
}  # fmt: skip


def test_put_creates_a_durable_then_finds_it(stream: Stream) -> None:
    stream.fill(3)
    path = f"{stream.path}/consumers/c"
    created = stream.client.put(path, json={"ack_wait": "45s"})
    found = stream.client.put(path, json={"ack_wait": "45s", "durable_name": "c"})
    assert (created.status_code, found.status_code) == (201, 200)
    assert created.headers["location"] == path
    assert created.headers["etag"] == found.headers["etag"]
    info = created.json()
    assert info.keys() == INFO_FIELDS
    assert (info["stream"], info["name"], info["num_pending"]) == (stream.name, "c", 3)
    assert info["config"]["durable_name"] == "c"
    assert info["config"]["ack_policy"] == "explicit"
    assert info["delivered"] == {"consumer_seq": 0, "stream_seq": 0, "last_active": None}
    assert stream.state()["consumer_count"] == 1


def test_put_of_what_a_get_answered_changes_nothing(stream: Stream) -> None:
    path = stream.consumer(
        filter_subject=stream.subject("1"), backoff=["1s", "5s"], max_deliver=3, metadata={"k": "v"}
    )
    shown = stream.client.get(path)
    again = stream.client.put(path, json=shown.json()["config"])
    assert (again.status_code, again.headers["etag"]) == (200, shown.headers["etag"])
    assert again.json()["config"] == shown.json()["config"]


@pytest.mark.parametrize(
    "config",
    [
        {"ack_policy": "none"},
        {"ack_policy": "none", "max_ack_pending": -1},
        {"ack_policy": "all", "max_ack_pending": 7},
        {"durable_name": None, "ack_policy": "none", "mem_storage": True, "num_replicas": 1},
        {"deliver_policy": "by_start_sequence", "opt_start_seq": 2, "headers_only": True},
        {"deliver_policy": "by_start_time", "opt_start_time": "2026-01-31T08:00:00.000000123Z"},
        {"deliver_policy": "last_per_subject", "filter_subjects": ["a.>", "b"]},
        {"metadata": {"_nats.ver": "2.12.0", "_nats.level": "2", "_nats.req.level": "1"}},
    ],
)
def test_consumer_of_any_kind_is_the_same_when_it_is_sent_back(
    stream: Stream, config: dict[str, Any]
) -> None:
    path = stream.consumer(**config)
    shown = stream.client.get(path)
    for target in (path, f"{path}?pedantic=true"):
        again = stream.client.put(target, json=shown.json()["config"])
        assert (again.status_code, again.headers["etag"]) == (200, shown.headers["etag"])
        assert again.json()["config"] == shown.json()["config"]
    changed = stream.client.patch(path, json={"description": "d"}, headers=MERGE_PATCH)
    assert changed.status_code == 200, changed.text
    assert changed.json()["config"] == {**shown.json()["config"], "description": "d"}
    assert changed.json()["config"]["metadata"].keys() <= {"_nats.req.level"}


def test_consumer_takes_the_replicas_of_its_stream_and_mem_storage(stream: Stream) -> None:
    """What the clients of JetStream send for ordered consumers, watches and object reads."""
    for replicas in (0, 1):
        path = stream.consumer(f"c{replicas}", num_replicas=replicas, mem_storage=True)
        shown = stream.client.get(path).json()["config"]
        assert (shown["num_replicas"], shown["mem_storage"]) == (replicas, True)
    target = f"{stream.path}/consumers/c"
    assert_problem(stream.client.put(target, json={"num_replicas": 2}), 422, 10126, "/num_replicas")
    refused = stream.client.put(target, json={"num_replicas": -1})
    assert_problem(refused, 422, 10133, "/num_replicas")
    assert stream.client.get(target).status_code == 404
    body = {"num_replicas": 1, "mem_storage": False}
    assert_problem(stream.client.put(path, json=body), 409, 10052, "/mem_storage")
    assert stream.client.put(path, json={"mem_storage": True}).json()["config"]["num_replicas"] == 0


def test_post_without_a_name_makes_an_ephemeral(stream: Stream) -> None:
    created = stream.client.post(f"{stream.path}/consumers", json={})
    assert created.status_code == 201
    info = created.json()
    assert info["config"]["durable_name"] is None
    assert info["config"]["inactive_threshold"] == "5s"
    assert created.headers["location"] == f"{stream.path}/consumers/{info['name']}"


def test_post_with_a_name_only_creates(stream: Stream) -> None:
    target = f"{stream.path}/consumers"
    config = {"name": "c"}
    assert stream.client.post(target, json=config).status_code == 201
    assert stream.client.post(target, json=config).status_code == 200
    assert_problem(stream.client.post(target, json={**config, "max_deliver": 3}), 409, 10148)


def test_filters_are_shown_as_given(stream: Stream) -> None:
    one = stream.client.get(stream.consumer("one", filter_subject=stream.subject("1"))).json()
    assert one["config"]["filter_subject"] == stream.subject("1")
    two = [stream.subject("1"), stream.subject("2")]
    several = stream.client.get(stream.consumer("two", filter_subjects=two)).json()
    assert (several["config"]["filter_subject"], several["config"]["filter_subjects"]) == (
        None,
        two,
    )


@pytest.mark.long
@each(
    ("config", "code", "pointer"),
    [
        ({"name": "other"}, 10056, "/name"),
        ({"durable_name": "other"}, 10132, "/durable_name"),
        ({"ack_wait": "-1s"}, None, "/ack_wait"),
        ({"max_waiting": -1}, None, "/max_waiting"),
        ({"backoff": ["1s", "2s"], "max_deliver": 1}, 10116, "/backoff"),
        ({"filter_subjects": [""]}, 10139, "/filter_subjects"),
        ({"filter_subjects": ["a.>", "a.b"]}, 10138, "/filter_subjects"),
        ({"filter_subject": "a", "filter_subjects": ["b"]}, 10136, "/filter_subjects"),
        ({"filter_subject": "a..b"}, None, "/filter_subjects/0"),
        ({"deliver_policy": "by_start_sequence"}, 10094, "/opt_start_seq"),
        ({"deliver_policy": "by_start_time"}, 10094, "/opt_start_time"),
        ({"opt_start_seq": 3}, 10094, "/opt_start_seq"),
        ({"opt_start_time": "2026-01-01T00:00:00Z"}, 10094, "/opt_start_time"),
        ({"opt_start_time": "yesterday"}, None, "/opt_start_time"),
        ({"ack_policy": "maybe"}, None, "/ack_policy"),
        ({"deliver_policy": "first"}, None, "/deliver_policy"),
        ({"replay_policy": "original"}, None, "/replay_policy"),
        ({"priority_groups": ["g"]}, None, "/priority_groups"),
        ({"dead_letter": {"subject": "x"}}, None, "/dead_letter"),
        ({"deliver_subject": "x"}, None, "/deliver_subject"),
        ({"flow_control": True}, None, "/flow_control"),
        ({"nonsense": 1}, None, "/nonsense"),
        ({"max_deliver": "3"}, None, "/max_deliver"),
        ({"backoff": "1s"}, None, "/backoff"),
        ({"backoff": ["soon"]}, None, "/backoff/0"),
        ({"headers_only": 1}, None, "/headers_only"),
    ],
)
def test_invalid_config_is_422_at_its_field(
    stream: Stream, config: dict[str, Any], code: int | None, pointer: str
) -> None:
    answer = stream.client.put(f"{stream.path}/consumers/c", json=config)
    assert_problem(answer, 422, code, pointer)
    assert stream.state()["consumer_count"] == 0


@each(
    ("name", "code"),
    [
        ("a.b", 10091),
        ("a*", 10091),
        ("a%20b", 10091),
        ("x" * 256, 10091),
        ("a%2Fb", 10127),
        ("a%5Cb", 10127),
    ],
)
def test_invalid_name_is_422(stream: Stream, name: str, code: int) -> None:
    assert_problem(stream.client.put(f"{stream.path}/consumers/{name}", json={}), 422, code)


@pytest.mark.parametrize(
    "change",
    [{"deliver_policy": "new"}, {"ack_policy": "all"}, {"max_waiting": 3}],
)
def test_forbidden_change_is_409(stream: Stream, change: dict[str, Any]) -> None:
    path = stream.consumer()
    assert_problem(stream.client.put(path, json=change), 409, 10052)


def test_allowed_change_takes_effect(stream: Stream) -> None:
    stream.fill(10)
    path = stream.consumer()
    changed = stream.client.put(
        path, json={"filter_subject": stream.subject("1"), "max_deliver": 4}
    )
    assert changed.status_code == 200
    assert (changed.json()["config"]["max_deliver"], changed.json()["num_pending"]) == (4, 2)


def test_patch_changes_only_what_it_names(stream: Stream) -> None:
    path = stream.consumer(description="kept", filter_subject=stream.subject("1"))
    patch = {"max_deliver": 7, "filter_subjects": [stream.subject("2"), stream.subject("3")]}
    answer = stream.client.patch(path, json=patch, headers=MERGE_PATCH)
    assert answer.status_code == 200
    config = answer.json()["config"]
    assert (config["description"], config["max_deliver"]) == ("kept", 7)
    assert config["filter_subjects"] == patch["filter_subjects"]
    assert_problem(stream.client.patch(path, json={"x": 1}, headers=MERGE_PATCH), 422, None, "/x")
    assert_problem(stream.client.patch(path, json={"max_deliver": 1}), 415)


def test_conditions_guard_the_version(stream: Stream) -> None:
    path = stream.consumer()
    old = stream.client.get(path).headers["etag"]
    assert (
        stream.client.put(path, json={"max_deliver": 2}, headers={"if-match": old}).status_code
        == 200
    )
    assert_problem(stream.client.put(path, json={}, headers={"if-match": old}), 412)
    assert_problem(stream.client.put(path, json={}, headers={"if-none-match": "*"}), 412)
    assert_problem(stream.client.delete(path, headers={"if-match": old}), 412)


def test_etag_of_a_deleted_consumer_is_none_of_its_successor(stream: Stream) -> None:
    path = stream.consumer()
    old = {"if-match": stream.client.get(path).headers["etag"]}
    assert stream.client.delete(path).status_code == 204
    assert stream.client.put(path, json={}).status_code == 201
    assert_problem(stream.client.put(path, json={}, headers=old), 412)
    assert_problem(stream.client.delete(path, headers=old), 412)


def test_progress_does_not_change_the_etag(stream: Stream) -> None:
    stream.fill(2)
    path = stream.consumer()
    before = stream.client.get(path).headers["etag"]
    stream.next(path, batch=2)
    assert stream.client.get(path).headers["etag"] == before


def test_list_is_paged(stream: Stream) -> None:
    names = [f"c{number}" for number in range(5)]
    for name in names:
        stream.consumer(name)
    found: list[str] = []
    token = ""
    while token is not None:
        query = {"limit": 2, "page_token": token}
        page = stream.client.get(f"{stream.path}/consumers", params=query).json()
        found += [item["name"] for item in page["items"]]
        token = page["next_page_token"]
    assert found == names


def test_delete_removes_the_consumer_once(stream: Stream) -> None:
    path = stream.consumer()
    assert stream.client.delete(path).status_code == 204
    assert_problem(stream.client.delete(path), 404, 10014)
    assert_problem(stream.client.get(path), 404, 10014)
    assert_problem(stream.client.post(f"{path}/next", json={}), 404, 10014)


def test_everything_of_an_unknown_stream_is_404(unused: Stream) -> None:
    path = f"{unused.path}/consumers/c"
    for method, target in (
        ("GET", f"{unused.path}/consumers"),
        ("GET", path),
        ("DELETE", path),
        ("PUT", path),
        ("POST", f"{path}/next"),
    ):
        body = {"json": {}} if method in ("PUT", "POST") else {}
        assert_problem(unused.client.request(method, target, **body), 404, 10059)


def test_max_consumers_is_409(stream: Stream) -> None:
    stream.configure(max_consumers=1)
    stream.consumer("one")
    assert_problem(stream.client.put(f"{stream.path}/consumers/two", json={}), 409, 10026)


def test_pedantic_refuses_a_silent_change(stream: Stream) -> None:
    path = f"{stream.path}/consumers/c?pedantic=true"
    assert_problem(stream.client.put(path, json={"max_deliver": 0}), 422, 10157)
    assert stream.client.put(path, json={"max_deliver": -1}).status_code == 201


def test_changes_that_race_with_a_delete_neither_skip_messages_nor_bring_it_back(
    stream: Stream,
) -> None:
    stream.fill(20)
    path = f"{stream.path}/consumers/raced"

    def patch(number: int) -> httpx.Response:
        body = {"description": f"change {number}"}
        return stream.client.patch(path, json=body, headers=MERGE_PATCH)

    def put(number: int) -> httpx.Response:
        return stream.client.put(path, json={"description": f"put {number}"})

    def delete(_: int) -> httpx.Response:
        return stream.client.delete(path)

    with ThreadPoolExecutor(6) as pool:
        for changes in ([patch, patch], [put, patch], [put, put]):
            for turn in range(8):
                etag = stream.client.put(path, json={}).headers["etag"]
                calls = [*changes, delete, *changes]
                answers = list(pool.map(lambda call, turn=turn: call(turn), calls))
                statuses = {one.status_code for one in answers}
                assert statuses <= {200, 201, 204, 404, 412}, statuses
                left = stream.client.get(path)
                if put not in changes:  # a PATCH changes what is there, and makes nothing
                    assert left.status_code == 404
                elif left.status_code == 200:
                    assert left.json()["num_pending"] == 20
                stale = stream.client.delete(path, headers={"if-match": etag})
                assert stale.status_code == (404 if left.status_code == 404 else 412)
                stream.client.delete(path)


def test_deletes_and_changes_of_one_version_are_decided_once(stream: Stream) -> None:
    paths = [f"{stream.path}/consumers/raced", stream.path]
    with ThreadPoolExecutor(4) as pool:
        for turn in range(6):
            stream.configure()
            for path, config in ((paths[0], {}), (paths[1], {"subjects": [f"{stream.prefix}.>"]})):
                etag = stream.client.put(path, json=config).headers["etag"]

                def change(text: str, path: str = path, etag: str = etag) -> int:
                    body = {"description": text}
                    headers = {**MERGE_PATCH, "if-match": etag}
                    return stream.client.patch(path, json=body, headers=headers).status_code

                def delete(_: str, path: str = path, etag: str = etag) -> int:
                    headers = {"if-match": etag}
                    return stream.client.delete(path, headers=headers).status_code

                calls = (change, delete, change, delete)
                found = pool.map(lambda call, text=f"{turn}": call(text), calls)
                done = [status for status in found if status not in (412, 404)]
                assert done in ([200], [204])

"""Reading and deleting messages without a consumer."""

import json
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.contract.conftest import Stream, assert_problem
from tests.contract.talk import wait_until
from tests.support.each import each
from tests.support.servers import ServerProcess

JSON = {"accept": "application/json"}


# One message -------------------------------------------------------------------------------------
def test_raw_read_has_the_payload_and_the_facts_in_headers(stream: Stream) -> None:
    stream.publish(b"\x00\xff", rest="x.y")
    answer = stream.client.get(f"{stream.path}/messages/1")
    assert (answer.status_code, answer.content) == (200, b"\x00\xff")
    assert answer.headers["nats-stream"] == stream.name
    assert answer.headers["nats-subject"] == stream.subject("x.y")
    assert answer.headers["nats-sequence"] == "1"
    assert answer.headers["nats-time-stamp"].endswith("Z")
    assert answer.headers["content-type"] == "application/octet-stream"


def test_raw_read_has_the_content_type_of_the_publish_and_cannot_run_as_a_page(
    stream: Stream,
) -> None:
    stream.publish(b"<script>alert(1)</script>", Content_Type="text/html")
    answer = stream.client.get(f"{stream.path}/messages/1")
    assert answer.headers["content-type"] == "text/html"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"] == "sandbox"


def test_message_that_has_left_the_cache_is_read_from_the_disk(tmp_path: Path) -> None:
    size = 16 << 20
    with (
        ServerProcess(tmp_path / "data", cache_max_bytes=size) as server,
        server.client() as client,
    ):
        stream = Stream(client, "COLD", "cold")
        stream.configure()
        stream.publish(b"kept")
        for _ in range(18):
            assert stream.publish(b"x" * 1_000_000).status_code == 201

        def figure(name: str) -> float:
            lines = client.get("/metrics").text.splitlines()
            return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])

        # The memory has a message until it is in the store.
        wait_until(lambda: figure("contrail_store_unwritten_bytes") == 0)
        assert figure("contrail_cache_misses_total") == 0
        assert client.get(f"{stream.path}/messages/1").content == b"kept"
        assert figure("contrail_cache_misses_total") == 1
        assert size / 2 < figure("contrail_cache_bytes") <= figure("contrail_cache_max_bytes")
        assert figure("contrail_cache_max_bytes") == size


def test_json_read_has_a_path_of_its_own_whatever_is_accepted(stream: Stream) -> None:
    stream.publish(b"\x00\xff", Msg_Header_A="1")
    asked = stream.client.get(f"{stream.path}/messages/1", headers=JSON)
    for accept in ("application/octet-stream", "*/*"):
        answer = stream.client.get(f"{stream.path}/messages/1/json", headers={"accept": accept})
        assert answer.headers["content-type"] == "application/json"
        assert answer.json() == asked.json()
    assert_problem(stream.client.get(f"{stream.path}/messages/2/json"), 404, 10037)
    assert_problem(stream.client.get(f"{stream.path}/messages/x/json"), 422)


def test_json_read_has_the_message(stream: Stream) -> None:
    stream.publish(b"hi", Msg_Header_A="1")
    message = stream.client.get(f"{stream.path}/messages/1", headers=JSON).json()
    assert message.keys() == {"stream", "seq", "subject", "time", "headers", "data"}
    assert (message["seq"], message["data"], message["headers"]) == (1, "hi", {"A": ["1"]})


def test_payload_that_is_no_text_is_base64(stream: Stream) -> None:
    stream.publish(b"\xff")
    stream.publish(b"text")
    first, second = (
        stream.client.get(f"{stream.path}/messages/{seq}?payload=base64", headers=JSON).json()
        for seq in (1, 2)
    )
    assert (first["data_base64"], second["data_base64"]) == ("/w==", "dGV4dA==")
    assert "data" not in second
    automatic = stream.client.get(f"{stream.path}/messages/1", headers=JSON).json()
    assert automatic["data_base64"] == "/w=="


def test_missing_message_is_404(stream: Stream) -> None:
    for seq in (0, 1, 10**18):
        assert_problem(stream.client.get(f"{stream.path}/messages/{seq}"), 404, 10037)


@each("seq", ["x", "-1", "1.5", "%20", "9" * 30])
def test_sequence_that_is_none_is_422(stream: Stream, seq: str) -> None:
    assert_problem(stream.client.get(f"{stream.path}/messages/{seq}"), 422, None, "seq")


@each("query", ["payload=hex", "consistency=some", "shard=1", "shard=x"])
def test_bad_read_parameter_is_422(stream: Stream, query: str) -> None:
    stream.publish()
    answer = stream.client.get(f"{stream.path}/messages/1?{query}")
    assert_problem(answer, 422, None, query.partition("=")[0])


@each("query", ["consistency=leader", "consistency=any", "shard=0", "else=1"])
def test_other_read_parameters_are_taken(stream: Stream, query: str) -> None:
    stream.publish()
    assert stream.client.get(f"{stream.path}/messages/1?{query}").status_code == 200


def test_deletion_takes_no_parameters_of_reads(stream: Stream) -> None:
    for _ in range(2):
        stream.publish()
    path = f"{stream.path}/messages"
    assert_problem(stream.client.delete(f"{path}/1?shard=x"), 422, None, "shard")
    assert stream.client.delete(f"{path}/1?consistency=some&payload=hex").status_code == 204
    operation = stream.client.get("/openapi.json").json()["paths"][
        "/v1/streams/{stream}/messages/{seq}"
    ]["delete"]
    named = {one["name"] for one in operation["parameters"] if one["in"] == "query"}
    assert named == {"shard"}


def test_reads_of_an_unknown_stream_are_404(unused: Stream) -> None:
    for rest in ("messages/1", "messages", "last", "subjects", "deleted", "replay", "replay/plan"):
        assert_problem(unused.client.get(f"{unused.path}/{rest}"), 404, 10059)


@pytest.mark.parametrize(
    "rest",
    ["", "messages/2", "messages", "last", "subjects", "deleted", "replay", "replay/plan"],
)
def test_read_of_any_replica_says_how_far_it_is(stream: Stream, rest: str) -> None:
    stream.fill(3)
    path = f"{stream.path}/{rest}".rstrip("/")
    answer = stream.client.get(path, params={"consistency": "any"})
    assert answer.headers["nats-last-sequence"] == "3"
    assert answer.headers["contrail-staleness"] == "0"
    before = int(answer.headers["contrail-applied-index"])
    stream.publish()
    after = stream.client.get(path, params={"consistency": "any"})
    assert after.headers["nats-last-sequence"] == "4"
    assert int(after.headers["contrail-applied-index"]) > before
    leader = stream.client.get(path, params={"consistency": "leader"})
    assert not leader.headers.keys() & {"nats-last-sequence", "contrail-applied-index"}
    other = stream.client.get(path, params={"consistency": "some"})
    assert_problem(other, 422, None, "consistency")


@pytest.mark.parametrize("rest", ["replay", "replay/plan"])
def test_replica_is_read_by_the_name_of_its_node(stream: Stream, rest: str) -> None:
    stream.fill(3)
    path = f"{stream.path}/{rest}"
    name = stream.client.get(path, params={"consistency": "any"}).headers["contrail-replica"]
    again = stream.client.get(path, params={"consistency": "any", "replica": name})
    assert again.headers["contrail-replica"] == name
    away = stream.client.get(path, params={"consistency": "any", "replica": "nobody"})
    assert assert_problem(away, 503)["name"] == "not_ready"
    leader = stream.client.get(path, params={"replica": name})
    assert_problem(leader, 422, None, "replica")


def test_events_of_any_replica_begin_with_how_far_it_is(stream: Stream) -> None:
    stream.fill(3)
    headers = {"accept": "text/event-stream"}
    path = f"{stream.path}/messages?consistency=any"
    with stream.client.stream("GET", path, headers=headers) as answer:
        assert answer.headers["nats-last-sequence"] == "3"


# Deleted -----------------------------------------------------------------------------------------
def test_deleted_sequences_are_listed_in_runs_and_paged(stream: Stream) -> None:
    stream.fill(12)
    listed = stream.client.get(f"{stream.path}/deleted").json()
    assert listed == {"items": [], "next_page_token": None}
    for seq in (3, 4, 5, 7, 9, 10):
        stream.client.delete(f"{stream.path}/messages/{seq}")
    runs = [[3, 5], [7, 7], [9, 10]]
    listed = stream.client.get(f"{stream.path}/deleted").json()
    assert listed == {"items": runs, "next_page_token": None}
    first = stream.client.get(f"{stream.path}/deleted?limit=2").json()
    rest = {"limit": 2, "page_token": first["next_page_token"]}
    second = stream.client.get(f"{stream.path}/deleted", params=rest).json()
    assert first["items"] + second["items"] == runs
    assert second["next_page_token"] is None
    assert stream.state()["num_deleted"] == 6


def test_deleted_sequences_below_the_first_message_are_not_listed(stream: Stream) -> None:
    stream.fill(6)
    for seq in (2, 4, 6):
        stream.client.delete(f"{stream.path}/messages/{seq}")
    stream.client.post(f"{stream.path}/purge", json={"up_to_seq": 3})
    assert stream.client.get(f"{stream.path}/deleted").json()["items"] == [[4, 4], [6, 6]]


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x"])
def test_bad_parameter_of_deleted_is_422(stream: Stream, query: str) -> None:
    assert_problem(stream.client.get(f"{stream.path}/deleted?{query}"), 422, None, "limit")


def test_foreign_page_token_of_deleted_is_400(stream: Stream) -> None:
    assert_problem(stream.client.get(f"{stream.path}/deleted?page_token=!"), 400, 10003)


# Delete ------------------------------------------------------------------------------------------
def test_deleted_message_is_unreadable_at_once(stream: Stream) -> None:
    stream.fill(3)
    answer = stream.client.delete(f"{stream.path}/messages/2")
    assert (answer.status_code, answer.content) == (204, b"")
    assert_problem(stream.client.get(f"{stream.path}/messages/2"), 404, 10037)
    found = stream.client.get(f"{stream.path}/messages").json()["messages"]
    assert [one["seq"] for one in found] == [1, 3]
    state = stream.state()
    assert (state["messages"], state["num_deleted"]) == (2, 1)
    assert_problem(stream.client.delete(f"{stream.path}/messages/2"), 404, 10043)


def test_delete_beyond_the_stream_is_404(stream: Stream) -> None:
    assert_problem(stream.client.delete(f"{stream.path}/messages/7"), 404, 10043)


def test_denied_delete_is_409(stream: Stream) -> None:
    stream.configure(deny_delete=True)
    stream.publish()
    assert_problem(stream.client.delete(f"{stream.path}/messages/1"), 409, 10057)
    assert_problem(stream.client.delete(f"{stream.path}/messages/2"), 409, 10057)
    stream.client.post(f"{stream.path}/seal")
    assert_problem(stream.client.delete(f"{stream.path}/messages/2"), 409, 10109)


# Ranges ------------------------------------------------------------------------------------------
def test_range_is_read_page_by_page(stream: Stream) -> None:
    stream.fill(25)
    seen: list[int] = []
    next_seq = 0
    while True:
        query = {"from_seq": next_seq, "limit": 10}
        page = stream.client.get(f"{stream.path}/messages", params=query).json()
        assert page.keys() == {"messages", "next_seq", "num_pending"}
        if not page["messages"]:
            break
        seen += [one["seq"] for one in page["messages"]]
        assert page["num_pending"] == 25 - len(seen)
        next_seq = page["next_seq"]
    assert seen == list(range(1, 26))
    assert next_seq == 26


def test_range_is_filtered_by_subject(stream: Stream) -> None:
    stream.fill(20)
    query = {"subject": stream.subject("3")}
    page = stream.client.get(f"{stream.path}/messages", params=query).json()
    assert [one["seq"] for one in page["messages"]] == [3, 8, 13, 18]


def test_next_of_a_subject_is_found_and_the_rest_counted(stream: Stream) -> None:
    stream.publish(rest="rare.1")
    stream.fill(20)
    stream.publish(rest="rare.2")
    for subject, from_seq, seqs, pending in (
        ("rare.1", 0, [1], 0),
        ("rare.1", 2, [], 0),
        ("rare.*", 2, [22], 0),
        ("rare.*", 0, [1], 1),
        ("rare.2", 0, [22], 0),
        ("3", 10, [14], 1),
        ("3", 9, [9], 2),
        ("none", 0, [], 0),
    ):
        query = {"subject": stream.subject(subject), "from_seq": from_seq, "limit": 1}
        page = stream.client.get(f"{stream.path}/messages", params=query).json()
        assert [one["seq"] for one in page["messages"]] == seqs
        assert page["num_pending"] == pending
        assert page["next_seq"] == (seqs[0] + 1 if seqs else 23)


def test_range_begins_at_a_time(stream: Stream) -> None:
    stream.fill(2)
    after = stream.client.get(f"{stream.path}/messages/2", headers=JSON).json()["time"]
    stream.publish(b"later")
    found = stream.client.get(f"{stream.path}/messages", params={"start_time": after}).json()
    assert [one["seq"] for one in found["messages"]][-1] == 3
    future = stream.client.get(f"{stream.path}/messages?start_time=2200-01-01T00:00:00Z").json()
    assert future["messages"] == []


def test_range_ends_at_max_bytes_but_gives_one_message(stream: Stream) -> None:
    for _ in range(3):
        stream.publish(b"x" * 1000)
    page = stream.client.get(f"{stream.path}/messages?max_bytes=1").json()
    assert len(page["messages"]) == 1
    page = stream.client.get(f"{stream.path}/messages?max_bytes=2500").json()
    assert len(page["messages"]) == 2


def test_empty_range_is_200_with_the_next_sequence(stream: Stream) -> None:
    page = stream.client.get(f"{stream.path}/messages").json()
    assert page == {"messages": [], "next_seq": 1, "num_pending": 0}


def test_range_as_ndjson_is_one_message_a_line(stream: Stream) -> None:
    stream.fill(5)
    headers = {"accept": "application/x-ndjson"}
    answer = stream.client.get(f"{stream.path}/messages?limit=3", headers=headers)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(one)["seq"] for one in answer.text.splitlines()] == [1, 2, 3]
    assert answer.headers["contrail-next-seq"] == "4"
    assert answer.headers["nats-num-pending"] == "2"


def test_long_poll_answers_204_when_nothing_comes(stream: Stream) -> None:
    begun = time.monotonic()
    answer = stream.client.get(f"{stream.path}/messages?wait=300ms")
    assert (answer.status_code, answer.content) == (204, b"")
    assert 0.25 < time.monotonic() - begun < 30


def test_long_poll_answers_as_soon_as_something_comes(stream: Stream) -> None:
    answers: list[httpx.Response] = []
    poll = threading.Thread(
        target=lambda: answers.append(
            httpx.get(f"{stream.client.base_url}{stream.path}/messages?wait=60s", timeout=90)
        )
    )
    begun = time.monotonic()
    poll.start()
    stream.publish(b"news")
    poll.join(60)
    assert answers[0].json()["messages"][0]["data"] == "news"
    assert time.monotonic() - begun < 50


@each(
    "query",
    [
        "limit=0", "limit=10001", "limit=x", "from_seq=-1", "max_bytes=0", "wait=61s", "wait=soon",
        "start_time=yesterday", "subject=a..b", "subject=a.%3E.b",
    ],
)  # fmt: skip
def test_bad_range_parameter_is_422(stream: Stream, query: str) -> None:
    answer = stream.client.get(f"{stream.path}/messages?{query}")
    assert_problem(answer, 422, None, query.partition("=")[0])


def test_range_takes_one_beginning(stream: Stream) -> None:
    query = "from_seq=2&start_time=2026-01-31T08:00:00Z"
    assert_problem(stream.client.get(f"{stream.path}/messages?{query}"), 422, 10003)


def test_range_in_another_form_is_406(stream: Stream) -> None:
    answer = stream.client.get(f"{stream.path}/messages", headers={"accept": "text/html"})
    assert_problem(answer, 406)


# Last and subjects -------------------------------------------------------------------------------
def test_last_is_the_newest_of_each_subject(stream: Stream) -> None:
    assert stream.client.get(f"{stream.path}/last").json() == {
        "messages": [],
        "next_page_token": None,
    }
    stream.fill(12)
    newest = stream.client.get(f"{stream.path}/last").json()["messages"]
    assert sorted(one["seq"] for one in newest) == [8, 9, 10, 11, 12]
    one = stream.client.get(f"{stream.path}/last", params={"subject": stream.subject("4")}).json()
    assert [message["seq"] for message in one["messages"]] == [9]


def test_last_is_paged(stream: Stream) -> None:
    stream.fill(12)
    seen: list[int] = []
    token = ""
    while token is not None:
        query = {"limit": 2, "page_token": token}
        page = stream.client.get(f"{stream.path}/last", params=query).json()
        assert len(page["messages"]) <= 2
        seen += [one["seq"] for one in page["messages"]]
        token = page["next_page_token"]
    assert sorted(seen) == [8, 9, 10, 11, 12]


@pytest.mark.parametrize("query", ["subject=a..b", "limit=0", "up_to_seq=x"])
def test_bad_parameter_of_last_is_422(stream: Stream, query: str) -> None:
    answer = stream.client.get(f"{stream.path}/last?{query}")
    assert_problem(answer, 422, None, query.partition("=")[0])


def test_subjects_are_counted_and_paged(stream: Stream) -> None:
    stream.fill(12)
    everything = stream.client.get(f"{stream.path}/subjects").json()
    assert everything["items"] == [
        {"subject": stream.subject(str(number)), "messages": 3 if number in (1, 2) else 2}
        for number in range(5)
    ]
    first = stream.client.get(f"{stream.path}/subjects?limit=3").json()
    rest = {"limit": 3, "page_token": first["next_page_token"]}
    second = stream.client.get(f"{stream.path}/subjects", params=rest).json()
    assert first["items"] + second["items"] == everything["items"]
    one = stream.client.get(f"{stream.path}/subjects", params={"filter": stream.subject("2")})
    assert one.json()["items"] == [{"subject": stream.subject("2"), "messages": 3}]

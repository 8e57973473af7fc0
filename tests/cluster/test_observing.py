"""Operators can follow a request through the processes: logs, traces, metrics."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from contrail_common import __version__
from tests.contract.talk import Talk
from tests.support.servers import TIMEOUT_S, Process, SplitServers

PATIENCE_S: Final = 180.0
TRACE_ID: Final = "0af7651916cd43dd8448eb211c80319c"
TRACE: Final = f"00-{TRACE_ID}-b7ad6b7169203331-01"
STREAM: Final = "/v1/streams/S"

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SplitServers]:
    folder = tmp_path_factory.mktemp("observed")
    with SplitServers(folder, access_log="true", log_format="json") as running:
        yield running


@pytest.fixture
def split(servers: SplitServers) -> SplitServers:
    servers.start()
    with servers.client() as client:
        client.delete(STREAM)
        assert client.put(STREAM, json={"subjects": ["s.>"]}).status_code == 201
        assert client.put(f"{STREAM}/consumers/c", json={}).status_code == 201
    return servers


def lines_of(process: Process, request_id: str) -> list[dict[str, Any]]:
    whole, _, _ = process.log.read_text().rpartition("\n")  # it may be writing the next line
    lines = map(json.loads, whole.splitlines())
    return [line for line in lines if line.get("request_id") == request_id]


def wait_for(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (value := found()):
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.01)
    return value


def metrics_of(process: Process) -> dict[str, dict[tuple[str, ...], float]]:
    text = httpx.get(f"{process.url}/metrics", timeout=TIMEOUT_S).text
    return {
        family.name: {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for sample in family.samples
        }
        for family in text_string_to_metric_families(text)
    }


def test_one_request_has_one_id_and_trace_in_the_logs_of_all_processes(split: SplitServers) -> None:
    headers = {"x-request-id": "one-way", "traceparent": TRACE, "tracestate": "a=b"}
    target = f"{split.gateways[0].url}/v1/subjects/s.a/messages"
    answer = httpx.post(target, content=b"x", headers=headers, timeout=TIMEOUT_S)
    assert (answer.status_code, answer.headers["x-request-id"]) == (201, "one-way")
    (gateway,) = wait_for(lambda: lines_of(split.gateways[0], "one-way"))
    (storage,) = wait_for(lambda: lines_of(split.storage, "one-way"))
    (api,) = wait_for(lambda: [line for one in split.apis for line in lines_of(one, "one-way")])
    for line in (gateway, api):
        assert (line["event"], line["status"], line["method"]) == ("request", 201, "POST")
        assert line["path"] == "/v1/subjects/s.a/messages"
    assert (storage["event"], storage["method"]) == ("link_request", "publish")
    lines = (gateway, api, storage)
    assert [line["service"] for line in lines] == ["gateway", "api", "storage"]
    assert [line["node"] for line in lines] == ["gateway", "api", "n1"]
    assert {line["trace_id"] for line in lines} == {TRACE_ID}


def test_trace_of_a_publish_is_delivered_with_the_message(split: SplitServers) -> None:
    target = f"{split.apis[0].url}/v1/subjects/s.a/messages"
    httpx.post(
        target, content=b"x", headers={"traceparent": TRACE, "tracestate": "a=b"}, timeout=TIMEOUT_S
    )
    pulled = httpx.post(
        f"{split.gateways[0].url}{STREAM}/consumers/c/next", json={}, timeout=TIMEOUT_S
    )
    (message,) = pulled.json()["messages"]
    assert message["headers"] == {"traceparent": [TRACE], "tracestate": ["a=b"]}


def test_what_a_socket_asks_for_carries_its_handshakes_id(split: SplitServers) -> None:
    headers = {"x-request-id": "a-socket", "traceparent": TRACE}
    with Talk(split.apis[0].url, additional_headers=headers) as talk:
        talk.done("sub", sid="s", stream="S", consumer="c", credit={"msgs": 1})
        talk.send({"op": "pub", "subject": "s.a", "data": "x"})
        talk.next("msgs")
    lines = wait_for(lambda: lines_of(split.storage, "a-socket"))
    assert {"publish_each", "pull", "consumer_info"} <= {line["method"] for line in lines}
    assert {line["trace_id"] for line in lines} == {TRACE_ID}


def test_request_without_an_id_gets_one_and_refusals_are_logged_with_theirs(
    split: SplitServers,
) -> None:
    answer = httpx.get(f"{split.apis[0].url}/v1/streams/NONE", timeout=TIMEOUT_S)
    request_id = answer.headers["x-request-id"]
    assert answer.json()["request_id"] == request_id
    (line,) = wait_for(lambda: lines_of(split.storage, request_id))
    assert (line["method"], line["error"]) == ("stream_info", "stream_not_found")


def test_every_process_shows_the_hops_that_it_makes(split: SplitServers) -> None:
    httpx.post(f"{split.gateways[0].url}/v1/subjects/s.a/messages", content=b"x", timeout=TIMEOUT_S)
    httpx.post(f"{split.gateways[0].url}{STREAM}/consumers/c/next", json={}, timeout=TIMEOUT_S)
    gateway, storage = metrics_of(split.gateways[0]), metrics_of(split.storage)
    build = ("contrail_build_info", __version__, "gateway", "gateway")
    assert gateway["contrail_build_info"][build] == 1
    assert gateway["contrail_forwarded"]["contrail_forwarded_total", "answered"] >= 1
    assert gateway["contrail_link_up"]["contrail_link_up", "calls"] == 1
    calls = gateway["contrail_link_call_seconds"]
    assert calls["contrail_link_call_seconds_count", "pull"] >= 1
    assert gateway["process_resident_memory_bytes"]
    requests = storage["contrail_link_request_seconds"]
    assert requests["contrail_link_request_seconds_count", "publish"] >= 1
    for family in ("contrail_wal_sync_seconds", "contrail_commit_seconds"):
        assert storage[family][f"{family}_count",] >= 1
        assert storage[family][f"{family}_bucket", "+Inf"] == storage[family][f"{family}_count",]
    assert storage["contrail_consumer_deliveries"]["contrail_consumer_deliveries_total", "S", "c"]
    assert storage["contrail_consumer_lag"]["contrail_consumer_lag", "S", "c"] == 0


def test_storage_shows_how_far_a_consumer_is_behind(split: SplitServers) -> None:
    with split.client() as client:
        for _ in range(3):
            client.post("/v1/subjects/s.a/messages", content=b"x")
        client.post(f"{STREAM}/consumers/c/next", json={"batch": 2})

    def consumer(name: str) -> float:
        family = metrics_of(split.storage)[f"contrail_consumer_{name}"]
        (value,) = family.values()
        return value

    wait_for(lambda: consumer("ack_pending") == 2)
    assert (consumer("lag"), consumer("redelivered")) == (1, 0)


def test_api_that_stops_ends_its_sockets_with_4000_and_their_acks_go_on(
    split: SplitServers,
) -> None:
    with Talk(split.apis[0].url) as talk:
        talk.done("sub", sid="s", stream="S", consumer="c", credit={"msgs": 10})
        talk.send({"op": "pub", "subject": "s.a", "data": "x"})
        message = talk.next("msgs")["messages"][0]
        talk.done("ack", sid="s", seqs=[message["seq"]])
        assert split.apis[0].stop() == 0
        assert talk.closed() == 4000
    split.start()
    state = httpx.get(f"{split.apis[0].url}{STREAM}/consumers/c", timeout=TIMEOUT_S).json()
    assert state["ack_floor"]["stream_seq"] == message["seq"]

"""What is not about streams: probes, metrics, the document, tokens, problems, shutdown."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import openapi_spec_validator
import pytest

from tests.contract.conftest import Stream, assert_problem
from tests.contract.raw_http import RawConnection
from tests.support.each import each
from tests.support.servers import ServerProcess


# Probes and metrics ------------------------------------------------------------------------------
def test_probes_answer(client: httpx.Client) -> None:
    assert client.get("/livez").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}
    assert client.get("/readyz?verbose").json()["components"]
    assert client.head("/livez").status_code == 200


def test_metrics_count_requests_by_route(client: httpx.Client, stream: Stream) -> None:
    stream.publish()
    text = client.get("/metrics").text
    assert (
        'contrail_http_requests_total{method="POST",route="/v1/subjects/{subject}/messages"' in text
    )
    assert "contrail_http_request_seconds_bucket" in text
    assert stream.subject() not in text


# Problems ----------------------------------------------------------------------------------------
@each(
    ("method", "target", "status"),
    [
        ("GET", "/v1", 404),
        ("GET", "/v2/streams", 404),
        ("GET", "/v1/streams/", 404),
        ("GET", "/v1/streams//messages", 404),
        ("GET", "/v1/streams/S/messages/1/2", 404),
        ("POST", "/livez", 405),
        ("DELETE", "/v1/streams", 405),
        ("PATCH", "/v1/streams/S/messages", 405),
        ("PUT", "/v1/subjects/a.b/messages", 405),
        ("GET", "/v1/subjects/a.b/messages", 405),
        ("OPTIONS", "/v1/streams", 405),
    ],
)
def test_unknown_path_or_method_is_a_problem(
    client: httpx.Client, method: str, target: str, status: int
) -> None:
    answer = client.request(method, target)
    assert_problem(answer, status)
    assert ("allow" in answer.headers) is (status == 405)


def test_allow_names_every_method(client: httpx.Client) -> None:
    allow = client.post("/v1/streams/S").headers["allow"]
    assert {one.strip() for one in allow.split(",")} == {"DELETE", "GET", "HEAD", "PATCH", "PUT"}


@each("body", [b"", b"{", b"[1,]", b'{"a":}', b"\xff", b"[" * 10_000, b"1" * 5000])
def test_malformed_json_is_400(client: httpx.Client, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    assert_problem(client.put("/v1/streams/BAD", content=body, headers=headers), 400, 10025)
    assert client.get("/v1/streams/BAD").status_code == 404


@each("body", [b"[]", b'"text"', b"1", b"null", b"true"])
def test_json_that_is_no_object_is_422(client: httpx.Client, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    assert_problem(client.put("/v1/streams/BAD", content=body, headers=headers), 422)


@each(
    "kind",
    [None, "text/plain", "application/x-www-form-urlencoded", "application/json; charset=ascii"],
)
def test_body_of_another_type_is_415(client: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    assert_problem(client.put("/v1/streams/BAD", content=b"{}", headers=headers), 415)


def test_deep_json_is_refused_at_its_bound(client: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    for depth, status in ((64, 422), (65, 400)):
        inner = b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)
        assert client.put("/v1/streams/BAD", content=inner, headers=headers).status_code == status


def test_request_id_is_echoed(client: httpx.Client) -> None:
    answer = client.get("/nowhere", headers={"x-request-id": "trace.7-a"})
    assert answer.headers["x-request-id"] == answer.json()["request_id"] == "trace.7-a"


# Document ----------------------------------------------------------------------------------------
def test_document_is_the_one_in_the_repository(client: httpx.Client) -> None:
    kept = Path(__file__).parents[2] / "openapi" / "openapi.json"
    assert client.get("/openapi.json").json() == json.loads(kept.read_text(encoding="utf-8"))


def test_document_is_valid_openapi(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    openapi_spec_validator.validate(document)


def test_every_documented_operation_is_served(client: httpx.Client) -> None:
    values = {
        "stream": "NONE",
        "consumer": "none",
        "subject": "no.one",
        "seq": "1",
        "erasure": "none",
    }
    document = client.get("/openapi.json").json()
    for template, item in document["paths"].items():
        for method in item:
            with client.stream(method.upper(), template.format(**values)) as answer:
                if answer.headers.get("content-type") != "text/event-stream":  # it has no end
                    answer.read()
            assert answer.status_code != 405, (method, template)
            assert answer.status_code < 500, (method, template, answer.text)
            assert str(answer.status_code) in item[method]["responses"], (method, template)
            if answer.status_code == 404:
                assert answer.json()["name"] != "not_found", (method, template)


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    return jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]})


def test_answers_fit_their_schemas(client: httpx.Client, stream: Stream) -> None:
    stream.fill(3)
    consumer = stream.consumer()
    document = client.get("/openapi.json").json()
    answers = [
        ("/v1/streams", "get", client.get("/v1/streams")),
        ("/v1/streams/{stream}", "get", client.get(stream.path)),
        ("/v1/streams/{stream}/messages", "get", client.get(f"{stream.path}/messages")),
        (
            "/v1/streams/{stream}/messages/{seq}/json",
            "get",
            client.get(f"{stream.path}/messages/1/json"),
        ),
        ("/v1/streams/{stream}/last", "get", client.get(f"{stream.path}/last")),
        ("/v1/streams/{stream}/subjects", "get", client.get(f"{stream.path}/subjects")),
        ("/v1/streams/{stream}/replay/plan", "get", client.get(f"{stream.path}/replay/plan")),
        ("/v1/streams/{stream}/consumers/{consumer}", "get", client.get(consumer)),
        (
            "/v1/streams/{stream}/erase",
            "post",
            client.post(f"{stream.path}/erase?wait=60s", json={"seqs": [2]}),
        ),
        (
            "/v1/streams/{stream}/consumers/{consumer}/next",
            "post",
            client.post(f"{consumer}/next", json={"batch": 3}),
        ),
        ("/v1/subjects/{subject}/messages", "post", stream.publish()),
        ("/v1/streams/{stream}", "put", stream.configure(sealed=1)),
        ("/v1/streams/{stream}/messages/{seq}", "get", client.get(f"{stream.path}/messages/99")),
    ]
    for template, method, answer in answers:
        responses = document["paths"][template][method]["responses"]
        response = responses[str(answer.status_code)]
        if "$ref" in response:
            response = document["components"]["responses"][response["$ref"].rpartition("/")[2]]
        content = response["content"]
        schema = content[answer.headers["content-type"]]["schema"]
        validator(document, schema).validate(answer.json())


def test_documents_schemas_of_answers_have_no_defaults(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    for name in ("StreamInfoJson", "StreamConfigJson", "ConsumerInfoJson", "Problem", "Message"):
        properties = document["components"]["schemas"][name]["properties"]
        assert [key for key, schema in properties.items() if "default" in schema] == []


# Tokens ------------------------------------------------------------------------------------------
@pytest.mark.long
def test_configured_token_is_asked_for(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", token="s3cret") as running, running.client() as client:
        for probe in ("/livez", "/readyz"):
            assert client.get(probe).status_code == 200
        for target in ("/v1/streams", "/metrics", "/v1/tickets", "/nowhere"):
            answer = client.get(target)
            assert_problem(answer, 401)
            assert answer.headers["www-authenticate"].startswith("Bearer")
            for wrong in ("Bearer nope", "Basic s3cret", "s3cret"):
                assert client.get(target, headers={"authorization": wrong}).status_code == 401
        headers = {"authorization": "Bearer s3cret"}
        assert client.get("/v1/streams", headers=headers).status_code == 200
        assert client.get("/v1/streams?token=s3cret").status_code == 401
        assert "s3cret" not in running.log.read_text(encoding="utf-8")


# Shutdown ----------------------------------------------------------------------------------------
@pytest.mark.long
def test_shutdown_answers_what_waits_and_ends_cleanly(own_server: ServerProcess) -> None:
    with own_server.client() as client:
        client.put("/v1/streams/S", json={"subjects": ["s.>"]})
        client.put("/v1/streams/S/consumers/c", json={})
    answers: list[int] = []

    def wait(method: str, target: str, body: dict[str, Any] | None) -> None:
        answer = httpx.request(method, f"{own_server.url}{target}", json=body, timeout=90)
        answers.append(answer.status_code)

    waits = [
        threading.Thread(target=wait, args=("GET", "/v1/streams/S/messages?wait=60s", None)),
        threading.Thread(
            target=wait, args=("POST", "/v1/streams/S/consumers/c/next", {"expires": "60s"})
        ),
    ]
    for thread in waits:
        thread.start()
    with own_server.client() as client, RawConnection(own_server.url) as half_sent:
        half_sent.send(b"GET /livez HT")
        deadline = time.monotonic() + 50
        while "contrail_http_waiting 2.0" not in client.get("/metrics").text:
            assert all(thread.is_alive() for thread in waits)
            assert time.monotonic() < deadline
    assert own_server.stop() == 0
    for thread in waits:
        thread.join(60)
    assert answers == [503, 503]


# The cluster -------------------------------------------------------------------------------------
def test_server_alone_is_a_cluster_of_one_node(client: httpx.Client) -> None:
    state = client.get("/v1/cluster").json()
    assert (state["status"], state["missing"]) == ("healthy", [])
    [node] = state["nodes"]
    assert (node["number"], node["up"]) == (1, True)
    assert node["disk"]["free_bytes"] <= node["disk"]["bytes"]
    assert state["meta_leader"] == node["name"]
    assert [group["kind"] for group in state["groups"]] == ["meta", "single"]
    for group in state["groups"]:
        [member] = group["members"]
        assert (member["role"], member["current"], member["lag"]) == ("leader", True, 0)
        assert member["name"] == group["leader"] == node["name"]
        assert member["applied"] <= member["commit"] <= member["durable"]

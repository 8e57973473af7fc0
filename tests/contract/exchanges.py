"""One conversation with a server that uses every route.

The same requests go to a server of each form that has no streams yet. ``answers.py`` compares what
they answer.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import msgspec

from tests.contract.answers import Answer, reduced

TOKEN: Final = "open-sesame"
ORIGIN: Final = "https://app.example"
DEFAULT_HEADERS: Final = {"authorization": f"Bearer {TOKEN}", "origin": ORIGIN}
SETTINGS: Final = {"token": TOKEN, "allowed_origins": ORIGIN}

_MERGE_PATCH: Final = {"content-type": "application/merge-patch+json"}
_NDJSON: Final = {"content-type": "application/x-ndjson"}
_MSGPACK: Final = {"content-type": "application/vnd.msgpack"}
_ARCHIVE: Final = {"content-type": "application/vnd.contrail.snapshot"}
_AS_JSON: Final = {"accept": "application/json"}
_AS_EVENTS: Final = {"accept": "text/event-stream"}
_AS_NDJSON: Final = {"accept": "application/x-ndjson"}
_AS_MSGPACK: Final = {"accept": "application/vnd.msgpack"}
_ARROW: Final = "application/vnd.apache.arrow.stream"

_VERSION: Final = re.compile(r"the version is (\d+)")


@dataclass(frozen=True)
class Ask:
    """A request. ``{name}`` in its path, headers and JSON stands for a value kept from an answer.

    ``keep`` names values of this answer, by the path to them in its JSON; ``keep_headers`` names
    headers. ``events`` is how many events to read from an answer that has no end.
    """

    method: str
    path: str
    status: int
    json: Any = None
    content: bytes | Sequence[bytes] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    keep: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    keep_headers: Mapping[str, str] = field(default_factory=dict)
    keep_body: str = ""
    events: int = 0

    def __str__(self) -> str:
        return f"{self.method} {self.path[:80]} -> {self.status}"


# The conversation --------------------------------------------------------------------------------
S: Final = "/v1/streams/S"
C: Final = f"{S}/consumers/c"
X: Final = "/v1/subjects/s.a/messages"


def _probes() -> Iterator[Ask]:
    for path in ("/livez", "/readyz", "/metrics", "/v1/cluster"):
        yield Ask("GET", path, 200)
        yield Ask("HEAD", path, 200)
        yield Ask("GET", path, 403, headers={"host": "evil.example"})
        yield Ask("DELETE", path, 405)
    yield Ask("GET", "/readyz?verbose", 200)
    yield Ask("GET", "/readyz?verbose=perhaps", 422)
    yield Ask("GET", "/openapi.json", 200)
    yield Ask("GET", "/", 307)
    yield Ask("POST", "/v1/tickets", 200)
    yield Ask("POST", "/v1/tickets", 401, headers={"authorization": "Bearer wrong"})
    yield Ask("POST", "/v1/tickets", 403, headers={"origin": "https://evil.example"})
    yield Ask("GET", "/v1/ws", 426)
    yield Ask("GET", "/v2/streams", 404)
    yield Ask("GET", "/v1/streams//messages", 404)
    yield Ask("GET", "/v1/streams", 403, headers={"origin": "https://evil.example"})
    asked = {"access-control-request-method": "PUT", "access-control-request-headers": "a,x y"}
    yield Ask("OPTIONS", S, 204, headers=asked)
    yield Ask("GET", "/v1/streams", 200, headers={"x-request-id": "trace.7-a"})
    yield Ask("GET", "/v1/streams?token=x", 401, headers={"authorization": ""})


def _streams() -> Iterator[Ask]:
    # Long enough for slow machines: a replay restores messages of the age of the recorded ones.
    config = {"subjects": ["s.>"], "max_age": "90m"}
    yield Ask("PUT", S, 201, json=config, keep_headers={"etag": "etag"})
    yield Ask("PUT", S, 200, json=config)
    yield Ask("PUT", S, 412, json=config, headers={"if-match": '"other"'})
    yield Ask("PUT", S, 412, json=config, headers={"if-none-match": "*"})
    yield Ask("PUT", f"{S}?pedantic=true", 422, json={**config, "max_msgs": 0})
    yield Ask("PUT", "/v1/streams/b%20d", 422, json=config)
    yield Ask("PUT", "/v1/streams/T", 409, json=config)
    yield Ask("POST", "/v1/streams", 201, json={"name": "T", "subjects": ["t.*"]})
    yield Ask("POST", "/v1/streams", 200, json={"name": "T", "subjects": ["t.*"]})
    yield Ask("POST", "/v1/streams", 409, json={"name": "T", "subjects": ["u.*"]})
    yield Ask("POST", "/v1/streams", 422, json={"subjects": ["u.*"]})
    yield Ask(
        "PATCH", S, 200, json={"description": "d", "allow_msg_ttl": True}, headers=_MERGE_PATCH
    )
    yield Ask("PATCH", S, 412, json={}, headers={**_MERGE_PATCH, "if-match": "{etag}"})
    yield Ask("PATCH", S, 422, json={"max_msgs": "5"}, headers=_MERGE_PATCH)
    yield Ask("PATCH", S, 415, json={"max_msgs": 5}, headers={"content-type": "text/plain"})
    yield Ask("GET", S, 200)
    yield Ask("GET", "/v1/%73treams/%53", 200)
    yield Ask("HEAD", S, 200)
    yield Ask("GET", "/v1/streams/none", 404)
    yield Ask("GET", "/v1/streams?limit=1", 200, keep={"page": ("next_page_token",)})
    yield Ask("GET", "/v1/streams?limit=1&page_token={page}", 200)
    yield Ask("GET", "/v1/streams?subject=t.a&prefix=T", 200)
    yield Ask("GET", "/v1/streams?limit=0", 422)
    as_json = {"content-type": "application/json"}
    for body, status in (
        (b"", 400), (b"{", 400), (b"\xff", 400), (b"[" * 10_000, 400),
        (b"[]", 422), (b"null", 422), (b'{"nonsense":1}', 422), (b"x" * ((4 << 20) + 1), 413),
    ):  # fmt: skip
        yield Ask("PUT", "/v1/streams/BAD", status, content=body, headers=as_json)
    for bad in (
        {"subjects": ["a..b"]}, {"subjects": "a"}, {"max_age": "soon"}, {"max_msgs": 2**63},
        {"num_replicas": 5}, {"shards": 65}, {"mirror": {"name": "X"}}, {"metadata": {"k": 1}},
        {"duplicate_window": "2h", "max_age": "1h"}, {"retention": "some"}, {"sealed": True},
    ):  # fmt: skip
        yield Ask("PUT", "/v1/streams/BAD", 422, json=bad)
    gzip = {"content-encoding": "gzip", **as_json}
    yield Ask("PUT", "/v1/streams/BAD", 415, content=b"{}", headers=gzip)


def _publishes() -> Iterator[Ask]:
    headers = {
        "idempotency-key": "k", "msg-header-order-id": "7", "x-other": "not stored",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "content-type": "text/html", "nats-ttl": "1h",
    }  # fmt: skip
    yield Ask("POST", X, 201, content=b"<p>", headers=headers)
    yield Ask("POST", X, 200, content=b"other", headers={"nats-msg-id": "k"})
    yield Ask("GET", f"{S}/messages", 200)
    yield Ask("POST", X, 201, content=b"")
    yield Ask("POST", X, 201, content=b"\x00\xff")
    yield Ask("POST", X, 201, content=b"x" * (65 << 10))
    yield Ask("POST", X, 201, content=[b"in ", b"pieces"])
    yield Ask("POST", f"{X}?else=1", 201, content=b"x", headers={"expect": "100-continue"})
    yield Ask("POST", "/v1/subjects/s.st%C3%A4dte%2Fx/messages", 201, content=b"x")
    yield Ask("POST", f"{X}?ack=none", 202, content=b"x")
    yield Ask("GET", f"{S}/messages?from_seq=8&wait=20s", 200)
    yield Ask("POST", "/v1/subjects/nobody.listens/messages", 404, content=b"x")
    yield Ask("POST", "/v1/subjects/nobody.listens/messages?ack=none", 404, content=b"x")
    yield Ask("POST", "/v1/subjects/s.*/messages", 422, content=b"x")
    yield Ask("POST", "/v1/subjects/s..a/messages", 422, content=b"x")
    yield Ask("POST", "/v1/subjects/s.%zz/messages", 400, content=b"x")
    yield Ask("POST", f"{X}?ack=all", 422, content=b"x")
    yield Ask("POST", X, 415, content=b"x", headers={"content-encoding": "gzip"})
    yield Ask("POST", X, 413, content=b"x" * ((1 << 20) + 1))
    yield Ask("POST", X, 413, content=[b"x" * (1 << 20), b"y"])
    yield Ask("POST", X, 401, content=b"x", headers={"authorization": "Bearer wrong"})
    yield Ask("POST", X, 403, content=b"x", headers={"origin": "https://evil.example"})
    for name, value, status in (
        ("nats-expected-stream", "OTHER", 412), ("nats-expected-last-sequence", "1", 412),
        ("nats-expected-last-subject-sequence", "1", 412),
        ("nats-expected-last-msg-id", "other", 412), ("nats-expected-last-sequence", "x", 422),
        ("nats-rollup", "sub", 422), ("nats-rollup", "some", 422), ("nats-ttl", "5ms", 422),
        ("nats-msg-id", "k" * 5000, 422), ("nats-batch-id", "b", 422), ("msg-header-", "x", 422),
        ("nats-expected-last-subject-sequence-subject", "a.b", 422),
        ("msg-header-a", "x" * 70_000, 431),
    ):  # fmt: skip
        yield Ask("POST", X, status, content=b"x", headers={name: value})


def _batches() -> Iterator[Ask]:
    batch = f"{S}/messages"
    good = [
        {"subject": "s.b", "data": "text", "msg_id": "b1", "headers": {"a": ["1", "2"]}},
        {"subject": "s.b", "data_base64": "aGk="},
        {"subject": "s.c", "json": {"b": [1], "a": None}},
    ]
    mixed = [
        {"subject": "s.b", "data": "text", "msg_id": "b1"},
        {"subject": "elsewhere.x", "data": "2"},
        {"subject": "s.b", "data": "3", "expected": {"last_seq": 999}},
        {"subject": "s.*", "data": "4"},
        {"subject": "s.d", "data": "5", "ttl": "5ms"},
    ]
    lines = b"\n".join(json.dumps(one).encode() for one in good[1:])
    yield Ask("POST", batch, 201, json={"messages": good})
    yield Ask("POST", batch, 207, json={"messages": mixed})
    yield Ask("POST", batch, 201, content=lines, headers=_NDJSON)
    yield Ask(
        "POST", batch, 207, content=b"\n".join(map(msgspec.json.encode, mixed)), headers=_NDJSON
    )
    yield Ask("POST", batch, 422, json={"messages": good, "atomic": 1})
    packed = [1, [["s.p", None, b"\x00"], ["s.q", {"A": ["b"]}, b"t"]]]
    yield Ask("POST", batch, 201, content=msgspec.msgpack.encode(packed), headers=_MSGPACK)
    yield Ask("POST", batch, 400, content=b"\xc1", headers=_MSGPACK)
    yield Ask("POST", batch, 422, content=msgspec.msgpack.encode({}), headers=_MSGPACK)
    yield Ask("POST", f"{batch}?atomic=true", 422, json={"messages": good[1:]})
    columns = [2, [["s.a"], bytes(4), b"\0\0\0\0\1\0\0\0", b"x", None]]
    for headers in ({}, _AS_MSGPACK):
        yield Ask(
            "POST", batch, 201, content=msgspec.msgpack.encode(columns),
            headers={"content-type": "application/vnd.msgpack", **headers},
        )  # fmt: skip
    texts = [{"subject": "s.b", "data": "\u00e4\n"}, {"subject": "s.b", "data": ""}]
    yield Ask("POST", batch, 201, json={"messages": texts})
    yield Ask("POST", batch, 422, json={"messages": [*texts, {"subject": "s.b", "data": 1}]})
    yield Ask("POST", batch, 400, content=b"{", headers={"content-type": "application/json"})
    yield Ask("POST", batch, 415, content=b"{}", headers={"content-type": "text/plain"})
    yield Ask("POST", batch, 422, json={"messages": [{"data": "x"}]})
    yield Ask("POST", "/v1/streams/none/messages", 404, json={"messages": good})
    yield Ask("POST", f"{batch}?atomic=perhaps", 422, json={"messages": good})
    yield Ask("POST", batch, 413, content=b"x" * ((16 << 20) + 1), headers=_NDJSON)


def _reads() -> Iterator[Ask]:
    one = f"{S}/messages"
    yield Ask("GET", f"{one}/1", 200)
    yield Ask("HEAD", f"{one}/1", 200)
    yield Ask("GET", f"{one}/3?shard=0&consistency=any", 200)
    yield Ask("GET", f"{one}/1", 200, headers=_AS_JSON)
    yield Ask("GET", f"{one}/3/json", 200)
    yield Ask("GET", f"{one}/1?payload=base64", 200, headers=_AS_JSON)
    yield Ask("GET", f"{one}/99999", 404)
    yield Ask("GET", f"{one}/99999/json", 404)
    yield Ask("GET", f"{one}/x", 422)
    yield Ask("GET", f"{one}/x/json", 422)
    yield Ask("GET", f"{one}/1?consistency=some", 422)
    yield Ask("GET", f"{one}/1?shard=1", 422)
    yield Ask("GET", "/v1/streams/none/messages/1", 404)
    yield Ask("GET", f"{one}?limit=2", 200)
    yield Ask("GET", f"{one}?cursor=x", 422)
    yield Ask("GET", f"{one}?from_seq=3&subject=s.b&max_bytes=100&payload=base64", 200)
    yield Ask("GET", f"{one}?from_seq=99999", 200)
    yield Ask("GET", f"{one}?from_seq=99999&wait=1ms", 204)
    yield Ask("GET", f"{one}?consistency=any&limit=1", 200)
    yield Ask("HEAD", f"{one}?limit=1", 200)
    for query in (
        "limit=0", "from_seq=x", "cursor=bad", "wait=1h", "start_time=now", "subject=a..b",
    ):  # fmt: skip
        yield Ask("GET", f"{one}?{query}", 422)
    yield Ask("GET", one, 406, headers={"accept": "image/png"})
    yield Ask("GET", f"{one}?from_seq=2", 200, headers=_AS_EVENTS, events=2)
    yield Ask("GET", one, 200, headers={**_AS_EVENTS, "last-event-id": "4"}, events=1)
    yield Ask("GET", one, 422, headers={**_AS_EVENTS, "last-event-id": "x"})
    many = f"{one}/get"
    yield Ask("POST", many, 200, json={"seqs": [3, 99999, 1]})
    yield Ask("POST", f"{many}?payload=base64", 200, json={"subjects": ["s.b", "s.none"]})
    yield Ask("POST", f"{many}?consistency=any", 200, json={"seqs": [1]}, headers=_AS_MSGPACK)
    yield Ask("POST", many, 422, json={"seqs": []})
    yield Ask("POST", many, 406, json={"seqs": [1]}, headers={"accept": "image/png"})
    yield Ask("POST", "/v1/streams/none/messages/get", 404, json={"seqs": [1]})
    for path, query, bad in (
        ("last", "?subject=s.a", "?subject=a..b"), ("last", "?subject=s.*&limit=2", "?limit=0"),
        ("last", "?up_to_seq=3", "?up_to_time=now"), ("subjects", "?filter=s.*", "?limit=x"),
        ("deleted", "?limit=3", "?limit=0"), ("replay/plan", "?splits=1&to_seq=5", "?splits=0"),
    ):  # fmt: skip
        yield Ask("GET", f"{S}/{path}{query}", 200)
        yield Ask("GET", f"{S}/{path}{bad}", 422)
        yield Ask("GET", f"/v1/streams/none/{path}{query}", 404)
    yield Ask("GET", f"{S}/subjects?limit=1", 200, keep={"page": ("next_page_token",)})
    yield Ask("GET", f"{S}/subjects?limit=1&page_token={{page}}", 200)
    for accept in (_AS_NDJSON, _AS_MSGPACK, {"accept": _ARROW}, {}):
        yield Ask("GET", f"{S}/replay?from_seq=2&to_seq=9", 200, headers=accept)
    yield Ask("GET", f"{S}/replay?subject=s.b&columns=seq,data", 200)
    yield Ask("GET", f"{S}/replay?schema=only", 422)
    yield Ask("GET", f"{S}/replay", 406, headers={"accept": "image/png"})
    yield Ask("GET", f"{S}/replay?incarnation=1", 409)
    yield Ask("GET", "/v1/streams/none/replay", 404)


def _deliveries() -> Iterator[Ask]:
    yield Ask("PUT", C, 201, json={"ack_wait": "1h"}, keep_headers={"etag": "etag"})
    yield Ask("PUT", C, 200, json={"ack_wait": "1h"})
    yield Ask("PUT", C, 412, json={}, headers={"if-none-match": "*"})
    yield Ask("PUT", C, 422, json={"deliver_policy": "by_start_time"})
    yield Ask("PUT", "/v1/streams/none/consumers/c", 404, json={})
    yield Ask("POST", f"{S}/consumers", 201, json={"name": "d", "inactive_threshold": "1h"})
    lasting = {"inactive_threshold": "1h"}
    yield Ask("POST", f"{S}/consumers", 201, json=lasting, keep={"ephemeral": ("name",)})
    yield Ask("GET", f"{S}/consumers/{{ephemeral}}", 200)
    yield Ask("POST", f"{S}/consumers", 409, json={"name": "d", "max_deliver": 3})
    yield Ask("POST", f"{S}/consumers", 422, json={"max_waiting": -1})
    yield Ask("POST", "/v1/streams/none/consumers", 404, json={})
    yield Ask("PATCH", C, 200, json={"description": "d"}, headers=_MERGE_PATCH)
    yield Ask("PATCH", C, 412, json={}, headers={**_MERGE_PATCH, "if-match": "{etag}"})
    yield Ask("PATCH", f"{S}/consumers/none", 404, json={}, headers=_MERGE_PATCH)
    yield Ask("DELETE", f"{S}/consumers/{{ephemeral}}", 204)
    yield Ask("GET", C, 200)
    yield Ask("GET", f"{S}/consumers/none", 404)
    yield Ask("GET", f"{S}/consumers?limit=1", 200, keep={"page": ("next_page_token",)})
    yield Ask("GET", f"{S}/consumers?limit=1&page_token={{page}}", 200)
    yield Ask("GET", f"{S}/consumers?limit=0", 422)
    pull, ack = f"{C}/next", f"{C}/ack"
    yield Ask("POST", pull, 200, keep={"first": ("messages", 0, "ack_token")})
    tokens = {name: ("messages", at, "ack_token") for at, name in enumerate(("a", "b", "c", "d"))}
    yield Ask("POST", pull, 200, json={"batch": 5, "no_wait": True}, keep=tokens)
    yield Ask("POST", f"{pull}?payload=base64", 200, json={"batch": 1})
    yield Ask("POST", pull, 200, json={"batch": 1}, headers=_AS_MSGPACK)
    yield Ask("POST", pull, 422, json={"batch": 0})
    yield Ask("POST", pull, 422, json={"expires": "1h"})
    yield Ask("POST", pull, 400, content=b"{", headers={"content-type": "application/json"})
    yield Ask("POST", pull, 415, content=b"{}", headers={"content-type": "text/plain"})
    yield Ask("POST", pull, 406, json={}, headers={"accept": "image/png"})
    yield Ask("POST", f"{S}/consumers/none/next", 404, json={})
    yield Ask("POST", f"{S}/consumers/d/next", 200, json={"batch": 1000, "no_wait": True})
    yield Ask("POST", f"{S}/consumers/d/next", 204, json={"expires": "1ms"})
    acks = [
        {"token": "{a}"}, {"token": "{b}", "kind": "nak", "delay": "1h"},
        {"token": "{c}", "kind": "term"}, {"token": "{d}", "kind": "in_progress"}, {"token": "bad"},
    ]  # fmt: skip
    yield Ask("POST", ack, 200, json={"acks": acks, "sync": True})
    yield Ask("POST", ack, 200, json={"acks": [{"token": "{a}"}], "sync": True})
    yield Ask("POST", ack, 200, json={"acks": [{"token": "{first}"}]})
    yield Ask("POST", ack, 422, json={"acks": [{"token": "{a}", "kind": "maybe"}]})
    yield Ask("POST", ack, 200, json={"acks": []})
    yield Ask("POST", ack, 400, content=b"{", headers={"content-type": "application/json"})
    yield Ask("POST", ack, 415, content=b"{}", headers={"content-type": "text/plain"})
    yield Ask("POST", f"{S}/consumers/none/ack", 404, json={"acks": [{"token": "{a}"}]})


def _sharded() -> Iterator[Ask]:
    sharded = "/v1/streams/H"
    config = {"subjects": ["h.*"], "shards": 3, "shard_by": [2]}
    yield Ask("PUT", sharded, 201, json=config)
    yield Ask("PUT", sharded, 409, json={**config, "shards": 2})
    for key in range(6):
        yield Ask("POST", f"/v1/subjects/h.{key}/messages", 201, content=b"x")
    batch = [{"subject": f"h.{key}", "data": "y"} for key in range(6)]
    yield Ask("POST", f"{sharded}/messages", 201, json={"messages": batch})
    yield Ask("GET", sharded, 200)
    yield Ask("GET", f"{sharded}/messages?limit=5", 200, keep={"cursor": ("cursor",)})
    yield Ask("GET", f"{sharded}/messages?limit=5&cursor={{cursor}}", 200)
    yield Ask("GET", f"{sharded}/messages?shard=2", 200)
    yield Ask("GET", f"{sharded}/messages/1?shard=1", 200)
    yield Ask("GET", f"{sharded}/messages/1", 422)
    yield Ask("GET", f"{sharded}/last?subject=h.*", 200)
    yield Ask("GET", f"{sharded}/subjects", 200)
    yield Ask("GET", f"{sharded}/replay?shard=1", 200)
    yield Ask("GET", f"{sharded}/replay/plan?splits=3", 200)
    yield Ask("PUT", f"{sharded}/consumers/c", 201, json={})
    pulled = {"h": ("messages", 0, "ack_token")}
    yield Ask("POST", f"{sharded}/consumers/c/next", 200, json={"batch": 99}, keep=pulled)
    yield Ask("POST", f"{sharded}/consumers/c/ack", 200, json={"acks": [{"token": "{h}"}]})
    yield Ask("POST", f"{sharded}/purge", 200)
    yield Ask("DELETE", sharded, 204)


def _endings() -> Iterator[Ask]:
    yield Ask("DELETE", f"{S}/messages/2", 204)
    yield Ask("DELETE", f"{S}/messages/2", 404)
    yield Ask("DELETE", f"{S}/messages/x", 422)
    yield Ask("GET", f"{S}/deleted", 200)
    yield Ask("GET", f"{S}/snapshot", 200, keep_body="archive")
    yield Ask("GET", f"{S}/snapshot?consumers=perhaps", 422)
    yield Ask("GET", "/v1/streams/none/snapshot", 404)
    yield Ask("POST", f"{S}/erase?wait=60s", 200, json={"seqs": [3, 5]}, keep={"receipt": ("id",)})
    yield Ask("POST", f"{S}/erase", 422, json={"seqs": [0]})
    yield Ask("POST", f"{S}/erase", 404, json={"seqs": [99999]})
    yield Ask("GET", "/v1/erasures/{receipt}", 200)
    yield Ask("GET", "/v1/erasures/none", 404)
    yield Ask("GET", "/v1/erasures/none?wait=61s", 422)
    yield Ask("POST", f"{S}/purge", 200, json={"subject": "s.b", "keep": 1})
    yield Ask("POST", f"{S}/purge", 422, json={"keep": 1, "up_to_seq": 2})
    yield Ask("POST", "/v1/streams/none/purge", 404)
    yield Ask("POST", f"{S}/leader/stepdown", 409)
    yield Ask("POST", f"{S}/leader/stepdown", 422, json={"preferred": 7})
    yield Ask("POST", "/v1/streams/none/leader/stepdown", 404, json={"preferred": "n2"})
    yield Ask("POST", f"{S}/seal", 412, headers={"if-match": '"other"'})
    yield Ask("POST", f"{S}/seal", 200)
    yield Ask("POST", f"{S}/seal", 200)
    yield Ask("POST", X, 409, content=b"x")
    yield Ask("POST", f"{S}/purge", 409)
    yield Ask("DELETE", f"{S}/messages/1", 409)
    yield Ask("DELETE", C, 412, headers={"if-match": '"other"'})
    yield Ask("DELETE", C, 204)
    yield Ask("DELETE", C, 404)
    yield Ask("PUT", f"{S}/restore", 409, content=b"{archive}", headers=_ARCHIVE)
    yield Ask("DELETE", S, 412, headers={"if-match": '"other"'})
    yield Ask("DELETE", S, 204)
    yield Ask("DELETE", S, 404)
    yield Ask("PUT", f"{S}/restore", 422, content=b"no archive", headers=_ARCHIVE)
    yield Ask(
        "PUT", f"{S}/restore", 415, content=b"{archive}", headers={"content-type": "text/plain"}
    )
    yield Ask("PUT", f"{S}/restore", 201, content=b"{archive}", headers=_ARCHIVE)
    yield Ask("GET", f"{S}/messages?limit=3", 200)
    yield Ask("GET", "/v1/events?stream=S", 200, headers=_AS_EVENTS)
    yield Ask("GET", "/v1/events?types=none", 422, headers=_AS_EVENTS)
    yield Ask("GET", "/v1/events", 406, headers=_AS_JSON)


def conversation() -> list[Ask]:
    """Every request, in order. They suppose a server without streams."""
    parts = (_probes, _streams, _publishes, _batches, _reads, _deliveries, _sharded, _endings)
    return [ask for part in parts for ask in part()]


# Asking ------------------------------------------------------------------------------------------
class Conversation:
    """Sends requests to one server and reduces its answers.

    Without ``strict``, any status will do, and what an answer lacks is not kept.
    """

    def __init__(
        self,
        client: httpx.Client,
        headers: Mapping[str, str] = DEFAULT_HEADERS,
        strict: bool = True,
    ) -> None:
        self._client = client
        self._headers_sent = headers
        self._strict = strict
        self._kept: dict[str, str] = {}
        self._bodies: dict[str, bytes] = {}

    def ask(self, ask: Ask) -> Answer:
        """Send one request; fails if its status is not the expected one."""
        request = self._request(ask)
        answer = self._client.send(request, stream=True)
        try:
            if ask.events or answer.headers.get("content-type") == "text/event-stream":
                content = first_events(answer, ask.events)
            else:
                content = answer.read()
        finally:
            answer.close()
        expected = answer.status_code == ask.status or not self._strict
        assert expected, f"{ask}: {answer.status_code} {content[:2000]!r}"
        lacking = () if self._strict else (LookupError, ValueError)
        with contextlib.suppress(*lacking):
            self._keep(ask, answer, content)
        return reduced(str(ask), answer, content, self._named)

    def lose(self, ask: Ask) -> tuple[int, str]:
        """Send a request whose answer will be a problem; answers its status and name."""
        answer = self._client.send(self._request(ask))
        return answer.status_code, answer.json()["name"]

    def _request(self, ask: Ask) -> httpx.Request:
        content: Any = ask.content
        headers = {"accept": "*/*", **self._headers_sent}
        headers.update({name: self._filled(value) for name, value in ask.headers.items()})
        if ask.json is not None:
            content = self._filled(json.dumps(ask.json)).encode()
            headers.setdefault("content-type", "application/json")
        elif content == b"{archive}":
            content = self._bodies["archive"]
        elif isinstance(content, list):
            content = iter(content)
        request = self._client.build_request(ask.method, "/", content=content, headers=headers)
        # httpx would repair what is meant to be broken.
        request.url = request.url.copy_with(raw_path=self._filled(ask.path).encode())
        return request

    def _filled(self, text: str) -> str:
        for name, value in self._kept.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    def _keep(self, ask: Ask, answer: httpx.Response, content: bytes) -> None:
        for name, path in ask.keep.items():
            value = json.loads(content)
            for step in path:
                value = value[step]
            self._kept[name] = str(value)
        for name, header in ask.keep_headers.items():
            self._kept[name] = answer.headers[header]
        if ask.keep_body:
            self._bodies[ask.keep_body] = content

    def _named(self, text: str) -> str:
        for name, value in self._kept.items():
            text = text.replace(value, f"<{name}>")
        return _VERSION.sub(self._named_version, text)

    def _named_version(self, found: re.Match[str]) -> str:
        """A version is the index of a log entry; what it must be is what an ETag said."""
        return "the version is <kept>" if f'"{found[1]}"' in self._kept.values() else found[0]


def first_events(answer: httpx.Response, count: int) -> bytes:
    """The head of the events, and as many more as `count`."""
    content = b""
    for piece in answer.iter_raw():
        content += piece
        if content.count(b"\n\n") > count:
            break
    return b"\n\n".join(content.split(b"\n\n")[: count + 1])


def answers(client: httpx.Client, asks: Iterable[Ask] | None = None) -> list[Answer]:
    """The answers to the conversation."""
    conversing = Conversation(client)
    return [conversing.ask(ask) for ask in (conversation() if asks is None else asks)]

"""The steps of the benchmark of one large node: what they ask, and what they report."""

import json
from pathlib import Path

import msgspec
import pytest

from tests.bench.figures import BenchError
from tests.bench.scale import Sizes, Stall, Step, longest_stall
from tests.bench.scale_scripts import Calls, PullEach, PullOnce, put_consumer

NO_CONTENT = b"HTTP/1.1 204 No Content\r\ndate: now\r\n\r\n"


def answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def line(event: str, seconds: float, *doing: str) -> str:
    return json.dumps({"event": event, "seconds": seconds, "doing": doing}) + "\n"


def test_longest_stall_of_a_step_is_named_by_own_code(tmp_path: Path) -> None:
    log = tmp_path / "log"
    before = line("loop_stalled", 9.0)
    log.write_text(
        before
        + line("loop_stalled", 0.05, "contrail_a.b:f:1")
        + line("checkpoint", 7.0)
        + line("loop_stalled", 0.3, "numpy.core:where:4", "contrail_storage.core.x:Y.z:5")
    )
    assert longest_stall(log, len(before)) == Stall(0.3, "x.Y.z")
    assert longest_stall(log, log.stat().st_size) is None


def test_step_is_reported_for_each_object() -> None:
    step = Step("create streams", 200, 4.0, 0.5, 2_000_000, Stall(0.05, "x.f"))
    assert step.cells() == (
        "create streams", "200", "4 s, 50/s", "2,500 µs each", "10,000 B each", "50 ms, `x.f`", "",
    )  # fmt: skip


def test_sizes_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(BenchError, match="subjects"):
        Sizes(subjects=100_001)
    with pytest.raises(BenchError, match="sockets"):
        Sizes(sockets=0)


def test_call_without_content_is_complete_and_an_error_is_none() -> None:
    calls = Calls(iter([put_consumer(9, 12)]))
    request = calls.request(b"")
    assert request is not None
    assert request.startswith(b"PUT /v1/streams/S3/consumers/c1 HTTP/1.1\r\n")
    assert calls.complete(NO_CONTENT)
    assert not calls.complete(NO_CONTENT[:-1])
    with pytest.raises(BenchError, match="404"):
        calls.complete(NO_CONTENT.replace(b"204", b"404"))


def test_each_consumer_is_pulled_and_acknowledged_once() -> None:
    script = PullEach(2, range(1, 3))()[0]
    assert isinstance(script, PullOnce)
    pulled = answer(msgspec.msgpack.encode({"messages": [{"seq": 1, "ack_token": "t"}]}))
    acknowledged = answer(b'{"results": [{"ok": true}]}')
    sent = [script.request(b"")]
    for one in (pulled, acknowledged, pulled, acknowledged):
        assert script.complete(one)
        sent.append(script.request(one))
    paths = [request.split(b" ")[1] for request in sent if request]
    first, second = b"/v1/streams/S1/consumers/c0", b"/v1/streams/S0/consumers/c1"
    assert paths == [first + b"/next", first + b"/ack", second + b"/next", second + b"/ack"]
    assert script.messages == 2

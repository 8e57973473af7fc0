"""The benchmarks must not take errors, losses or halves of answers for figures."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from tests.bench.cases import CASES, with_references
from tests.bench.figures import Bench, BenchError, Beside, Case, Measured, Run, Scale
from tests.bench.http_scripts import (
    MARKER,
    PAYLOAD_BYTES,
    Batches,
    Pulling,
    Share,
    body_start,
    payloads,
)
from tests.bench.patience import repeat
from tests.bench.report import Report, now, write_into

STORED = b"HTTP/1.1 201 Created\r\ncontent-type: text/x\r\ncontent-length: 4\r\n\r\n{  }"


def pulled(tokens: list[str], ok: list[bool]) -> bytes:
    answer = {
        "messages": [{"seq": n, "ack_token": token} for n, token in enumerate(tokens)],
        "ack_results": [{"ok": each} for each in ok],
    }
    return http_answer(msgspec.msgpack.encode(answer))


def http_answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def test_answer_is_complete_only_with_its_last_byte() -> None:
    ends = [end for end in range(len(STORED) + 1) if body_start(STORED[:end], (b"201",))]
    assert ends == [len(STORED)]


def test_answer_with_another_status_is_an_error() -> None:
    with pytest.raises(BenchError, match="207"):
        body_start(STORED.replace(b"201", b"207"), (b"201",))


def test_answer_without_length_is_an_error() -> None:
    with pytest.raises(BenchError, match="length"):
        body_start(b"HTTP/1.1 201 Created\r\n\r\n", (b"201",))


def test_publishing_counts_only_what_was_answered() -> None:
    first, second = Batches("S", "s", size=1_000, connections=2, count=3)()
    assert first.request(b"")
    assert second.request(b"")
    assert first.request(STORED)
    assert second.request(STORED) is None
    assert (first.messages, second.messages) == (1_000, 1_000)


def test_ids_of_batches_are_used_once() -> None:
    [script] = Batches("S", "s", size=1_000, connections=1, count=2, ids=True)()
    sent = []
    while (request := script.request(STORED)) is not None:
        sent += msgspec.msgpack.decode(request[request.index(b"\r\n\r\n") + 4 :])[1]
    ids = {headers["Nats-Msg-Id"][0] for _, headers, _ in sent}
    assert len(ids) == len(sent) == 2_000


def test_pulling_acknowledges_each_batch_once_and_ends_when_all_are_confirmed() -> None:
    script = Pulling("/c", batch=2, share=Share(3))
    assert b'"acks":[]' in (script.request(b"") or b"")
    assert b'{"token":"b","kind":"ack"}' in (script.request(pulled(["a", "b"], [])) or b"")
    last = script.request(pulled(["c"], [True, True])) or b""
    assert last.startswith(b"POST /c/ack ")
    assert script.request(http_answer(b'{"results":[{"ok":true}]}')) is None
    assert script.messages == 3


def test_short_pull_gives_back_what_it_did_not_get() -> None:
    script = Pulling("/c", batch=2, share=Share(2))
    script.request(b"")
    assert b'"batch":1' in (script.request(pulled(["a"], [])) or b"")


@pytest.mark.parametrize("results", [[False], []])
def test_refused_or_missing_ack_is_an_error(results: list[bool]) -> None:
    script = Pulling("/c", batch=1, share=Share(2))
    script.request(b"")
    script.request(pulled(["a"], []))
    with pytest.raises(BenchError, match="acks"):
        script.request(pulled(["b"], results))


def test_marker_stands_once_in_each_payload() -> None:
    made = payloads()
    assert {len(payload) for payload in made} == {PAYLOAD_BYTES}
    assert b"".join(made).count(MARKER) == len(made)


def test_references_are_measured_before_what_they_stand_beside() -> None:
    order = with_references(["single-1"])
    assert order[-1] == "single-1"
    assert set(order[:-1]) == {beside.reference for beside in CASES["single-1"].beside}


def test_every_reference_is_a_case() -> None:
    assert {b.reference for case in CASES.values() for b in case.beside} <= set(CASES)


@pytest.mark.parametrize(
    ("smaller_is_better", "value", "met"),
    [(False, 9.0, False), (False, 10.0, True), (True, 11.0, False), (True, 10.0, True)],
)
def test_aim_is_judged_by_the_median(smaller_is_better: bool, value: float, met: bool) -> None:
    case = Case("x", "x", "s", lambda _: None, 10.0, smaller_is_better)
    measured = Measured((Run(0.0), Run(value), Run(100.0)))
    assert case.meets_aim(measured) is met


def test_report_names_ratio_missed_aim_and_missing_peer(tmp_path: Path) -> None:
    beside = (Beside("limit", 64, "the limit"), Beside("peer", 1, "a peer"))
    cases = {
        "limit": Case("limit", "limit", "/s", lambda _: None),
        "peer": Case("peer", "peer", "/s", lambda _: None),
        "case": Case("case", "case", "/s", lambda _: None, aim=200, beside=beside),
    }
    results = {
        "limit": Measured((Run(10.0),)),
        "peer": None,
        "case": Measured((Run(160.0, other_cores=1.0),)),
    }
    document = tmp_path / "benchmarks.md"
    document.write_text(
        "# T\n\n<!-- figures: written by python -m tests.bench -->\nold\n"
        "<!-- end of figures -->\n\nrest\n"
    )
    write_into(document, Report(cases, results, "command", now()).document())
    text = document.read_text()
    assert "| peer | not installed |" in text
    assert "200: **missed**" in text
    assert "0.25 x the limit (640)" in text
    assert "disturbed" in text
    assert "old" not in text
    assert text.endswith("rest\n")


def test_disturbed_runs_are_repeated_while_patience_lasts() -> None:
    others = iter([1.0, 0.0, 2.0, 0.1])
    bench = SimpleNamespace(
        scale=Scale(runs=2, seconds=0, messages=0),
        patience=SimpleNamespace(left_s=1.0, wait_for_quiet=lambda: None),
    )
    runs = repeat(cast(Bench, bench), lambda number: Run(number, other_cores=next(others)))
    assert [run.value for run in runs] == [1, 3]


def test_disturbed_runs_count_when_no_patience_is_left() -> None:
    bench = SimpleNamespace(
        scale=Scale(runs=2, seconds=0, messages=0),
        patience=SimpleNamespace(left_s=0.0, wait_for_quiet=lambda: None),
    )
    runs = repeat(cast(Bench, bench), lambda number: Run(number, other_cores=1.0))
    assert [run.value for run in runs] == [0, 1]

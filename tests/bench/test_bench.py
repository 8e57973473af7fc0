"""The benchmarks must not report figures for errors, losses or partial answers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.bench.cases import CASES, with_references
from tests.bench.figures import Bench, BenchError, Beside, Case, Measured, Run, Scale
from tests.bench.http_scripts import (
    MARKER,
    PAYLOAD_BYTES,
    Batches,
    DistinctSubjects,
    Pulling,
    Share,
    body_start,
    payloads,
)
from tests.bench.load import Script
from tests.bench.lookup_scripts import LastLookups, SequenceLookups, ShuffledSubjects
from tests.bench.patience import repeat
from tests.bench.peer_nats_lookup import Gets
from tests.bench.report import Report, now, write_into
from tests.bench.turns import measured_in_turns

STORED = b"HTTP/1.1 201 Created\r\ncontent-type: text/x\r\ncontent-length: 4\r\n\r\n{  }"


def pulled(tokens: list[str], ok: list[bool]) -> bytes:
    answer = {
        "messages": [{"seq": n, "ack_token": token} for n, token in enumerate(tokens)],
        "ack_results": [{"ok": each} for each in ok],
    }
    return http_answer(msgspec.msgpack.encode(answer))


def http_answer(body: bytes, headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (headers, len(body), body)


def sent_items(script: Script) -> list[tuple[str, dict[str, list[str]] | None, bytes]]:
    items = []
    while (request := script.request(STORED)) is not None:
        items += msgspec.msgpack.decode(request[request.index(b"\r\n\r\n") + 4 :])[1]
    return items


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
    sent = sent_items(script)
    ids = {(headers or {})["Nats-Msg-Id"][0] for _, headers, _ in sent}
    assert len(ids) == len(sent) == 2_000


def test_pulling_acknowledges_each_batch_once_and_ends_when_all_are_confirmed() -> None:
    script = Pulling("/c", batch=2, share=Share(3))
    assert b'"acks":[]' in (script.request(b"") or b"")
    assert b'{"token":"b","kind":"ack"}' in (script.request(pulled(["a", "b"], [])) or b"")
    last = script.request(pulled(["c"], [True, True])) or b""
    assert last.startswith(b"POST /c/ack ")
    assert script.request(http_answer(b'{"results":[{"ok":true}]}')) is None
    assert script.messages == 3


def test_pulling_in_columns_acknowledges_all_of_a_batch_with_one_token() -> None:
    script = Pulling("/c", batch=2, share=Share(2), columns=True)
    assert b"form=columns" in (script.request(b"") or b"")
    answer = msgspec.msgpack.encode({"cols": {"count": 2}, "ack_token": "t"})
    assert b'"acks":[{"token":"t","kind":"ack"}]' in (script.request(http_answer(answer)) or b"")
    assert script.request(http_answer(b'{"results":[{"ok":true}]}')) is None
    assert script.messages == 2


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


def test_last_message_is_accepted_only_with_its_subject_and_payload_and_alone() -> None:
    [distinct] = DistinctSubjects("S", "s", count=1, connections=1)()
    published = {subject: payload for subject, _, payload in sent_items(distinct)}
    [script] = LastLookups("S", "s", batches=1, connections=1)()
    subject = asked_path(script.request(b"")).partition("?subject=")[2]
    good = b'{"subject":"%b","data":"%b"}' % (subject.encode(), published[subject])
    assert not script.complete(http_answer(good)[:-1])
    assert script.complete(http_answer(good))
    other = next(payload for name, payload in published.items() if name != subject)
    for wrong in (b"", good.replace(b"s.0", b"s.1"), good.replace(published[subject], other)):
        with pytest.raises(BenchError):
            script.complete(http_answer(wrong))
    with pytest.raises(BenchError):
        script.complete(http_answer(good + good))


def test_message_is_accepted_only_with_the_sequence_that_was_asked_for() -> None:
    [script] = SequenceLookups("S", messages=1_000, connections=1)()
    seq = int(asked_path(script.request(b"")).rpartition("/")[2])
    assert 1 <= seq <= 1_000
    assert script.complete(http_answer(MARKER, b"nats-sequence: %d\r\n" % seq))
    with pytest.raises(BenchError):
        script.complete(http_answer(MARKER, b"nats-sequence: %d\r\n" % (seq * 10)))


def test_direct_get_of_the_peer_is_accepted_only_whole_and_with_its_subject() -> None:
    [script] = Gets(batches=1, connections=1)()
    assert (script.request(b"") or b"").startswith(b"CONNECT")
    assert script.complete(b"PONG\r\n")
    subject = (script.request(b"PONG\r\n") or b"").split(b" ")[1].rpartition(b"GET.S.")[2]
    headers = b"NATS/1.0\r\nNats-Subject: %b\r\n\r\n"
    body = headers % subject + payloads()[int(subject.rpartition(b".")[2])]
    answer = b"HMSG in.0 1 0 %d\r\n%b\r\n" % (len(body), body)
    assert not script.complete(answer[:-1])
    assert script.complete(answer)
    with pytest.raises(BenchError, match="another"):
        script.complete(answer.replace(subject, b"x" * len(subject)))
    assert script.request(answer)
    assert script.messages == 1


def asked_path(request: bytes | None) -> str:
    return (request or b"").split(b" ")[1].decode()


def test_shuffled_subjects_have_one_percent_in_each_group_of_any_ten_batches() -> None:
    [script] = ShuffledSubjects("S", "s", count=20, connections=1)()
    subjects = [subject for subject, _, _ in sent_items(script)]
    assert len(set(subjects)) == 10_000
    assert sum(subject.startswith("s.7.") for subject in subjects[5_000:15_000]) == 100


@pytest.mark.parametrize("size", [PAYLOAD_BYTES, 1_024])
def test_marker_stands_once_in_each_payload(size: int) -> None:
    made = payloads(size=size)
    assert {len(payload) for payload in made} == {size}
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


@pytest.mark.parametrize(
    ("smaller_is_better", "value", "verdict"),
    [
        (False, 80.0, "0.8: met"),
        (False, 79.0, "0.8: **missed**"),
        (True, 80.0, "0.8: met"),
        (True, 81.0, "0.8: **missed**"),
    ],
)
def test_ratio_that_is_aimed_for_is_judged_beside_its_reference(
    smaller_is_better: bool, value: float, verdict: str
) -> None:
    beside = (Beside("other", 1, "the other", aim=0.8),)
    cases = {
        "other": Case("other", "other", "/s", lambda _: None),
        "case": Case("case", "case", "/s", lambda _: None, None, smaller_is_better, beside),
    }
    results = {"other": Measured((Run(100.0),)), "case": Measured((Run(value),))}
    report = Report(cases, results, "command", now())
    assert f"| the other (100) | {verdict} |" in report.document()
    assert "aim " + verdict.replace("**missed**", "MISSED") in report.line("case")
    [figure] = [one for one in json.loads(report.as_json())["figures"] if one["name"] == "case"]
    assert figure["beside"][0]["met"] is ("**" not in verdict)


def test_reference_in_turns_is_compared_run_by_run() -> None:
    """The machine gets half as fast after the first turn, and the ratio stays as it is."""
    speeds = iter([1.0, 0.5, 0.5])
    speed = 0.0

    def reference(bench: Bench) -> Measured:
        nonlocal speed
        speed = next(speeds)
        return Measured((Run(100 * speed, server_us=10 / speed),) * bench.scale.runs)

    beside = (Beside("other", 1, "the other", aim=0.8, in_turns=True),)
    cases = {
        "other": Case("other", "other", "/s", reference),
        "case": Case(
            "case",
            "case",
            "/s",
            lambda _: Measured((Run(80 * speed, server_us=15 / speed),)),
            beside=beside,
        ),
    }
    bench = Bench(Path(), cast(Any, None), Scale(3, 0, 0, 0), cast(Any, None))
    found = measured_in_turns(cases["case"], cases, bench)
    assert found is not None
    results = {"other": Measured((Run(1_000.0),)), "case": found}
    [line] = Report(cases, results, "command", now()).line("case").splitlines()[1:]
    assert line.strip() == "0.80 x the other (50, in turns; CPU 1.50 x); aim 0.8: met"


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
    assert "| case | 0.25 | the limit (640) |" in text
    assert "disturbed" in text
    assert "old" not in text
    assert text.endswith("rest\n")


def test_disturbed_runs_are_repeated_while_patience_lasts() -> None:
    others = iter([1.0, 0.0, 2.0, 0.1])
    bench = SimpleNamespace(
        scale=Scale(runs=2, seconds=0, messages=0, held_s=0),
        patience=SimpleNamespace(left_s=1.0, wait_for_quiet=lambda: None),
    )
    runs = repeat(cast(Bench, bench), lambda number: Run(number, other_cores=next(others)))
    assert [run.value for run in runs] == [1, 3]


def test_disturbed_runs_count_when_no_patience_is_left() -> None:
    bench = SimpleNamespace(
        scale=Scale(runs=2, seconds=0, messages=0, held_s=0),
        patience=SimpleNamespace(left_s=0.0, wait_for_quiet=lambda: None),
    )
    runs = repeat(cast(Bench, bench), lambda number: Run(number, other_cores=1.0))
    assert [run.value for run in runs] == [0, 1]

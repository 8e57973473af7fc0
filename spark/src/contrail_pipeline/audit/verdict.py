"""Puts together what the tasks of an audit have read, and what the server says. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from contrail_client.models import StreamState
from contrail_pipeline.audit.checks import RangeReport, Runs
from contrail_pipeline.audit.digest import combined
from contrail_pipeline.audit.findings import Finding, Findings, common, without


@dataclass(frozen=True, slots=True)
class ServerView:
    """What the server says of each shard: its state, and the runs of deleted sequences."""

    states: Mapping[int, StreamState]
    deleted: Mapping[int, Runs]


@dataclass(slots=True)
class ShardResult:
    """What the audit has found in a shard.

    ``removed`` are messages that were removed while it ran. ``compared`` is false if the shard
    changed meanwhile, so that its number of messages and bytes could not be compared.
    """

    shard: int
    from_seq: int
    to_seq: int
    messages: int = 0
    bytes: int = 0
    ids: int = 0
    deleted: int = 0
    removed: int = 0
    first_time: int | None = None
    last_time: int | None = None
    compared: bool = False
    sha256: str = ""
    findings: list[Finding] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "shard": self.shard,
            "from_seq": self.from_seq,
            "to_seq": self.to_seq,
            "messages": self.messages,
            "bytes": self.bytes,
            "message_ids": self.ids,
            "deleted": self.deleted,
            "removed_meanwhile": self.removed,
            "counts_compared": self.compared,
            "first_time": moment(self.first_time),
            "last_time": moment(self.last_time),
            "sha256": self.sha256,
        }


def moment(time_us: int | None) -> str | None:
    """A time in RFC 3339."""
    if time_us is None:
        return None
    seconds, micros = divmod(time_us, 1_000_000)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{micros:06}Z"


def judge(
    shard: int, reports: Sequence[RangeReport], before: ServerView, after: ServerView
) -> ShardResult:
    """The result of a shard: its ranges are ascending and follow each other."""
    result = ShardResult(shard, reports[0].from_seq, reports[-1].to_seq)
    findings = Findings("stream", shard)
    first_kept = after.states[shard].first_seq
    gaps: Runs = []
    for report in reports:
        result.messages += report.messages
        result.bytes += report.bytes
        result.ids += report.ids
        result.findings += report.findings
        gaps += report.gaps
        if report.messages:
            _check_border(result, report, findings)
    whole = [(result.from_seq, result.to_seq)]
    was = before.deleted[shard]
    for first, last in without(common(whole, was), gaps):
        findings.add("undeleted", "had been deleted, and is there again", first, last)
    result.deleted = _count(common(gaps, was))
    for first, last in without(without(gaps, was), after.deleted[shard]):
        kept = max(first, first_kept)
        result.removed += max(0, min(last, first_kept - 1) - first + 1)
        if kept <= last:
            text = "is missing: the server has it in its count of messages"
            findings.add("missing", text, kept, last)
    result.removed += _count(common(without(gaps, was), after.deleted[shard]))
    result.sha256 = combined(digest for report in reports for digest in report.digests)
    result.findings += findings.all()
    result.findings += state_findings(shard, after.states[shard])
    result.findings += _count_findings(result, before, after)
    return result


def state_findings(shard: int, state: StreamState) -> Iterator[Finding]:
    """What is wrong with the counts of the server themselves."""
    there = state.last_seq - state.first_seq + 1 - state.num_deleted
    if there != state.messages:
        yield Finding(
            "count",
            f"shard {shard}: the server counts {state.messages:,} messages, but its sequences "
            f"{state.first_seq}..{state.last_seq} with {state.num_deleted:,} deleted ones have "
            f"room for {there:,}",
            shard=shard,
        )


def _check_border(result: ShardResult, report: RangeReport, findings: Findings) -> None:
    last, first = result.last_time, report.first_time
    if last is not None and first is not None and first < last:
        text = f"has a time {last - first:,} µs before that of the message before it"
        findings.add("time", text, report.digests[0].from_seq)
    result.first_time = first if result.first_time is None else result.first_time
    result.last_time = report.last_time


def _count_findings(
    result: ShardResult, before: ServerView, after: ServerView
) -> Iterator[Finding]:
    shard = result.shard
    state = after.states[shard]
    known = (state.messages, state.bytes, state.first_seq, state.last_seq, state.num_deleted)
    was = before.states[shard]
    same = known == (was.messages, was.bytes, was.first_seq, was.last_seq, was.num_deleted)
    if not same or (state.first_seq, state.last_seq) != (result.from_seq, result.to_seq):
        return
    result.compared = True
    for name, found, told in (
        ("messages", result.messages, state.messages),
        ("bytes", result.bytes, state.bytes),
    ):
        if found != told:
            text = f"shard {shard}: {found:,} {name} were read, but the server counts {told:,}"
            yield Finding("count", text, shard=shard)


def _count(runs: Iterator[tuple[int, int]]) -> int:
    return sum(last - first + 1 for first, last in runs)

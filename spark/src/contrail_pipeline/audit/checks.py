"""The checks of one range of a shard, batch by batch. Pure."""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from contrail_pipeline.audit.digest import (
    ChunkDigest,
    ContentDigest,
    I64Array,
    ids,
    sizes,
)
from contrail_pipeline.audit.findings import Finding, Findings

Runs = list[tuple[int, int]]


@dataclass(slots=True)
class RangeReport:
    """What a range of a shard has; times are microseconds, None without messages.

    ``gaps`` are sequences without a message. ``ids`` is the number of messages with an id.
    ``error`` says why the range could not be read to its end.
    """

    shard: int
    from_seq: int
    to_seq: int
    messages: int = 0
    bytes: int = 0
    ids: int = 0
    first_time: int | None = None
    last_time: int | None = None
    gaps: Runs = field(default_factory=list)
    digests: list[ChunkDigest] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    error: str | None = None


class RangeCheck:
    """Checks messages as they come: order, gaps, times; and adds them up."""

    def __init__(self, shard: int, from_seq: int, to_seq: int, source: str = "stream") -> None:
        self._report = RangeReport(shard, from_seq, to_seq)
        self._findings = Findings(source, shard)
        self._digest = ContentDigest()
        self._next = from_seq

    def add(self, batch: pa.RecordBatch) -> None:
        """Check the next messages."""
        report = self._report
        seqs = batch.column("seq").to_numpy(zero_copy_only=False).astype(np.int64)
        self._check_order(seqs)
        self._check_times(seqs, batch.column("time").cast(pa.int64()).to_numpy())
        present = np.unique(seqs)
        present = present[present >= self._next]
        if len(present):
            self._gaps_before(present)
        report.messages += len(seqs)
        report.bytes += sizes(batch)
        report.ids += ids(batch)
        report.digests += self._digest.update(batch)

    def finish(self) -> RangeReport:
        """The report, after the last message."""
        report = self._report
        if self._next <= report.to_seq:
            report.gaps.append((self._next, report.to_seq))
        report.digests += self._digest.finish()
        report.findings += self._findings.all()
        return report

    def _check_order(self, seqs: I64Array) -> None:
        before = np.concatenate(([self._next - 1], seqs[:-1]))
        for at in np.flatnonzero(seqs <= before).tolist():
            seq, last = int(seqs[at]), int(before[at])
            if seq == last:
                self._findings.add("doubled", "comes twice", seq)
            else:
                self._findings.add("order", f"comes after sequence {last}", seq)
        outside = (seqs < self._report.from_seq) | (seqs > self._report.to_seq)
        for seq in seqs[outside].tolist():
            bounds = f"{self._report.from_seq}..{self._report.to_seq}"
            self._findings.add("outside", f"is not in the range {bounds} that was asked for", seq)

    def _check_times(self, seqs: I64Array, times: I64Array) -> None:
        last = self._report.last_time
        before = np.concatenate(([times[0] if last is None else last], times[:-1]))
        for at in np.flatnonzero(times < before).tolist():
            earlier = int(before[at] - times[at])
            text = f"has a time {earlier:,} µs before that of the message before it"
            self._findings.add("time", text, int(seqs[at]))
        if self._report.first_time is None:
            self._report.first_time = int(times[0])
        self._report.last_time = int(times[-1])

    def _gaps_before(self, present: I64Array) -> None:
        low = self._next
        starts = np.concatenate(([low], present[:-1] + 1))
        holes = np.flatnonzero(present > starts)
        self._report.gaps += zip(starts[holes].tolist(), (present[holes] - 1).tolist(), strict=True)
        self._next = int(present[-1]) + 1

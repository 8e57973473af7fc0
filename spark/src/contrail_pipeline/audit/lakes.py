"""Compares a lake with the stream that it was made from, and with its own manifest."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from contrail_pipeline.audit.checks import Runs
from contrail_pipeline.audit.digest import (
    CHUNK,
    COLUMNS,
    ChunkDigest,
    I64Array,
    digests,
    rows,
)
from contrail_pipeline.audit.findings import Finding, Findings, common, runs_of
from contrail_spark.errors import LakeError
from contrail_spark.lake.manifest import FileEntry, State
from contrail_spark.lake.store import Lake
from contrail_spark.schema import arrow_schema, spark_schema

RANGE_BYTES: Final = 32 << 20
"""About how large the files of one range are, which are read together."""
_SCHEMA: Final = arrow_schema(spark_schema(("shard", *COLUMNS)))

Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class LakeRange:
    """A range of a lake's shard, with the files that may have messages of it.

    ``lost`` had been removed from the stream before they were archived.
    """

    root: Path
    shard: int
    from_seq: int
    to_seq: int
    entries: tuple[FileEntry, ...]
    lost: tuple[tuple[int, int], ...]

    def read(self) -> pa.Table:
        """The messages in ascending sequence. Raises LakeError if a file cannot be read."""
        lake, entries = Lake.open(self.root), self.entries
        while True:
            try:
                return self._read(entries)
            except FileNotFoundError as error:
                # An erasure or a compaction may have replaced files meanwhile.
                state = lake.state()
                gone = [each.path for each in entries if not (self.root / each.path).exists()]
                if still := [path for path in gone if path in state.files]:
                    raise LakeError(f"{still[0]} is missing") from error
                entries = range_of(lake, state, self.shard, self.from_seq, self.to_seq).entries

    def _read(self, entries: tuple[FileEntry, ...]) -> pa.Table:
        bounds = [("seq", ">=", self.from_seq), ("seq", "<=", self.to_seq)]
        tables = [_SCHEMA.empty_table()]
        for entry in entries:
            path = self.root / entry.path
            try:
                # A folder such as date=2026-11-24 would become a column.
                found = pq.read_table(path, filters=bounds, partitioning=None)
                tables.append(found.select(_SCHEMA.names).cast(_SCHEMA))
            except FileNotFoundError:
                raise
            except (OSError, KeyError, ValueError, pa.ArrowException) as error:
                raise LakeError(f"{entry.path} cannot be read: {error}") from error
        return pa.concat_tables(tables).sort_by("seq").combine_chunks()

    def check(self) -> list[Finding]:
        """Check a range that the stream no longer has."""
        findings = Findings("lake", self.shard)
        try:
            self._once(self.read(), findings)
        except LakeError as error:
            return [Finding("lake_file", str(error), "lake", self.shard)]
        return findings.all()

    def compare(
        self, led: list[ChunkDigest], gaps: Runs, reread: Callable[[int, int], Batches]
    ) -> list[Finding]:
        """Compare a range with what the stream has of it: ``led``, and ``gaps`` between.

        Messages that were deleted from the stream since are only in the lake, which is right.
        """
        findings = Findings("lake", self.shard)
        try:
            table = self._once(self.read(), findings)
        except LakeError as error:
            return [Finding("lake_file", str(error), "lake", self.shard)]
        seqs = table.column("seq").to_numpy()
        table = table.filter(pa.array(~_within(seqs, gaps)))
        found = {one.chunk: one for one in digests(iter(table.to_batches()))}
        own = {one.chunk: one for one in led}
        differing = {one for one in own.keys() | found if own.get(one) != found.get(one)}
        for chunk in sorted(differing):
            low = max(self.from_seq, chunk * CHUNK)
            high = min(self.to_seq, (chunk + 1) * CHUNK - 1)
            self._narrow(table, reread(low, high), low, high, findings)
        return findings.all()

    def _once(self, table: pa.Table, findings: Findings) -> pa.Table:
        """Report messages that are there several times, and leave one of each."""
        seqs = table.column("seq").to_numpy()
        again = np.concatenate(([False], np.diff(seqs) == 0)) if len(seqs) else np.zeros(0, bool)
        for first, last in runs_of(np.unique(seqs[again])):
            findings.add("lake_doubled", "is in the lake more than once", first, last)
        other = np.unique(seqs[table.column("shard").to_numpy() != self.shard])
        for first, last in runs_of(other):
            findings.add("lake_changed", "has another shard in the lake", first, last)
        return table.filter(pa.array(~again))

    def _narrow(
        self, table: pa.Table, stream: Batches, low: int, high: int, findings: Findings
    ) -> None:
        seqs = table.column("seq")
        part = table.filter(pc.and_(pc.greater_equal(seqs, low), pc.less_equal(seqs, high)))
        archived = {seq: parts for batch in part.to_batches() for seq, parts in rows(batch)}
        missing = []
        for batch in stream:
            for seq, parts in rows(batch):
                there = archived.get(seq)
                if there is None:
                    missing.append(seq)
                elif there != parts:
                    names = " and ".join(name for name in parts if parts[name] != there[name])
                    text = f"has another {names} in the lake than in the stream"
                    findings.add("lake_changed", text, seq)
        for first, last in runs_of(np.array(missing, np.int64)):
            findings.add("lake_missing", "is in the stream, but not in the lake", first, last)


def _within(
    seqs: I64Array, runs: Iterable[tuple[int, int]]
) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Which of the sequences are in one of the runs, which ascend."""
    bounds = np.array(list(runs), np.int64).reshape(-1, 2)
    at = np.searchsorted(bounds[:, 0], seqs, side="right") - 1
    inside = at >= 0
    inside[inside] = seqs[inside] <= bounds[at[inside], 1]
    return inside


def verify(lake: Lake, entry: FileEntry) -> Finding | None:
    """Compare a file with its entry in the manifest: first its bytes, then what is in it."""
    problem = lake.verify(entry) or _content_problem(lake.root / entry.path, entry)
    if problem is None:
        return None
    return Finding("lake_file", problem, "lake", entry.shard, entry.from_seq, entry.to_seq)


def _content_problem(path: Path, entry: FileEntry) -> str | None:
    try:
        table = pq.read_table(path, columns=["shard", "seq", "time"], partitioning=None)
        table = table.cast(pa.schema([_SCHEMA.field(name) for name in table.schema.names]))
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        return f"{entry.path} cannot be read: {error}"
    if table.num_rows != entry.messages:
        return f"{entry.path} has {table.num_rows:,} messages instead of {entry.messages:,}"
    seqs = table.column("seq").to_numpy()
    times = table.column("time").cast(pa.int64()).to_numpy()
    if (seqs[0], seqs[-1]) != (entry.from_seq, entry.to_seq) or (np.diff(seqs) <= 0).any():
        return (
            f"{entry.path} does not have ascending sequences from {entry.from_seq} to "
            f"{entry.to_seq}"
        )
    if set(table.column("shard").unique().to_pylist()) != {entry.shard}:
        return f"{entry.path} has messages of other shards than {entry.shard}"
    if (times.min(), times.max()) != (entry.first_time_us, entry.last_time_us):
        return f"{entry.path} has other times than its manifest says"
    return None


def ranges(lake: Lake, state: State, shard: int, from_seq: int, to_seq: int) -> Iterator[LakeRange]:
    """Cut a range of a shard into parts of about ``RANGE_BYTES``."""
    entries = [
        one
        for one in state.live_files()
        if one.shard == shard and one.from_seq <= to_seq and one.to_seq >= from_seq
    ]
    low, size = from_seq, 0
    for entry in entries:
        size += entry.bytes
        if size >= RANGE_BYTES and low <= entry.to_seq < to_seq:
            yield range_of(lake, state, shard, low, entry.to_seq)
            low, size = entry.to_seq + 1, 0
    if low <= to_seq:
        yield range_of(lake, state, shard, low, to_seq)


def range_of(lake: Lake, state: State, shard: int, from_seq: int, to_seq: int) -> LakeRange:
    """A range of a shard with its files."""
    known = state.shards.get(shard)
    entries = tuple(
        one
        for one in state.live_files()
        if one.shard == shard and one.from_seq <= to_seq and one.to_seq >= from_seq
    )
    lost = () if known is None else known.lost
    return LakeRange(
        lake.root, shard, from_seq, to_seq, entries, tuple(common([(from_seq, to_seq)], list(lost)))
    )


def lost_ends(state: State, last_seqs: Mapping[int, int]) -> Iterator[Finding]:
    """Shards that end before their archive, which is of later sequences than the stream has."""
    for shard, known in sorted(state.shards.items()):
        last, archived = last_seqs.get(shard, 0), known.archived_through
        if last < archived:
            yield Finding(
                "lost_end",
                f"shard {shard} ends with sequence {last}, but the lake has it through {archived}: "
                "the server has lost the end of the stream",
                "stream", shard, last + 1, archived,
            )  # fmt: skip


def manifest_findings(state: State) -> Iterator[Finding]:
    """Sequences that the manifest has as lost, and in a file all the same."""
    for number, shard in sorted(state.shards.items()):
        files = sorted(
            (one.from_seq, one.to_seq) for one in state.files.values() if one.shard == number
        )
        for first, last in shard.lost:
            whole = [run for run in files if first <= run[0] and run[1] <= last]
            if whole:
                yield Finding(
                    "lake_manifest",
                    f"shard {number} sequences {first}..{last} are lost, and in files",
                    "lake", number, first, last,
                )  # fmt: skip

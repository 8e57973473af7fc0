"""Replay a part of a lake into a stream: what runs in a worker of Spark."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from contrail_common.model import EXPECTED_STREAM, MSG_ID, ROLLUP, TTL
from contrail_common.timeunits import NS_PER_US, format_time
from contrail_spark.bodies import BODY_BYTES_MAX, BODY_ROWS_MAX, Rows
from contrail_spark.errors import ContrailSparkError
from contrail_spark.lake.reader import LakeReader
from contrail_spark.lake.rows import sequences
from contrail_spark.lake.selection import Selection
from contrail_spark.lake.splits import LakeSplit
from contrail_spark.lake.store import Lake
from contrail_spark.layout import IdSource, Layout
from contrail_spark.options import WriteOptions
from contrail_spark.publisher import NumberedBatch, Publisher

BATCH_SEQUENCES: Final = 8_192
"""Sequences of a shard in a numbered batch. Another number would give messages other numbers."""

_COLUMNS: Final = ("shard", "seq", "time", "subject", "headers", "data")
_HEADERS: Final = pa.map_(pa.string(), pa.list_(pa.string()))
_ACTING: Final = (
    MSG_ID.lower(),
    ROLLUP.lower(),
    TTL.lower(),
    EXPECTED_STREAM.removesuffix("Stream").lower(),
)
"""Headers that begin so had an effect when they were published, and would have it again."""


@dataclass(frozen=True, slots=True)
class Target:
    """The stream to restore to, and what becomes of the messages.

    ``producer`` begins the names of the producers. ``prefix`` is put before each subject, and with
    ``origin`` headers say where a message is from.
    """

    options: WriteOptions
    producer: str
    prefix: str = ""
    origin: bool = False


@dataclass(frozen=True, slots=True)
class RestoreTask:
    """A split of the lake in ``root``, which begins and ends with numbered batches."""

    root: str
    wanted: Selection
    split: LakeSplit
    target: Target


@dataclass(frozen=True, slots=True)
class Outcome:
    """The messages that were sent, how many of them the stream had, and why the task failed."""

    messages: int = 0
    duplicates: int = 0
    problem: str | None = None


def number_of(seq: int) -> int:
    """The number of the batch of a message; the first is 1."""
    return (seq - 1) // BATCH_SEQUENCES + 1


def restore_part(task: RestoreTask) -> Outcome:
    """Publish the messages of a split, batch by batch and in their order."""
    messages = duplicates = 0
    try:
        lake = Lake.open(task.root)
        batches = LakeReader(lake, task.wanted).read(task.split, _COLUMNS)
        for number, found in numbered(batches):
            messages += sum(each.num_rows for each in found)
            duplicates += _publish(lake.info.stream, task, number, found)
    except ContrailSparkError as error:
        return Outcome(messages, duplicates, str(error))
    return Outcome(messages, duplicates)


def numbered(
    batches: Iterator[pa.RecordBatch],
) -> Iterator[tuple[int, list[pa.RecordBatch]]]:
    """The messages with the numbers of their batches, about as many together as a request takes."""
    waiting: list[pa.RecordBatch] = []
    rows = size = number = 0
    for batch in batches:
        numbers = (sequences(batch) - 1) // BATCH_SEQUENCES + 1
        starts = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
        for start, end in zip(starts, [*starts[1:], len(numbers)], strict=True):
            own, part = int(numbers[start]), batch.slice(start, end - start)
            if waiting and (own != number or rows >= BODY_ROWS_MAX or size >= BODY_BYTES_MAX):
                yield number, waiting
                waiting, rows, size = [], 0, 0
            number = own
            waiting.append(part)
            rows, size = rows + part.num_rows, size + part.nbytes
    if waiting:
        yield number, waiting


def _publish(source: str, task: RestoreTask, number: int, batches: list[pa.RecordBatch]) -> int:
    target, shard = task.target, task.split.shard
    batch = NumberedBatch(
        f"{target.producer}-{shard}",
        number,
        f"sequences {(number - 1) * BATCH_SEQUENCES + 1}..{number * BATCH_SEQUENCES} of shard "
        f"{shard}",
        "Restore into an empty stream, or raise the duplicate_window of this one",
        repeats=True,
    )
    layout = Layout(IdSource.SOURCE, None, source)
    duplicates = 0
    with closing(Publisher(target.options, batch)) as publisher:
        joined = transformed(pa.concat_batches(batches), source, target)
        rows = Rows(joined, layout, "", sequences(joined)[0])
        for body in rows.bodies():
            duplicates += publisher.publish(body, rows)
    return duplicates


def transformed(batch: pa.RecordBatch, source: str, target: Target) -> pa.RecordBatch:
    """The messages as they are published: their subjects, and headers without those that act."""
    columns = {name: batch.column(name) for name in _COLUMNS if name != "time"}
    if target.prefix:
        columns["subject"] = pc.binary_join_element_wise(target.prefix, columns["subject"], "")
    names = pc.unique(batch.column("headers").keys).to_pylist()
    if target.origin or any(_acts(name) for name in names):
        columns["headers"] = _headers(batch, source if target.origin else None)
    return pa.RecordBatch.from_pydict(columns)


def _headers(batch: pa.RecordBatch, origin: str | None) -> pa.MapArray:
    kept: list[list[tuple[str, Any]]] = [
        [(name, values) for name, values in each or () if not _acts(name)]
        for each in batch.column("headers").to_pylist()
    ]
    if origin is not None:
        times = batch.column("time").cast(pa.int64()).to_pylist()
        subjects = batch.column("subject").to_pylist()
        seqs = sequences(batch).tolist()
        for own, subject, seq, time in zip(kept, subjects, seqs, times, strict=True):
            own += [
                ("Nats-Stream", [origin]),
                ("Nats-Subject", [subject]),
                ("Nats-Sequence", [str(seq)]),
                ("Nats-Time-Stamp", [format_time(time * NS_PER_US)]),
            ]
    return pa.array(kept, _HEADERS)


def _acts(name: str) -> bool:
    return name.lower().startswith(_ACTING)


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Filters for the subjects in a file: their first tokens, and what follows these."""

    filters: frozenset[str] = frozenset()
    problem: str | None = None


def first_tokens(path: str) -> FirstTokens:
    """Read them, or why that is not possible."""
    found: set[str] = set()
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["subject"], use_threads=False):
                for subject in pc.unique(batch.column("subject")).to_pylist():
                    token, dot, _ = subject.partition(".")
                    found.add(f"{token}.>" if dot else token)
    except FileNotFoundError:
        return FirstTokens(problem=f"{path} is missing")
    except (pa.ArrowException, OSError, KeyError) as error:
        return FirstTokens(problem=f"{path} is damaged: {error}")
    return FirstTokens(frozenset(found))

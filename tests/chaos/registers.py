"""Registers: compare-and-set on subjects, and a check that all of it is linearizable.

A register is a subject; its revision is the sequence of its newest message. A write says which
revision it replaces. All messages are kept, so in the end the order of all writes is known, and
every answer can be checked against it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from contrail_client import (
    ApiProblem,
    Contrail,
    Expected,
    OutcomeUnknown,
    PreconditionFailed,
    StoredMessage,
    Unreachable,
)
from tests.chaos.clients import Clients

STREAM: Final = "REGISTERS"
REGISTERS: Final = 3
_WORKERS: Final = 3


@dataclass(slots=True)
class Read:
    """A read: the revision and value that it found, and when it was asked and answered."""

    register: str
    revision: int
    value: str
    asked_s: float
    answered_s: float


@dataclass(slots=True)
class Write:
    """A write that replaces a revision. `seq` is its own; `answered_s` is None if unknown."""

    register: str
    expected: int
    value: str
    asked_s: float
    outcome: Literal["stored", "mismatch", "refused", "unknown"] = "unknown"
    seq: int = 0
    answered_s: float = float("inf")


@dataclass
class History:
    """What the workers asked and what they were told. Threads append to it."""

    reads: list[Read] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)


class Registers(Clients):
    """Workers that read registers and replace what they have read."""

    stream = STREAM

    def __init__(self, urls: Sequence[str], seed: int, replicas: int) -> None:
        super().__init__(urls, seed, replicas)
        self.history = History()
        self._workers = [self.add(self._work, f"r{number}") for number in range(_WORKERS)]

    def prepare(self, client: Contrail) -> None:
        client.ensure_stream(STREAM, {"subjects": ["reg.*"], "num_replicas": self.replicas})

    def _work(self, client: Contrail, name: str) -> None:
        chance, number = self.chance(name), 0
        while self.is_running:
            register = f"reg.{chance.randrange(REGISTERS)}"
            number += 1
            try:
                found = self._read(client, register)
                if chance.random() < 0.7:
                    self._write(client, register, found.revision, f"{name}-{number}")
            except (OutcomeUnknown, Unreachable):
                self.pause()
            except ApiProblem as problem:
                self.accept(problem)

    def _read(self, client: Contrail, register: str) -> Read:
        asked_s = time.monotonic()
        found = list(client.last_messages(STREAM, subject=register))
        message = found[0] if found else None
        read = Read(
            register,
            message.seq if message else 0,
            message.payload.decode() if message else "",
            asked_s,
            time.monotonic(),
        )
        self.history.reads.append(read)
        return read

    def _write(self, client: Contrail, register: str, revision: int, value: str) -> None:
        write = Write(register, revision, value, time.monotonic())
        self.history.writes.append(write)
        expected = Expected(last_subject_seq=revision)
        try:
            write.seq = client.publish(register, value, expected=expected).seq
            write.outcome = "stored"
            self.count_acked()
        except PreconditionFailed:
            write.outcome = "mismatch"
        except (OutcomeUnknown, Unreachable):
            self.count_unknown()
            return
        except ApiProblem as problem:
            if problem.applied is not False:
                return
            write.outcome = "refused"
            self.count_refused()
            raise
        finally:
            if write.outcome != "unknown":
                write.answered_s = time.monotonic()

    def verdict(self, client: Contrail) -> list[str]:
        stored = list(client.replay(STREAM))
        return problems(self.history, stored)


def problems(history: History, stored: Sequence[StoredMessage]) -> list[str]:
    """All answers that do not fit the order in which the writes were stored."""
    by_value = {write.value: write for write in history.writes}
    found: list[str] = []
    for register in {message.subject for message in stored} | {w.register for w in history.writes}:
        order = [message for message in stored if message.subject == register]
        values = {message.seq: message.payload.decode() for message in order}
        found += _wrong_writes(history, register, values)
        found += _wrong_order(register, values, by_value)
        found += _wrong_reads(history, register, values, by_value)
    return found


def _wrong_writes(history: History, register: str, values: dict[int, str]) -> list[str]:
    """Writes whose outcome is not what is stored, or that replaced another revision."""
    found = []
    revisions = sorted(values)
    before = dict(zip(revisions, [0, *revisions], strict=False))
    seqs = {value: seq for seq, value in values.items()}
    if len(seqs) != len(values):
        found.append(f"{register}: a write was stored twice")
    for write in (write for write in history.writes if write.register == register):
        seq = seqs.get(write.value)
        if write.outcome == "stored" and seq != write.seq:
            found.append(f"{register}: {write.value} was acknowledged at {write.seq}, is at {seq}")
        if write.outcome in ("mismatch", "refused") and seq is not None:
            found.append(f"{register}: {write.value} was refused ({write.outcome}), is at {seq}")
        if seq is not None and before[seq] != write.expected:
            found.append(
                f"{register}: {write.value} replaced {before[seq]}, and expected {write.expected}"
            )
        if write.outcome == "mismatch" and not _could_differ(history, write, values):
            found.append(f"{register}: {write.value} was refused, although nothing had changed")
    return found


def _could_differ(history: History, write: Write, values: dict[int, str]) -> bool:
    """Whether another write could have replaced the revision before the refusal."""
    asked = {other.value: other.asked_s for other in history.writes}
    return any(
        seq > write.expected and asked.get(value, 0.0) <= write.answered_s
        for seq, value in values.items()
    )


def _wrong_order(register: str, values: dict[int, str], by_value: dict[str, Write]) -> list[str]:
    """Writes that were stored before one that was acknowledged before they were asked for."""
    found, earliest_s = [], float("inf")
    for seq in sorted(values, reverse=True):
        write = by_value.get(values[seq])
        if write is None:
            found.append(f"{register}: nobody wrote {values[seq]}")
            continue
        if write.asked_s > earliest_s:
            found.append(f"{register}: {write.value} at {seq} is before what was there already")
        earliest_s = min(earliest_s, write.answered_s)
    return found


def _wrong_reads(
    history: History, register: str, values: dict[int, str], by_value: dict[str, Write]
) -> list[str]:
    """Reads of what was never written, was not there yet, or had been replaced before."""
    found = []
    known: list[tuple[float, int]] = [
        (by_value[value].answered_s, seq) for seq, value in values.items() if value in by_value
    ]
    reads = [read for read in history.reads if read.register == register]
    known += [(read.answered_s, read.revision) for read in reads]
    known.sort()
    newest, at = 0, 0
    for read in sorted(reads, key=lambda read: read.asked_s):
        while at < len(known) and known[at][0] < read.asked_s:
            newest = max(newest, known[at][1])
            at += 1
        if read.revision < newest:
            found.append(f"{register}: a read found {read.revision}, although {newest} was known")
        if read.revision and values.get(read.revision) != read.value:
            found.append(
                f"{register}: a read found {read.value} at {read.revision}, where "
                f"{values.get(read.revision)} is stored"
            )
        elif read.revision and by_value[read.value].asked_s > read.answered_s:
            found.append(f"{register}: a read found {read.value} before it was written")
    return found

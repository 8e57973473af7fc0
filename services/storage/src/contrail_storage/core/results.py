"""The results of ``apply``: a result per command, rows to write, and effects for the leader."""

from typing import Literal

import msgspec

from contrail_common.columns.blocks import Block
from contrail_common.model import Advisory
from contrail_common.retention_rules import RetentionProblem

Row = (
    tuple[Literal["put"], bytes, bytes]
    | tuple[Literal["delete"], bytes]
    | tuple[Literal["delete_range"], bytes, bytes]
)
"""One change of the store, as the store takes it."""


class Refused(msgspec.Struct, frozen=True):
    """A refusal: an error code of the registry and a sentence.

    For a configuration, ``problem`` has the field, and tells apart errors that share a code.
    ``seq`` is the message concerned, if the answer can say more about it.
    """

    code: int
    detail: str = ""
    problem: RetentionProblem | None = None
    seq: int = 0

    @classmethod
    def of(cls, problem: RetentionProblem) -> "Refused":
        """The refusal of an invalid configuration."""
        return cls(problem.spec.code, problem.message, problem)


class Appended(msgspec.Struct, frozen=True):
    """Outcome of an append of ``count`` messages.

    Without ``exceptions``, message i got sequence ``first_seq + i``. Otherwise ``exceptions`` maps
    the position of each refused message to its refusal, and of each duplicate to the original
    sequence (0: not known); the other messages got consecutive sequences from ``first_seq`` on.
    """

    first_seq: int
    count: int
    exceptions: dict[int, "Refused | int"] | None = None


class Removed(msgspec.Struct, frozen=True):
    """Number of messages removed; ``more`` asks for another entry to continue."""

    count: int
    more: bool = False


class Done(msgspec.Struct, frozen=True):
    """A command without a value took effect; ``changed`` is False when there was nothing to do."""

    changed: bool = True


class ConsumerPut(msgspec.Struct, frozen=True):
    """A consumer was created, or changed in place."""

    consumer_id: int
    created: bool


class Reserved(msgspec.Struct, frozen=True):
    """The shard id of a reserved stream, the first of its shards."""

    shard_id: int


Result = Refused | Appended | Removed | Done | ConsumerPut | Reserved


class Mark(msgspec.Struct, frozen=True, gc=False):
    """The extent of an entry's writes before a command for ``shard_id``, to roll back to."""

    shard_id: int
    rows: int
    blocks: int
    trimmed: int | None
    reached: int | None


class Writes(msgspec.Struct, eq=False):
    """Everything that one entry changes in the store: rows, new blocks, and heads to drop.

    ``trimmed`` maps a shard to its first kept sequence; blocks that end below it may be removed.
    ``reached`` maps a shard to its last sequence if that message was not stored (no interest).
    ``advisories`` are not stored: they are the events of the last command. Those of a shard do not
    name its stream.
    """

    rows: list[Row] = []
    blocks: list[tuple[int, Block]] = []
    trimmed: dict[int, int] = {}
    reached: dict[int, int] = {}
    dropped: list[int] = []
    advisories: list[Advisory] = []

    def mark(self, shard_id: int) -> Mark:
        """A mark before a command for ``shard_id``, to roll back to."""
        return Mark(
            shard_id,
            len(self.rows),
            len(self.blocks),
            self.trimmed.get(shard_id),
            self.reached.get(shard_id),
        )

    def roll_back(self, mark: Mark) -> None:
        """Drop everything added since ``mark``; all of it must be for the mark's shard."""
        del self.rows[mark.rows :], self.blocks[mark.blocks :]
        # A number that an earlier command of the entry set for the shard is set again.
        for sequences, before in ((self.trimmed, mark.trimmed), (self.reached, mark.reached)):
            sequences.pop(mark.shard_id, None)
            if before is not None:
                sequences[mark.shard_id] = before
        self.advisories.clear()

    def put(self, key: bytes, value: bytes) -> None:
        """Write ``value`` under ``key``."""
        self.rows.append(("put", key, value))

    def delete(self, key: bytes) -> None:
        """Remove ``key``."""
        self.rows.append(("delete", key))

    def delete_range(self, start: bytes, stop: bytes) -> None:
        """Remove all keys from ``start`` up to, not including, ``stop``."""
        self.rows.append(("delete_range", start, stop))


class Step(msgspec.Struct, frozen=True, eq=False):
    """One command being applied: the log index and log time of its entry, and its writes.

    Several commands of an entry share its index and its writes. ``now_ns`` never decreases within
    a shard. ``skipped_ns`` is the sum of the jumps of log time until then. ``term`` is that of the
    leader that proposed the entry.
    """

    index: int
    now_ns: int
    writes: Writes
    skipped_ns: int = 0
    term: int = 0

    @property
    def elapsed_ns(self) -> int:
        """Log time without jumps: duplicate windows and deadlines of deliveries run on it."""
        return self.now_ns - self.skipped_ns

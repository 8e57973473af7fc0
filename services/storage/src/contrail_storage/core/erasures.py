"""Receipts of erasures: the shards whose deleted bytes must leave all files, and their progress.

Receipts are part of the meta machine, so a receipt outlives its stream. A receipt has neither
subjects nor sequences. When it is recorded, the messages are already deleted; each node that has a
copy of the shards applies that, and then removes all deleted bytes of the shards from its files.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from contrail_common import errors
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Done, Refused, Result, Writes

RECEIPTS_MAX: Final = 10_000
KEPT_NS: Final = 7 * 24 * 3_600 * 1_000_000_000
"""Time for which a finished receipt is kept."""


class Erasure(msgspec.Struct, array_like=True, frozen=True):
    """One receipt. ``replicas`` has the log time in ns at which each node finished (0: not yet).

    ``shredded`` says that the keys of the messages were destroyed, so nobody can read them.
    ``indexes`` has an index of each group at which the messages are deleted. Before a node has
    applied it, the node would find nothing to remove.
    """

    erasure_id: str
    stream: str
    shards: tuple[int, ...]
    messages: int
    replicas: dict[str, int]
    shredded: bool = False
    indexes: dict[int, int] = {}

    @property
    def done_ns(self) -> int:
        """Log time (ns) at which the last node finished; 0 while one is pending."""
        return max(self.replicas.values()) if all(self.replicas.values()) else 0


class ErasureLedger:
    """All receipts. ``receipts`` is by id, oldest first."""

    def __init__(self) -> None:
        self.receipts: dict[str, Erasure] = {}
        # Numbers of the rows, by id. They ascend, so rows load in the order of the requests.
        self._numbers: dict[str, int] = {}
        self._next = 1

    @property
    def is_full(self) -> bool:
        """Whether no receipt can be added: the maximum is reached, and none is finished."""
        receipts = self.receipts
        return len(receipts) >= RECEIPTS_MAX and not any(one.done_ns for one in receipts.values())

    def pending(self, node_id: str) -> list[Erasure]:
        """The receipts that a node has not finished, oldest first."""
        return [one for one in self.receipts.values() if one.replicas.get(node_id) == 0]

    def has_old(self, now_ns: int) -> bool:
        """Whether a receipt was finished so long ago that it can be removed."""
        return any(0 < one.done_ns <= now_ns - KEPT_NS for one in self.receipts.values())

    def apply(self, command: cmd.ReceiptCommand, writes: Writes) -> Result:
        """Apply one command, and add its changes to ``writes``."""
        match command:
            case cmd.RecordErasure():
                return self.record(command, writes)
            case cmd.FinishErasures():
                return self.finish(command, writes)
            case cmd.ReopenErasures():
                return Done(changed=self.reopen(command.node, writes))

    def record(self, command: cmd.RecordErasure, writes: Writes) -> Result:
        """Add a receipt; at the maximum, it replaces the oldest finished one."""
        self._forget_old(command.time_ns, writes)
        # The command was repeated after an unknown outcome.
        if command.erasure_id in self.receipts:
            return Done(changed=False)
        if self.is_full:
            return Refused(
                errors.ERASURE_LIMIT.code,
                f"{RECEIPTS_MAX} erasures are pending, which is the maximum",
            )
        # Finished receipts go first. A pending one is never removed: its bytes would stay.
        if len(self.receipts) >= RECEIPTS_MAX:
            self._forget(next(one for one in self.receipts.values() if one.done_ns), writes)
        replicas = dict.fromkeys(command.nodes, 0)
        self._numbers[command.erasure_id] = self._next
        self._next += 1
        receipt = Erasure(
            command.erasure_id,
            command.stream,
            command.shards,
            command.messages,
            replicas,
            command.shredded,
            command.indexes,
        )
        self._put(receipt, writes)
        return Done()

    def finish(self, command: cmd.FinishErasures, writes: Writes) -> Result:
        """Note that a node has finished some receipts."""
        for erasure_id in command.erasure_ids:
            known = self.receipts.get(erasure_id)
            if known is not None and known.replicas.get(command.node) == 0:
                # 0 means pending, so a clock at 0 counts as 1.
                replicas = known.replicas | {command.node: max(command.time_ns, 1)}
                self._put(msgspec.structs.replace(known, replicas=replicas), writes)
        self._forget_old(command.time_ns, writes)
        return Done()

    def reopen(self, node: str, writes: Writes, lost_group: int | None = None) -> bool:
        """Have a node do its part of all pending receipts again; return whether any has changed.

        Done receipts stay: no node has those bytes any more, so the node cannot get them either.
        ``lost_group`` is a group whose log went with the node's disk: its indexes begin anew.
        """
        pending = [one for one in self.receipts.values() if not one.done_ns]
        changed = False
        for one in pending:
            if node in one.replicas:
                indexes = {at: index for at, index in one.indexes.items() if at != lost_group}
                replicas = one.replicas | {node: 0}
                again = msgspec.structs.replace(one, replicas=replicas, indexes=indexes)
                if again != one:
                    self._put(again, writes)
                    changed = True
        return changed

    def _put(self, erasure: Erasure, writes: Writes) -> None:
        self.receipts[erasure.erasure_id] = erasure
        writes.put(self._key(erasure), msgspec.msgpack.encode(erasure))

    def _forget_old(self, now_ns: int, writes: Writes) -> None:
        for old in list(self.receipts.values()):
            if 0 < old.done_ns <= now_ns - KEPT_NS:
                self._forget(old, writes)

    def _forget(self, erasure: Erasure, writes: Writes) -> None:
        writes.delete(self._key(erasure))
        del self.receipts[erasure.erasure_id], self._numbers[erasure.erasure_id]

    def _key(self, erasure: Erasure) -> bytes:
        number = self._numbers[erasure.erasure_id]
        return keys.large_key(keys.ERASURE, cmd.META_SHARD, number)

    def take_over(self, other: "ErasureLedger") -> None:
        """Replace the receipts by those of ``other``, which must not be used afterwards."""
        self.receipts, self._numbers, self._next = other.receipts, other._numbers, other._next

    def load(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Load the receipts from their rows, given as (key, value) in key order."""
        for key, value in rows:
            erasure = msgspec.msgpack.decode(value, type=Erasure)
            self.receipts[erasure.erasure_id] = erasure
            self._numbers[erasure.erasure_id] = keys.last_number(key, 8)
            self._next = keys.last_number(key, 8) + 1

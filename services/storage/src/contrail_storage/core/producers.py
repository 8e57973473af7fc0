"""Producers that number their batches, so that no message is stored twice, however late it comes.

A producer publishes the messages of a batch, each with an id, in as many requests as it likes, and
gives all of them the number of the batch. Numbers go up. A message of an earlier batch is a
duplicate. One of the last batch is a duplicate if its id is known: the ids that were in the
duplicate window when that batch began, and all since, are held beyond the window.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import msgspec

from contrail_common.timeunits import INT64_MAX
from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Writes

PRODUCERS_MAX: Final = 10_000
"""Producers that a shard remembers. Memory: about 6 MB, if all names are as long as possible."""
HELD_IDS_MAX: Final = 1 << 20
"""Ids beyond the duplicate window that a shard holds, in about 40 MB."""

_encode: Final = msgspec.msgpack.Encoder().encode


class Producer(msgspec.Struct, array_like=True):
    """One producer, as in its row."""

    name: str
    number: int
    """Of its last batch."""
    first_seq: int
    """The ids of messages from this sequence on are held; 0: some of them are forgotten."""
    use: int
    """Counts the batches of all producers of the shard."""
    row: int
    """Number of its row. The rows have the numbers below their count."""


class Producers:
    """The producers of one stream shard."""

    def __init__(self, shard_id: int) -> None:
        self._shard_id = shard_id
        self._known: OrderedDict[str, Producer] = OrderedDict()
        """By name, ascending by use."""
        self._holding: OrderedDict[str, Producer] = OrderedDict()
        """Those with a ``first_seq``, in the same order, in which this ascends as well."""
        self._uses = 0
        """The highest use."""

    def __len__(self) -> int:
        return len(self._known)

    def find(self, name: str) -> Producer | None:
        """A producer; None if it is not known."""
        return self._known.get(name)

    def begin(self, name: str, number: int, first_seq: int, writes: Writes) -> None:
        """Begin a batch. If there are too many producers, the one that began least lately goes."""
        known = self._known.get(name)
        row = len(self._known) if known is None else known.row
        if row == PRODUCERS_MAX:
            gone, producer = self._known.popitem(last=False)
            self._holding.pop(gone, None)
            row = producer.row
        self._add(Producer(name, number, first_seq, self._uses + 1, row))
        self._write(self._known[name], writes)

    def _add(self, producer: Producer) -> None:
        self._uses = producer.use
        for each in (self._known, self._holding):
            each.pop(producer.name, None)
        self._known[producer.name] = producer
        if producer.first_seq:
            self._holding[producer.name] = producer

    def _write(self, producer: Producer, writes: Writes) -> None:
        key = keys.small_key(keys.PRODUCER, self._shard_id, producer.row)
        writes.put(key, _encode(producer))

    @property
    def held_from(self) -> int:
        """The first sequence whose message's id is held for some producer."""
        if not self._holding:
            return INT64_MAX
        return next(iter(self._holding.values())).first_seq

    def forget_below(self, seq: int, writes: Writes) -> None:
        """Note that the ids of messages below ``seq`` are forgotten."""
        while self._holding and self.held_from < seq:
            _, producer = self._holding.popitem(last=False)
            producer.first_seq = 0
            self._write(producer, writes)

    def load(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Load the producers from their rows."""
        found = [msgspec.msgpack.decode(row, type=Producer) for _, row in rows]
        for producer in sorted(found, key=lambda one: one.use):
            self._add(producer)

    # Archives ------------------------------------------------------------------------------------

    def archived(self) -> list[tuple[str, int, int]]:
        """Name, number and first sequence of each, in order of use."""
        return [(one.name, one.number, one.first_seq) for one in self._known.values()]

    def restore(self, archived: Iterable[tuple[str, int, int]], writes: Writes) -> None:
        """Take up what :meth:`archived` returned; nothing is known yet."""
        for row, (name, number, first_seq) in enumerate(archived):
            producer = Producer(name, number, first_seq, row + 1, row)
            self._add(producer)
            self._write(producer, writes)

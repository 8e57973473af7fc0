"""The requests and answers of the clients of a run. Threads write it, the verdict reads it."""

import threading
import time
from dataclasses import dataclass, field

from contrail_client import Message


@dataclass(slots=True)
class Sent:
    """A message: its publisher, its position in the publisher's order, and all answers to it."""

    publisher: str
    number: int
    message: Message
    seqs: set[int] = field(default_factory=set)
    refused: bool = False


@dataclass(slots=True, frozen=True)
class Delivered:
    """A delivery, with the time at which its pull was sent."""

    consumer: str
    seq: int
    payload: bytes
    asked_s: float


class Journal:
    """Thread-safe record of one run."""

    def __init__(self) -> None:
        self.sent: dict[str, Sent] = {}
        self.deliveries: list[Delivered] = []
        self.settled_s: dict[tuple[str, int], float] = {}
        """When the sync acknowledgement of a (consumer, sequence) was answered."""
        self.acknowledged = 0
        self.acknowledged_s: list[float] = []
        """When publishes were acknowledged."""
        self.unknown = 0
        self._changed = threading.Condition()

    def sending(self, entries: list[Sent]) -> None:
        """Record messages that are about to be published."""
        with self._changed:
            for entry in entries:
                assert entry.message.msg_id is not None
                self.sent[entry.message.msg_id] = entry

    def answered(self, entry: Sent, seq: int) -> None:
        """Record the ack of a message, perhaps as a duplicate."""
        with self._changed:
            entry.seqs.add(seq)
            self.acknowledged += 1
            self.acknowledged_s.append(time.monotonic())
            self._changed.notify_all()

    def doubted(self) -> None:
        """Count a request that ended without an answer."""
        with self._changed:
            self.unknown += 1

    def delivered(self, deliveries: list[Delivered]) -> None:
        """Record the deliveries of a pull."""
        with self._changed:
            self.deliveries += deliveries
            self._changed.notify_all()

    def settled(self, consumer: str, seqs: list[int]) -> None:
        """Record the answer to a sync acknowledgement."""
        now_s = time.monotonic()
        with self._changed:
            for seq in seqs:
                self.settled_s.setdefault((consumer, seq), now_s)

    def wait_for_acknowledged(self, count: int, timeout_s: float) -> bool:
        """Wait until `count` publishes were acknowledged."""
        with self._changed:
            return self._changed.wait_for(lambda: self.acknowledged >= count, timeout_s)

    def wait_for_all_delivered(self, consumer: str, timeout_s: float) -> bool:
        """Wait until the consumer got every acknowledged message."""
        with self._changed:
            wanted = {min(entry.seqs) for entry in self.sent.values() if entry.seqs}
            return self._changed.wait_for(lambda: not self._missing(consumer, wanted), timeout_s)

    def _missing(self, consumer: str, wanted: set[int]) -> set[int]:
        wanted -= {one.seq for one in self.deliveries if one.consumer == consumer}
        return wanted

"""How far each peer's log is, as its leader knows, and what may be sent to it now."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

FRAME_BYTES: Final = 1 << 20
"""Bytes of entries in one append message; a larger entry goes alone."""
WINDOW_BYTES: Final = 4 << 20
"""Bytes of entries that a peer may have unanswered, before the last message is added."""
WINDOW_FRAMES: Final = 64
_LOST_AFTER_BEATS: Final = 2


class State(Enum):
    """How entries are sent."""

    PROBE = 1
    """One message for each heartbeat, until it is known where the logs agree."""
    REPLICATE = 2
    """Without waiting, within the window."""
    SNAPSHOT = 3
    """No entries: this member does not have those that the peer needs."""


@dataclass(slots=True)
class Progress:
    """What a leader knows of one peer's log."""

    next_index: int
    """The next entry to send."""
    state: State = State.PROBE
    may_probe: bool = True
    """Whether a message may be sent in state PROBE."""
    reading: int = 0
    """Number of the read of the disk that the peer waits for; 0: none."""
    # (last index, bytes) of messages that are not answered, oldest first.
    _sent: deque[tuple[int, int]] = field(default_factory=deque)
    # The sum of their bytes.
    _sent_bytes: int = 0
    # Up to where the logs agree, durably or not.
    _matched: int = 0
    # The heartbeats sent since that last changed.
    _beats: int = 0

    def may_send(self, last_index: int) -> bool:
        """Whether a message may be sent now, to a leader's log that ends at `last_index`."""
        if self.reading or self.state is State.SNAPSHOT:
            return False
        if self.state is State.PROBE:
            return self.may_probe
        return self.is_replicating(last_index)

    def is_replicating(self, last_index: int) -> bool:
        """Whether entries are due without waiting, to a leader's log that ends at `last_index`."""
        return (
            self.state is State.REPLICATE
            and not self.reading
            and self.next_index <= last_index
            and self._sent_bytes < WINDOW_BYTES
            and len(self._sent) < WINDOW_FRAMES
        )

    def note_sent(self, count: int, size: int) -> None:
        """Note a message with the next `count` entries, of `size` bytes."""
        if self.state is State.PROBE:
            self.may_probe = False
            return
        if not self._sent:
            self._beats = 0
        self.next_index += count
        self._sent.append((self.next_index - 1, size))
        self._sent_bytes += size

    def probe(self, next_index: int) -> None:
        """Find out again where the logs agree, from the entry before `next_index` on."""
        self.state, self.next_index, self.may_probe, self.reading = State.PROBE, next_index, True, 0
        self._matched = min(self._matched, next_index - 1)
        self._beats = 0
        self._sent.clear()
        self._sent_bytes = 0

    def note_agreed(self, index: int) -> None:
        """Note that the logs agree up to `index`, and that it is durable at the peer."""
        if index > self._matched:
            self._matched, self._beats = index, 0
        while self._sent and self._sent[0][0] <= index:
            self._sent_bytes -= self._sent.popleft()[1]
        if self.state is not State.REPLICATE:
            self.probe(index + 1)
            self.state = State.REPLICATE
        elif self.next_index <= index:
            self.next_index = index + 1

    def note_matched(self, index: int) -> None:
        """Note that the logs agree up to `index`, perhaps not durably."""
        if index > self._matched:
            self._matched, self._beats = index, 0

    def note_beat(self) -> None:
        """Note a heartbeat: messages that are not received within two of them are lost."""
        self._beats += 1
        self.may_probe = True

    def is_lost(self, matched: int) -> bool:
        """Whether a peer that agrees up to `matched` misses messages that were sent long ago."""
        return (
            self.state is State.REPLICATE
            and matched < self.next_index - 1
            and matched <= self._matched
            and self._beats > _LOST_AFTER_BEATS
        )

"""Whether a stream with ``discard: new`` can take the messages of an append, one by one.

The messages that a message replaces are subtracted first: for a roll-up all messages of its subject
or of the stream, else the oldest of a subject at its limit. A message is checked against a limit
only if it makes the stream fuller, in messages or in bytes. This is JetStream's rule for
``max_bytes``: a message is accepted if it is no larger than the one it replaces.
"""

from collections import deque
from dataclasses import dataclass
from itertools import islice

import numpy as np

from contrail_common.model import Rollup
from contrail_common.texts import I64Array, U32Array
from contrail_storage.core.commands import Append
from contrail_storage.core.stream.removal.by_subject import sizes_of_oldest
from contrail_storage.core.stream.shard_state import ShardState


@dataclass(slots=True)
class _Held:
    """Messages of a subject: ``old`` of them from before the append, and the sizes of its own.

    ``old_sizes`` has the sizes of the oldest only; the others are unknown or not needed.
    """

    old: int
    old_sizes: deque[int]
    own_sizes: deque[int]

    def __len__(self) -> int:
        return self.old + len(self.own_sizes)

    def oldest(self, count: int) -> int:
        """Bytes of the ``count`` oldest; unknown sizes count as 0."""
        old = min(count, self.old)
        return sum(islice(self.old_sizes, old)) + sum(islice(self.own_sizes, count - old))

    def drop(self, count: int) -> None:
        """Remove the ``count`` oldest."""
        old = min(count, self.old)
        self.old -= old
        for _ in range(min(old, len(self.old_sizes))):
            self.old_sizes.popleft()
        for _ in range(count - old):
            self.own_sizes.popleft()


class CapacityCheck:
    """Tracks messages and bytes of the stream, message by message of an append."""

    def __init__(
        self, state: ShardState, command: Append, sizes: I64Array, subject_index: U32Array
    ) -> None:
        self._state = state
        self._config = state.shard_config
        self._messages, self._bytes = state.counters.messages, state.counters.bytes
        # Messages of the subjects of this append, as far as the append has been checked.
        self._held: dict[str, _Held] = {}
        # A roll-up of the whole stream was accepted: nothing from before the append counts.
        self._cleared = False
        # By subject number, the sizes of the oldest messages. Empty unless bytes may decide.
        self._sizes: dict[int, list[int]] = {}
        if 0 <= self._config.max_bytes < self._bytes + int(sizes.sum()):
            # Sizes are in the blocks, so they are read only if they may decide.
            self._sizes = self._replaced_sizes(command, subject_index)

    def _replaced_sizes(self, command: Append, subject_index: U32Array) -> dict[int, list[int]]:
        """Sizes of the oldest messages of each subject, as many as the append may replace."""
        table = self._state.subjects
        rolled = {int(subject_index[at]) for at in command.rollups or ()}
        counts = np.bincount(subject_index, minlength=len(command.subjects)).tolist()
        most = self._config.max_msgs_per_subject
        quota: dict[int, int] = {}
        for number, (subject, count) in enumerate(zip(command.subjects, counts, strict=True)):
            held = table.count(subject)
            if number in rolled:
                quota[table.ids.get(subject, -1)] = held
            elif most > 0 and held + count > most:
                quota[table.ids.get(subject, -1)] = min(held + count - most, held)
        quota.pop(-1, None)
        return sizes_of_oldest(self._state, quota) if quota else {}

    def take(self, subject: str, size: int, rollup: Rollup | None, *, stored: bool) -> str | None:
        """Count a message; return None, or the limit that refuses it.

        A message that is not ``stored`` only replaces others.
        """
        config = self._config
        held = self._of(subject)
        replaced = len(held) if rollup is not None else 0
        most = config.max_msgs_per_subject
        if stored and rollup is None and 0 < most <= len(held):
            if config.discard_new_per_subject:
                return "maximum messages per subject exceeded"
            replaced = len(held) + 1 - most
        messages, used = self._messages - replaced, self._bytes - held.oldest(replaced)
        if rollup == "all":
            messages = used = 0
        if stored:
            messages, used = messages + 1, used + size
            # Only if the stream gets fuller: a stream over a lowered limit still accepts messages
            # that replace others of at least their size.
            if self._messages < messages and 0 <= config.max_msgs < messages:
                return "maximum messages exceeded"
            if self._bytes < used and 0 <= config.max_bytes < used:
                return "maximum bytes exceeded"
        self._messages, self._bytes = messages, used
        if rollup == "all":
            self._held.clear()
            self._cleared = True
            held = self._of(subject)
        else:
            held.drop(replaced)
        if stored:
            held.own_sizes.append(size)
        return None

    def _of(self, subject: str) -> _Held:
        held = self._held.get(subject)
        if held is None:
            table = self._state.subjects
            old = 0 if self._cleared else table.count(subject)
            sizes = self._sizes.get(table.ids.get(subject, -1), []) if old else []
            held = self._held[subject] = _Held(old, deque(sizes), deque())
        return held

"""Many messages to publish, in columns. The edge converts each batch once."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec
import numpy as np

from contrail_common.columns.blocks import MessageColumns, columns_of, join_columns
from contrail_common.model import Expected, Numbered, PublishMessage, Rollup
from contrail_common.texts import I64Array, Texts, U32Array, as_u32, join_texts

_T = TypeVar("_T")

_INDEX_BYTES: Final = 4
_FEW: Final = 256


class MessageBatch(msgspec.Struct, array_like=True, gc=False):
    """Messages to publish whose headers are interpreted, as in :class:`PublishMessage`.

    ``subject_index`` (u32[n]) points into the distinct ``subjects``. ``ids`` has a text for each
    message, empty if it has no id; it is None if no message has an id. The keys of ``expected``,
    ``rollups`` and ``ttls`` (ns, or TTL_NEVER) are positions of messages. If ``atomic``, all
    messages are stored or none. In a ``numbered`` batch, each message has an id.
    """

    subjects: list[str]
    subject_index: bytes
    columns: MessageColumns
    ids: Texts | None = None
    expected: dict[int, Expected] | None = None
    rollups: dict[int, Rollup] | None = None
    atomic: bool = False
    ttls: dict[int, int] | None = None
    numbered: Numbered | None = None

    @classmethod
    def of(cls, messages: Sequence[PublishMessage]) -> "MessageBatch":
        """Return ``messages`` in columns."""
        # One loop instead of a comprehension per field, because each of those is a call, and most
        # batches have one message.
        subjects, payloads, headers = [], [], []
        ids: list[str] = []
        expected: dict[int, Expected] = {}
        rollups: dict[int, Rollup] = {}
        ttls: dict[int, int] = {}
        for at, message in enumerate(messages):
            subjects.append(message.subject)
            payloads.append(message.payload)
            headers.append(message.headers)
            ids.append(message.msg_id or "")
            if message.expected is not None:
                expected[at] = message.expected
            if message.rollup is not None:
                rollups[at] = message.rollup
            if message.ttl_ns is not None:
                ttls[at] = message.ttl_ns
        return cls(
            *index_subjects(subjects),
            columns_of(payloads, headers),
            Texts.of(ids) if any(ids) else None,
            expected or None,
            rollups or None,
            ttls=ttls or None,
        )

    @property
    def count(self) -> int:
        """Number of messages."""
        return self.columns.count

    def is_sound(self) -> bool:
        """Return True if the columns of a batch from outside fit each other.

        Storage does not check them again.
        """
        count, index = self.count, self.subject_index
        if not count:
            return True
        return (
            self.columns.is_sound()
            and self.columns.seals is None  # only storage encrypts
            and len(index) == _INDEX_BYTES * count
            and int(as_u32(index).max()) < len(self.subjects)
            and (self.ids is None or self.ids.is_sound(count))
            and all(
                0 <= at < count
                for asked in (self.expected, self.rollups, self.ttls)
                for at in asked or ()
            )
        )

    def sizes(self) -> I64Array:
        """Return roughly the bytes of each message: headers, payload, and the longest subject."""
        return self.columns.sizes() + self._subject_size()

    def size(self) -> int:
        """Return the sum of :meth:`sizes`."""
        return self.columns.size() + self.count * self._subject_size()

    def _subject_size(self) -> int:
        if "".join(self.subjects).isascii():
            return max(map(len, self.subjects), default=0)
        return max(len(subject.encode()) for subject in self.subjects)

    def slice(self, start: int, stop: int) -> "MessageBatch":
        """Return the messages from position ``start`` up to ``stop``."""
        if stop - start == self.count:
            return self
        # A part must not carry the subjects of the others: they count for its size.
        subjects, index = used_subjects(self.subjects, as_u32(self.subject_index)[start:stop])
        return MessageBatch(
            subjects,
            index.tobytes(),
            self.columns.slice(start, stop),
            None if self.ids is None else self.ids.slice(start, stop),
            _moved(self.expected, start, stop, -start),
            _moved(self.rollups, start, stop, -start),
            ttls=_moved(self.ttls, start, stop, -start),
            numbered=self.numbered,
        )

    def select(self, positions: I64Array) -> "MessageBatch":
        """Return the messages at ``positions`` (ascending) as one batch."""
        subjects, index = used_subjects(self.subjects, as_u32(self.subject_index)[positions])
        return MessageBatch(
            subjects,
            index.tobytes(),
            self.columns.select(positions),
            None if self.ids is None else self.ids.select(positions),
            _selected(self.expected, positions),
            _selected(self.rollups, positions),
            self.atomic,
            _selected(self.ttls, positions),
            self.numbered,
        )


def index_subjects(subjects: Sequence[str]) -> tuple[list[str], bytes]:
    """Return the distinct subjects, and for each message the index (u32) of its own."""
    # Most batches have one subject. Comparing the first and last finds most others at once.
    if subjects and subjects[-1] == subjects[0] and subjects.count(subjects[0]) == len(subjects):
        return [subjects[0]], bytes(4 * len(subjects))
    table: defaultdict[str, int] = defaultdict(itertools.count().__next__)
    index = np.fromiter(map(table.__getitem__, subjects), np.uint32, len(subjects))
    return list(table), index.tobytes()


def join_subjects(parts: Sequence[tuple[list[str], bytes]]) -> tuple[list[str], bytes]:
    """Join ``parts``, each with its distinct subjects and their index (u32), into one such pair."""
    first = parts[0][0]
    # Batches of one publisher often have the same subjects in the same order.
    if all(subjects == first for subjects, _ in parts):
        return first, b"".join([index for _, index in parts])
    table: dict[str, int] = {}
    joined = [
        np.array([table.setdefault(one, len(table)) for one in subjects], np.uint32)[as_u32(index)]
        for subjects, index in parts
    ]
    return list(table), np.concatenate(joined).tobytes()


def join_batches(parts: Sequence[MessageBatch]) -> MessageBatch:
    """Return all messages of ``parts``, one part after another; all have the same number."""
    if len(parts) == 1:
        return parts[0]
    expected: dict[int, Expected] = {}
    rollups: dict[int, Rollup] = {}
    ttls: dict[int, int] = {}
    count = 0
    for part in parts:
        if part.expected or part.rollups or part.ttls:
            expected |= _moved(part.expected, 0, part.count, count) or {}
            rollups |= _moved(part.rollups, 0, part.count, count) or {}
            ttls |= _moved(part.ttls, 0, part.count, count) or {}
        count += part.columns.count
    subjects, index = join_subjects([(part.subjects, part.subject_index) for part in parts])
    return MessageBatch(
        subjects,
        index,
        join_columns([part.columns for part in parts]),
        join_ids(parts),
        expected or None,
        rollups or None,
        ttls=ttls or None,
        numbered=parts[0].numbered,
    )


def join_ids(parts: Sequence[MessageBatch]) -> Texts | None:
    """Return the ids of all messages of ``parts``; None if no message has one."""
    if all(part.ids is None for part in parts):
        return None
    return join_texts([part.ids or Texts(bytes(4 * (part.count + 1)), b"") for part in parts])


def used_subjects(subjects: list[str], index: U32Array) -> tuple[list[str], U32Array]:
    """Return the ``subjects`` that ``index`` points to, and the same index into these."""
    # Setting a few elements of an array lets go of the interpreter's lock, which costs more.
    if len(index) <= _FEW and len(set(index.tolist())) == len(subjects):
        return subjects, index
    used = np.zeros(len(subjects), np.bool_)
    used[index] = True
    if np.count_nonzero(used) == len(used):
        return subjects, index
    numbers = np.cumsum(used, dtype=np.uint32) - np.uint32(1)
    return [subjects[number] for number in np.flatnonzero(used).tolist()], numbers[index]


def _selected(asked: dict[int, _T] | None, positions: I64Array) -> dict[int, _T] | None:
    """Return the values of the messages at ``positions``, under their new positions."""
    if asked is None:
        return None
    found = ((at, asked.get(position)) for at, position in enumerate(positions.tolist()))
    return {at: one for at, one in found if one is not None} or None


def _moved(asked: dict[int, _T] | None, start: int, stop: int, by: int) -> dict[int, _T] | None:
    """Return the values of the messages from ``start`` up to ``stop``; add ``by`` to positions."""
    if asked is None:
        return None
    return {at + by: one for at, one in asked.items() if start <= at < stop} or None

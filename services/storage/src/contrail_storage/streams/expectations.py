"""Proofs for publishes that expect a last sequence that the subject table does not show.

Finding the last message on a wildcard needs a search of all names of subjects; that of a subject
whose last message was removed, a search of the messages before it. ``apply`` must do neither. So
the search is made before the publish is proposed, in a thread, and its result is logged with the
publish. ``apply`` refuses the publish if the proof does not decide: the message was removed, or
there are other or too many messages since. Then the search is repeated.

Most expectations are about one subject, and the table shows its last message. Such a publish is
proposed at once. If that message is removed before the publish is applied, it gets a proof then.

While a publish waits for a search, all later publishes to its shard wait too, so that they keep
their order. All waiting publishes share a search. A publish that ``apply`` refused is proposed
again, after those that came meanwhile.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import Expected
from contrail_common.subject_tree import SubjectTree
from contrail_common.subjects import is_wildcard
from contrail_common.texts import I64Array, U32Array
from contrail_storage.core.expected import ProvenExpected, subject_of
from contrail_storage.core.subjects.filters import SubjectFilter
from contrail_storage.core.subjects.packed_names import PackedNames
from contrail_storage.reading.reader import Reader
from contrail_storage.replica.content_sizes import content_size
from contrail_storage.replica.entries import (
    Content,
    Done,
    Outcome,
    not_logged,
)
from contrail_storage.replica.shard import Shard
from contrail_storage.replica.shard_logs import Append, ShardLogs

TRIES: Final = 3
"""How often a publish is proposed with a proof, if ``apply`` cannot tell what to do with it."""
_SEARCHED_TOGETHER: Final = 1_024
"""Waiting publishes whose patterns one search has."""
_PROPOSED_TOGETHER: Final = 256
"""Publishes and patterns that are proposed before others get their turn."""
_ALONE_MAX: Final = 8
"""Patterns up to which each has a filter of its own."""
_PIECE: Final = 4_096
"""Slots that are searched before others get the interpreter."""
_log = structlog.get_logger("contrail.expectations")


class Proof(NamedTuple):
    """What `HashedExpected` has of a subject or wildcard."""

    as_of: int
    newest: int


@dataclass(slots=True, eq=False)
class _Waiting:
    """A publish that waits for proofs about ``patterns``, or for those before it."""

    content: Content
    patterns: set[str]
    done: Done
    append: Append

    @property
    def size(self) -> int:
        """Bytes of its messages."""
        return content_size(self.content)


class Expectations:
    """Accepts publishes of any shard and proposes them with proofs. Used on the event loop only."""

    def __init__(self, logs: ShardLogs, reader: Reader) -> None:
        # Counts the bytes of waiting publishes.
        self._logs = logs
        # Has the filters that match names with patterns, and finds the last messages.
        self._reader = reader
        # By shard: publishes that wait. `Shard.publishes_wait` says whether there are any.
        self._waiting: dict[Shard, deque[_Waiting]] = {}
        self._searching: set[asyncio.Task[None]] = set()

    def propose(self, shard: Shard, content: Content, done: Done, append: Append) -> None:
        """Propose messages by ``append``, after those of the shard that wait; raises as it does."""
        patterns = _patterns(shard, content)
        if content.expected is not None:
            tries = TRIES - 1 if patterns else TRIES
            done = partial(self._answered, shard, content, done, append, tries)
        if not patterns and not shard.publishes_wait:
            append(shard.machine.shard_id, content, done)
            return
        self._put(shard, _Waiting(content, patterns, done, append))

    def _put(self, shard: Shard, one: _Waiting) -> None:
        # Counted against the queue already: otherwise waiting publishes could take any memory.
        self._logs.hold(shard, one.size)
        self._waiting.setdefault(shard, deque()).append(one)
        if not shard.publishes_wait:
            shard.publishes_wait = True
            task = asyncio.ensure_future(self._go_on(shard))
            self._searching.add(task)
            task.add_done_callback(self._searching.discard)

    async def _go_on(self, shard: Shard) -> None:
        """Find proofs for the waiting publishes of a shard and propose them, until none waits."""
        waiting = self._waiting[shard]
        while waiting:
            soon = islice(waiting, _SEARCHED_TOGETHER)
            patterns = {pattern for one in soon for pattern in one.patterns}
            proofs: Mapping[str, Proof] = {}
            problem: ApiError | None = None
            try:
                proofs = await self._find(shard, patterns)
            except ApiError as error:
                problem = error
            except Exception as error:
                # An unexpected error must not leave callers waiting for ever.
                _log.exception("expectation_not_searched")
                problem = not_logged(f"the expectation cannot be checked: {error!r}")
            proposed = 0
            while waiting and (waiting[0].patterns <= proofs.keys() or problem is not None):
                one = waiting.popleft()
                self._logs.hold(shard, -one.size)
                if problem is not None and one.patterns:
                    one.done(problem)
                else:
                    _propose(shard, one, proofs)
                proposed += len(one.patterns) + 1
                if proposed >= _PROPOSED_TOGETHER:
                    proposed = 0
                    await asyncio.sleep(0)
        del self._waiting[shard]
        shard.publishes_wait = False

    async def _find(self, shard: Shard, patterns: set[str]) -> dict[str, Proof]:
        proofs: dict[str, Proof] = {}
        for group in _groups(set(filter(is_wildcard, patterns))):
            wanted = await self._reader.filter_of(shard, group)
            names = _Names.of(shard, wanted)
            found = await asyncio.to_thread(names.search, group)
            for pattern, (name, last_seq) in found.items():
                proofs[pattern] = await self._proof(shard, pattern, names.as_of, name, last_seq)
        return proofs | await self._proofs_of_subjects(shard, patterns - proofs.keys())

    async def _proof(
        self, shard: Shard, pattern: str, as_of: int, name: str, last_seq: int
    ) -> Proof:
        """The proof for a wildcard; ``last_seq`` is the highest of its subjects, of ``name``."""
        newest = shard.machine.last_live(name) if name else 0
        # Lower or unknown: the subject has lost its last message, so another one may have the last.
        if newest is None or newest < last_seq:
            wanted = await self._reader.filter_of(shard, (pattern,))
            return Proof(as_of, await self._reader.last_match(shard, wanted, min(last_seq, as_of)))
        # A later message is the last one as of its own sequence.
        return Proof(max(as_of, newest), newest)

    async def _proofs_of_subjects(self, shard: Shard, subjects: set[str]) -> dict[str, Proof]:
        table = shard.machine.subjects
        sids = {name: sid for name in subjects if (sid := table.ids.get(name)) is not None}
        wanted = np.array(sorted(sids.values()), np.uint32)
        seqs = await self._reader.newest.find(shard, wanted)
        newest = dict(zip(wanted.tolist(), seqs.tolist(), strict=True))
        return {
            name: Proof(shard.machine.subjects.last_seq(name), newest.get(sids.get(name, -1), 0))
            for name in subjects
        }

    def _answered(
        self,
        shard: Shard,
        content: Content,
        done: Done,
        append: Append,
        tries: int,
        outcome: Outcome,
    ) -> None:
        """Propose the messages again if ``apply`` could tell of none whether it may be stored."""
        unknown = isinstance(outcome, list) and all(
            one.code == errors.LAST_UNSETTLED.code for one in outcome
        )
        # If only some are refused, their publisher repeats them: here they would be stored in
        # another order.
        if not tries or not unknown:
            done(outcome)
            return
        answered = partial(self._answered, shard, content, done, append, tries - 1)
        try:
            patterns = _patterns(shard, content)
            self._put(shard, _Waiting(content, patterns, answered, append))
        except ApiError as error:
            done(error)


def _propose(shard: Shard, one: _Waiting, proofs: Mapping[str, Proof]) -> None:
    try:
        if shard.damaged:
            raise ApiError(errors.DATA_LOST, shard.damaged, applied=False)
        one.append(shard.machine.shard_id, _proven(one.content, proofs), one.done)
    except ApiError as error:
        one.done(error)
    except Exception as error:
        # Those behind it must not wait for ever.
        _log.exception("publish_not_proposed")
        one.done(not_logged(f"the messages cannot be proposed: {error!r}"))


def _patterns(shard: Shard, content: Content) -> set[str]:
    """The wildcards, and the subjects without their newest message, about which messages expect."""
    found = set()
    # Most streams have no such subject: then none is looked up.
    literal = shard.machine.subjects.lost_last
    for subject, expected in _expectations(content):
        pattern = subject_of(expected, subject)
        if pattern is None:
            continue
        if is_wildcard(pattern) or (literal and shard.machine.last_live(pattern) is None):
            found.add(pattern)
    return found


def _expectations(content: Content) -> Iterable[tuple[str, Expected]]:
    """The messages that expect anything: their subject, and what they expect."""
    if content.expected is None:
        return
    if not isinstance(content, MessageBatch):
        yield content.subject, content.expected
        return
    subject_index = np.frombuffer(content.subject_index, np.uint32)
    for at, expected in content.expected.items():
        yield content.subjects[int(subject_index[at])], expected


def _proven(content: Content, proofs: Mapping[str, Proof]) -> Content:
    """The same messages; their expectations have the proofs that were found."""
    if not content.expected or not proofs:
        return content
    each = [_with_proof(one, subject, proofs) for subject, one in _expectations(content)]
    if isinstance(content, MessageBatch):
        expected = dict(zip(content.expected, each, strict=True))
        return msgspec.structs.replace(content, expected=expected)
    return msgspec.structs.replace(content, expected=each[0])


def _with_proof(expected: Expected, subject: str, proofs: Mapping[str, Proof]) -> Expected:
    proof = proofs.get(subject_of(expected, subject) or "")
    if proof is None:
        return expected
    return ProvenExpected(
        stream=expected.stream,
        last_seq=expected.last_seq,
        last_subject_seq=expected.last_subject_seq,
        last_subject_seq_subject=expected.last_subject_seq_subject,
        last_msg_id=expected.last_msg_id,
        as_of=proof.as_of,
        newest=proof.newest,
    )


# Searching ---------------------------------------------------------------------------------------


def _groups(patterns: set[str]) -> Iterable[tuple[str, ...]]:
    """The patterns that are searched together: each by itself if they are few.

    A filter for one pattern finds the last message without comparing names, and is used again.
    """
    some = tuple(sorted(patterns))
    return [(one,) for one in some] if len(some) <= _ALONE_MAX else [some]


class _Names(NamedTuple):
    """The subjects of a shard at one moment, for a search in another thread.

    The arrays may change meanwhile: a sequence that is read later is that of a later message.
    """

    as_of: int
    texts: PackedNames
    last: I64Array
    counts: U32Array
    matches: NDArray[np.bool_] | None
    """By slot, for any of the patterns; None: all match."""
    size: int

    @classmethod
    def of(cls, shard: Shard, wanted: SubjectFilter) -> "_Names":
        table = shard.machine.subjects
        return cls(
            shard.machine.counters.last_seq,
            table.numbered.texts,
            table.last,
            table.counts,
            wanted.matches(table),
            table.size,
        )

    def search(self, patterns: tuple[str, ...]) -> dict[str, tuple[str, int]]:
        """For each pattern the live subject with the highest ``last``, and that; ("", 0): none."""
        tree: SubjectTree[str] = SubjectTree()
        for pattern in patterns:
            tree.add(pattern, pattern)
        found = dict.fromkeys(patterns, ("", 0))
        for low in range(0, self.size, _PIECE):
            wanted = self.counts[low : min(low + _PIECE, self.size)] > 0
            if self.matches is not None:
                wanted &= self.matches[low : low + len(wanted)]
            slots = np.flatnonzero(wanted) + low
            last = self.last[slots]
            if len(patterns) == 1 and len(slots):
                # All of them match, so one of them is enough.
                slots, last = slots[[last.argmax()]], last.max(keepdims=True)
            for slot, seq in zip(slots.tolist(), last.tolist(), strict=True):
                name = self.texts.at(slot) or ""
                for pattern in tree.matching(name):
                    if seq > found[pattern][1]:
                        found[pattern] = name, seq
            time.sleep(0)  # others wait for the interpreter
        return found

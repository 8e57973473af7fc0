"""Proofs for publishes that expect the last sequence of a wildcard.

Finding the last message on a wildcard needs a search of all names of subjects, which ``apply`` must
not do. So it is made before the publish is proposed, in a thread, and its result is logged with the
publish. ``apply`` looks at the messages that were stored since, and refuses the publish if that is
not enough: the message was removed, or there are too many others. Then the search is repeated.

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
from contrail_common.texts import I64Array, U32Array
from contrail_storage.core.expected import ProvenExpected, wildcard_of
from contrail_storage.core.subjects.filters import SubjectFilter
from contrail_storage.core.subjects.packed_names import PackedNames
from contrail_storage.core.subjects.subject_table import SubjectTable
from contrail_storage.reading.reader import Reader
from contrail_storage.replica.entries import (
    Content,
    Done,
    Outcome,
    content_size,
    not_logged,
)
from contrail_storage.replica.shard import Shard
from contrail_storage.replica.shard_logs import Append, ShardLogs
from contrail_storage.streams.removals import Removals

TRIES: Final = 3
"""How often a publish is proposed, if ``apply`` cannot tell whether its expectation holds."""
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
    """The last message of a pattern, ``newest`` (0: none), as of the sequence ``as_of``."""

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

    def __init__(self, logs: ShardLogs, reader: Reader, removals: Removals) -> None:
        # Counts the bytes of waiting publishes.
        self._logs = logs
        # Has the filters that match names with patterns.
        self._reader = reader
        # Finds the last messages of subjects for which the table has only a bound.
        self._removals = removals
        # By shard: publishes that wait. `Shard.publishes_wait` says whether there are any.
        self._waiting: dict[Shard, deque[_Waiting]] = {}
        self._searching: set[asyncio.Task[None]] = set()

    def propose(self, shard: Shard, content: Content, done: Done, append: Append) -> None:
        """Propose messages by ``append``, after those of the shard that wait; raises as it does."""
        patterns = _patterns(content)
        if not patterns and not shard.publishes_wait:
            append(shard.machine.shard_id, content, done)
            return
        if patterns:
            done = partial(self._answered, shard, content, done, append, TRIES - 1)
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
        for _ in range(TRIES):
            for group in _groups(patterns):
                wanted = await self._reader.filter_of(shard, group)
                names = _Names.of(shard, wanted)
                found = await asyncio.to_thread(names.search, group)
                proofs |= _confirmed(shard, names.as_of, found)
            patterns = patterns - proofs.keys()
            if not patterns:
                return proofs
            await self._removals.settle_last(shard)
        # No message has this sequence, so `apply` refuses the publish.
        return proofs | dict.fromkeys(patterns, Proof(0, -1))

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
            self._put(shard, _Waiting(content, _patterns(content), answered, append))
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


def _patterns(content: Content) -> set[str]:
    """The wildcards whose last sequence the messages expect."""
    if content.expected is None:
        return set()
    each: Iterable[Expected] = (
        content.expected.values() if isinstance(content, MessageBatch) else (content.expected,)
    )
    return {pattern for one in each if (pattern := wildcard_of(one)) is not None}


def _proven(content: Content, proofs: Mapping[str, Proof]) -> Content:
    """The same messages; their expectations about wildcards have proofs."""

    def proven(expected: Expected) -> Expected:
        pattern = wildcard_of(expected)
        if pattern is None:
            return expected
        proof = proofs[pattern]
        return ProvenExpected(
            stream=expected.stream,
            last_seq=expected.last_seq,
            last_subject_seq=expected.last_subject_seq,
            last_subject_seq_subject=pattern,
            last_msg_id=expected.last_msg_id,
            as_of=proof.as_of,
            newest=proof.newest,
        )

    if not content.expected or not proofs:
        return content
    if isinstance(content, MessageBatch):
        each = {at: proven(one) for at, one in content.expected.items()}
        return msgspec.structs.replace(content, expected=each)
    return msgspec.structs.replace(content, expected=proven(content.expected))


# Searching ---------------------------------------------------------------------------------------


def _groups(patterns: set[str]) -> Iterable[tuple[str, ...]]:
    """The patterns that are searched together: each by itself if they are few.

    A filter for one pattern finds the last message without comparing names, and is used again.
    """
    some = tuple(sorted(patterns))
    return [(one,) for one in some] if len(some) <= _ALONE_MAX else [some]


class _Names(NamedTuple):
    """The subjects of a shard at one moment, for a search in another thread.

    The arrays may change meanwhile. A sequence that is read later is that of a later message, or of
    a bound that was lowered: `_confirmed` checks it.
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


def _confirmed(shard: Shard, as_of: int, found: Mapping[str, tuple[str, int]]) -> dict[str, Proof]:
    """The proofs, without those of patterns whose last message is not known."""
    table = shard.machine.subjects
    proofs: dict[str, Proof] = {}
    for pattern, (name, last_seq) in found.items():
        newest = _last_of(table, name) if name else 0
        # Lower or unknown: the subject has lost its last message meanwhile, so another one may have
        # the last message.
        if newest is not None and newest >= last_seq:
            # A later message is the last one as of its own sequence.
            proofs[pattern] = Proof(max(as_of, newest), newest)
    return proofs


def _last_of(table: SubjectTable, name: str) -> int | None:
    """Sequence of the last message of a subject; None if it has none, or only a bound is known."""
    sid = table.ids.get(name)
    return None if sid is None or sid in table.unsettled else table.last_of(sid)

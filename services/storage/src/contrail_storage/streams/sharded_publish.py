"""Publishing to a stream with several shards: split by subject, answered in request order.

Messages of a request keep their order within a shard. If a shard refuses or does not answer, this
is only the outcome of its own messages.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import Expected, PublishMessage, Rollup, StreamConfig
from contrail_common.partition import shard_of, shard_of_filter, shards_of
from contrail_common.texts import I64Array, as_u32
from contrail_link.contract.publish import PubResult
from contrail_storage.core.meta_machine import StreamEntry
from contrail_storage.replica.entries import Outcome
from contrail_storage.replica.shard_logs import PublishLog

Done = Callable[[Outcome], None]
_SHARDED: Final = errors.SHARDED_UNSUPPORTED.code


class ShardedPublisher:
    """Publishes to the shards of streams that have several, through their group's log."""

    def __init__(self, log: PublishLog, check: Callable[[int], None]) -> None:
        """``check`` raises ApiError for the id of a shard that cannot take messages."""
        self._log = log
        self._check = check

    def publish_then(
        self, entry: StreamEntry, config: StreamConfig, messages: list[PublishMessage], done: Done
    ) -> None:
        """Store messages (at least one); ``done`` is called as by ``Proposer.append_then``."""
        if len(messages) > 1:
            self.publish_batch_then(entry, config, MessageBatch.of(messages), _each(done))
            return
        message = messages[0]
        part = shard_of(message.subject, config.shards, config.shard_by)
        refused = _refusal(config, part, message.expected, message.rollup)
        if refused is not None:
            # In a later turn, as all answers are: the caller still has work to do after this call.
            asyncio.get_running_loop().call_soon(done, [refused])
            return
        self._check(entry.shard + part)
        self._log.append_then(entry.shard + part, messages, _placed(done, part))

    def publish_batch_then(
        self, entry: StreamEntry, config: StreamConfig, batch: MessageBatch, done: Done
    ) -> None:
        """Store a batch of at least one message; ``done`` gets runs in the batch's order.

        Raises SHARDED_UNSUPPORTED for an atomic batch over several shards.
        """
        loop = asyncio.get_running_loop()
        of_subjects = shards_of(batch.subjects, config.shards, config.shard_by).astype(np.int64)
        parts = of_subjects[as_u32(batch.subject_index)]
        refused = _refusals(config, batch, parts)
        if batch.atomic:
            _check_atomic(parts, refused)
        elif refused:
            parts[list(refused)] = -1
        used = [part for part in np.unique(parts).tolist() if part >= 0]
        gathering = _Gathering(batch.count, refused, len(used), done)
        if not used:
            loop.call_soon(done, gathering.results())
        for part in used:
            positions = np.flatnonzero(parts == part)
            own = batch if len(positions) == batch.count else batch.select(positions)
            settle = partial(gathering.settle, part, positions)
            try:
                self._check(entry.shard + part)
                self._log.append_batch_then(entry.shard + part, own, settle)
            except ApiError as error:
                loop.call_soon(settle, error)


def _each(done: Done) -> Done:
    def for_each(outcome: Outcome) -> None:
        if isinstance(outcome, ApiError):
            done(outcome)
        else:
            done([one for run in outcome for one in run.each()])

    return for_each


def _placed(done: Done, part: int) -> Done:
    def with_shard(outcome: Outcome) -> None:
        done(outcome if isinstance(outcome, ApiError) else _in_shard(outcome, part))

    return with_shard


def _in_shard(results: list[PubResult], part: int) -> list[PubResult]:
    return [
        one if one.code else PubResult(one.seq, one.duplicate, count=one.count, shard=part)
        for one in results
    ]


def _refusals(config: StreamConfig, batch: MessageBatch, parts: I64Array) -> dict[int, PubResult]:
    """By position, why messages cannot be in any shard of the stream."""
    expected, rollups = batch.expected or {}, batch.rollups or {}
    refused: dict[int, PubResult] = {}
    for at in sorted(expected.keys() | rollups.keys()):
        wanted = expected.get(at)
        if wanted is not None and wanted.last_seq is not None:
            reason = "an expected last sequence of the stream is not supported with several shards"
            refused[at] = PubResult(0, code=_SHARDED, detail=reason)
            continue
        problem = _refusal(config, int(parts[at]), wanted, rollups.get(at))
        if problem is not None:
            refused[at] = problem
    return refused


def _refusal(
    config: StreamConfig, part: int, expected: Expected | None, rollup: Rollup | None
) -> PubResult | None:
    if rollup == "all":
        reason = "with several shards a message can roll up its subject, but not the stream"
        return PubResult(0, code=errors.ROLLUP_REFUSED.code, detail=reason)
    if expected is None or expected.last_subject_seq_subject is None:
        return None
    if shard_of_filter(expected.last_subject_seq_subject, config.shards, config.shard_by) != part:
        reason = "the expected subject must be entirely in the same shard as the message"
        return PubResult(0, code=_SHARDED, detail=reason)
    return None


def _check_atomic(parts: I64Array, refused: dict[int, PubResult]) -> None:
    if refused:
        at, first = min(refused.items())
        raise ApiError(errors.REGISTRY[first.code], f"message {at}: {first.detail}", applied=False)
    if (parts != parts[0]).any():
        reason = "all messages of an atomic batch must belong to the same shard"
        raise ApiError(errors.SHARDED_UNSUPPORTED, reason, applied=False)


@dataclass(slots=True, eq=False)
class _Gathering:
    """Collects the outcomes of one batch's shards, until the last of ``waiting`` has answered."""

    count: int
    refused: dict[int, PubResult]
    waiting: int
    done: Done
    _parts: list[tuple[I64Array, list[PubResult]]] = field(default_factory=list)
    _errors: list[ApiError] = field(default_factory=list)

    def settle(self, part: int, positions: I64Array, outcome: Outcome) -> None:
        """Set the outcome of the messages at ``positions``, which went to shard ``part``."""
        if isinstance(outcome, ApiError):
            self._errors.append(outcome)
            lost = PubResult(0, code=outcome.spec.code, detail=outcome.detail, count=len(positions))
            self._parts.append((positions, [lost]))
        else:
            self._parts.append((positions, _in_shard(outcome, part)))
        self.waiting -= 1
        if not self.waiting:
            failed = len(self._errors) == len(self._parts) and not self.refused
            self.done(self._errors[0] if failed else self.results())

    def results(self) -> list[PubResult]:
        """Return all outcomes in the order of the messages."""
        if len(self._parts) == 1 and not self.refused:
            return self._parts[0][1]
        by_position = dict(self.refused)
        for positions, runs in self._parts:
            each = [one for run in runs for one in run.each()]
            by_position.update(zip(positions.tolist(), each, strict=True))
        return [by_position[at] for at in range(self.count)]

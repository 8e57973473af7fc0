"""Publishing to a stream with several shards: split by subject, answered in request order.

Messages of a request keep their order within a shard. If a shard refuses or does not answer, this
is only the outcome of its own messages.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from contrail_common import errors
from contrail_common.arrays import distinct
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import Expected, Rollup, StreamConfig
from contrail_common.partition import shard_of, shard_of_filter, shards_of
from contrail_common.texts import I64Array, as_u32
from contrail_link.contract.publish import PubResult
from contrail_link.gathering import Gathering
from contrail_storage.replica.entries import Content, Done, Outcome
from contrail_storage.replica.shard import Shard

Send = Callable[[Shard, Content, Done], None]
"""Sends messages to one shard. Raises ApiError if it certainly does not store them."""
_SHARDED: Final = errors.SHARDED_UNSUPPORTED.code


def scatter(
    shards: Sequence[Shard],
    content: Content,
    check: Callable[[Shard], None],
    send: Send,
    done: Done,
) -> None:
    """Send each message to its shard; ``done`` gets runs in the order of the messages.

    Raises SHARDED_UNSUPPORTED for an atomic batch over several shards, and what ``check`` raises
    for one of the shards. Then nothing was sent.
    """
    if isinstance(content, MessageBatch):
        _scatter_batch(shards, content, check, send, done)
        return
    config = shards[0].config
    number = shard_of(content.subject, config.shards, config.shard_by)
    check(shards[number])
    refused = _refusal(config, number, content.expected, content.rollup)
    if refused is not None:
        # In a later turn, as all answers are: the caller still has work to do after this call.
        asyncio.get_running_loop().call_soon(done, [refused])
        return
    send(shards[number], content, partial(_number_results, done, number))


def _scatter_batch(
    shards: Sequence[Shard],
    batch: MessageBatch,
    check: Callable[[Shard], None],
    send: Send,
    done: Done,
) -> None:
    loop = asyncio.get_running_loop()
    config = shards[0].config
    of_subjects = shards_of(batch.subjects, config.shards, config.shard_by).astype(np.int64)
    numbers = of_subjects[as_u32(batch.subject_index)]
    refused = _refusals(config, batch, numbers)
    if batch.atomic:
        _check_atomic(numbers, refused)
    elif refused:
        # To no shard; the others of the batch are sent.
        numbers[list(refused)] = -1
    used = [number for number in distinct(numbers).tolist() if number >= 0]
    for number in used:
        check(shards[number])
    gathering = Gathering(batch.count, refused, len(used), done)
    if not used:
        loop.call_soon(done, gathering.results())
    for number in used:
        positions = np.flatnonzero(numbers == number)
        own = batch if len(positions) == batch.count else batch.select(positions)
        settle = partial(_number_results, partial(gathering.settle, positions), number)
        try:
            send(shards[number], own, settle)
        except ApiError as error:
            # In a later turn, as all answers are.
            loop.call_soon(settle, error)


def _number_results(done: Done, number: int, outcome: Outcome) -> None:
    done(outcome if isinstance(outcome, ApiError) else _in_shard(outcome, number))


def _in_shard(results: list[PubResult], number: int) -> list[PubResult]:
    return [
        one if one.code else PubResult(one.seq, one.duplicate, count=one.count, shard=number)
        for one in results
    ]


def _refusals(config: StreamConfig, batch: MessageBatch, numbers: I64Array) -> dict[int, PubResult]:
    """By position, why messages cannot be in any shard of the stream."""
    expected, rollups = batch.expected or {}, batch.rollups or {}
    refused: dict[int, PubResult] = {}
    for at in sorted(expected.keys() | rollups.keys()):
        wanted = expected.get(at)
        if wanted is not None and wanted.last_seq is not None:
            reason = "an expected last sequence of the stream is not supported with several shards"
            refused[at] = PubResult(0, code=_SHARDED, detail=reason)
            continue
        problem = _refusal(config, int(numbers[at]), wanted, rollups.get(at))
        if problem is not None:
            refused[at] = problem
    return refused


def _refusal(
    config: StreamConfig, number: int, expected: Expected | None, rollup: Rollup | None
) -> PubResult | None:
    if rollup == "all":
        reason = "with several shards a message can roll up its subject, but not the stream"
        return PubResult(0, code=errors.ROLLUP_REFUSED.code, detail=reason)
    if expected is None or expected.last_subject_seq_subject is None:
        return None
    if shard_of_filter(expected.last_subject_seq_subject, config.shards, config.shard_by) != number:
        reason = "the expected subject must be entirely in the same shard as the message"
        return PubResult(0, code=_SHARDED, detail=reason)
    return None


def _check_atomic(numbers: I64Array, refused: dict[int, PubResult]) -> None:
    if refused:
        at, first = min(refused.items())
        raise ApiError(errors.REGISTRY[first.code], f"message {at}: {first.detail}", applied=False)
    if (numbers != numbers[0]).any():
        reason = "all messages of an atomic batch must belong to the same shard"
        raise ApiError(errors.SHARDED_UNSUPPORTED, reason, applied=False)

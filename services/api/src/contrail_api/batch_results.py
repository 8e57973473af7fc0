"""What became of each message of a batch, and how that is told."""

from collections.abc import Sequence
from typing import Final

import msgspec

from contrail_common.errors import ApiError
from contrail_edge.http.problems import Problem, Problems
from contrail_link.contract import PubResult

Result = PubResult | ApiError
"""Outcome of a run of messages as storage answered it, or why one message was not passed on."""

_encoder: Final = msgspec.json.Encoder()


class BatchResult(msgspec.Struct):
    """Where one message was stored, or the ``problem`` that prevented it.

    ``duplicate`` is true if a message with the same id was already stored, under this ``seq``.
    ``shard`` is present for a stream with several shards.
    """

    seq: int | msgspec.UnsetType = msgspec.UNSET
    duplicate: bool | msgspec.UnsetType = msgspec.UNSET
    problem: Problem | msgspec.UnsetType = msgspec.UNSET
    shard: int | msgspec.UnsetType = msgspec.UNSET


class BatchResults(msgspec.Struct):
    """The result of each message, in order."""

    results: list[BatchResult]


def results_of(refused: dict[int, ApiError], answered: Sequence[PubResult]) -> list[Result]:
    """The outcomes of all messages in order: those ``refused``, by position, and the others."""
    if not refused:
        return list(answered)
    others = iter([each for run in answered for each in run.each()])
    count = len(refused) + sum(run.count for run in answered)
    return [refused[at] if at in refused else next(others) for at in range(count)]


def all_stored(results: Sequence[Result]) -> bool:
    """Whether every message is in the stream."""
    return not any(isinstance(one, ApiError) or one.code for one in results)


def encode_results(results: Sequence[Result]) -> bytes:
    """The JSON of a :class:`BatchResults`."""
    return b'{"results":[' + _encode(results, b",") + b"]}"


def encode_lines(results: Sequence[Result]) -> bytes:
    """A line with the JSON of a :class:`BatchResult` for each message."""
    return _encode(results, b"\n") + b"\n" if results else b""


def _encode(results: Sequence[Result], separator: bytes) -> bytes:
    problems = Problems()
    return separator.join([_encode_run(one, separator, problems) for one in results])


def _encode_run(one: Result, separator: bytes, problems: Problems) -> bytes:
    if isinstance(one, ApiError):
        return _encoder.encode(BatchResult(problem=problems.of(one)))
    if one.code:
        refusal = _encoder.encode(BatchResult(problem=problems.of(one)))
        return separator.join([refusal] * one.count)
    # The numbers are encoded as one list, and the rest of each object is put between them: that
    # takes a tenth of the time of an object for each message.
    head, tail = b'{"seq":', b',"duplicate":true}' if one.duplicate else b',"duplicate":false}'
    if one.shard is not None:
        tail = tail[:-1] + b',"shard":%d}' % one.shard
    numbers = _encoder.encode(list(range(one.seq, one.seq + one.count)))[1:-1]
    return head + numbers.replace(b",", tail + separator + head) + tail

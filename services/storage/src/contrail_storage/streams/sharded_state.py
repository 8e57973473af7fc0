"""Several shards as one stream: finds shards, sums up states, and checks purges."""

from collections.abc import Sequence

import msgspec

from contrail_common import errors
from contrail_common.cursors import Cursor, read_cursor
from contrail_common.errors import ApiError, FieldProblem
from contrail_common.model import DataLoss, StreamState
from contrail_common.partition import shard_of_filter
from contrail_storage.replica.shard import Shard


def no_such_shard(shards: int) -> ApiError:
    """The refusal of a request that names a shard which the stream does not have."""
    there = f"shards 0 to {shards - 1}" if shards > 1 else "only shard 0"
    return _bad("shard", f"the stream has {there}")


def shard_needed(shards: int, why: str = "because each shard has its own sequences") -> ApiError:
    """The refusal of a request that must name one shard."""
    return _bad("shard", f"the stream has {shards} shards: give one, {why}")


def _bad(field: str, message: str) -> ApiError:
    problem = FieldProblem(field, message)
    return ApiError(errors.INVALID_FIELD, f"{field}: {message}", [problem], applied=False)


def incarnation_of(shards: Sequence[Shard]) -> str:
    """The incarnation of the stream of ``shards`` (STREAM_NOT_FOUND)."""
    record = shards[0].machine.record
    if record is None:
        raise ApiError(errors.STREAM_NOT_FOUND)
    return record.incarnation


def own_cursor(text: str, shards: Sequence[Shard]) -> Cursor:
    """Read a cursor of the stream of ``shards``; INVALID_FIELD for one of another stream."""
    try:
        cursor = read_cursor(text)
    except ValueError as error:
        raise bad_cursor(str(error)) from None
    if cursor.incarnation != incarnation_of(shards) or len(cursor.next_seqs) != len(shards):
        raise bad_cursor("belongs to another stream, or to this stream before it was re-created")
    return cursor


def bad_cursor(message: str) -> ApiError:
    """The refusal of a cursor."""
    return _bad("cursor", message)


def sum_states(states: Sequence[StreamState]) -> StreamState:
    """Return the state of a stream from the states of its shards.

    Counts are summed. First sequences and times are the lowest, last ones the highest. All shards
    have the same consumers.
    """
    first = [state.first_ts_ns for state in states if state.first_ts_ns]
    return StreamState(
        messages=sum(state.messages for state in states),
        bytes=sum(state.bytes for state in states),
        first_seq=min(state.first_seq for state in states),
        first_ts_ns=min(first, default=0),
        last_seq=max(state.last_seq for state in states),
        last_ts_ns=max(state.last_ts_ns for state in states),
        num_subjects=sum(state.num_subjects for state in states),
        num_deleted=sum(state.num_deleted for state in states),
        consumer_count=min(state.consumer_count for state in states),
    )


def sum_losses(losses: Sequence[DataLoss | None]) -> DataLoss | None:
    """Return the newest accepted data loss of a stream, from the losses of its shards.

    Ranges of sequences belong to one shard, so they are left out.
    """
    there = [loss for loss in losses if loss is not None]
    if not there:
        return None
    newest = max(there, key=lambda loss: loss.accepted_ns)
    messages = sum(loss.messages for loss in there if loss.accepted_ns == newest.accepted_ns)
    return msgspec.structs.replace(newest, messages=messages, ranges=[])


def concerned(shards: Sequence[Shard], subject: str) -> list[Shard]:
    """The shards of a stream that can have messages of the filter ``subject`` ("": all)."""
    config = shards[0].config
    number = shard_of_filter(subject or ">", config.shards, config.shard_by)
    return list(shards) if number is None else [shards[number]]


def check_purge(shards: Sequence[Shard], subject: str, up_to_seq: int, keep: int) -> list[Shard]:
    """Return the shards that a purge of the stream affects; refuse it if it must name a shard."""
    if up_to_seq:
        raise shard_needed(len(shards))
    found = concerned(shards, subject)
    if keep and len(found) > 1:
        raise shard_needed(len(shards), "because messages of different shards have no common order")
    return found

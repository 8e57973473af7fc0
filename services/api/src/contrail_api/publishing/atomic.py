"""Atomic batches: all messages of a request are stored with consecutive sequences, or none is."""

from typing import Final

import msgspec

from contrail_api.publishing.candidates import Admitted
from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError, ErrorSpec, FieldProblem
from contrail_common.texts import as_u32
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.responses import Response
from contrail_edge.inputs.negotiation import MSGPACK_TYPE
from contrail_link.contract.publish import PublishAck

# The first is the limit of JetStream. The second keeps the batch within one log entry.
MESSAGES_MAX: Final = 1_000
BYTES_MAX: Final = 2 << 20
_encode: Final = msgspec.json.Encoder().encode
_packer: Final = msgspec.msgpack.Encoder()


class AtomicAck(msgspec.Struct):
    """The messages were stored, under the sequences from ``first_seq`` to ``last_seq``.

    ``shard`` is that of a stream that has several.
    """

    stream: str
    first_seq: int
    last_seq: int
    count: int
    shard: int | msgspec.UnsetType = msgspec.UNSET


def atomic_batch(asked: Admitted) -> MessageBatch:
    """Return the batch to store as one; raise ApiError if it breaks a rule.

    The rules are JetStream's. Only the first message may have an expected sequence of the stream or
    roll up the stream. Only the first message of each subject may have an expectation on the
    subject or roll it up. No message may have an expected message id.
    """
    if asked.refused:
        # One invalid message refuses all. Report the first.
        at, error = min(asked.refused.items())
        fields = [FieldProblem(f"/messages/{at}", error.detail or error.spec.title)]
        raise ApiError(error.spec, f"message {at}: {error}", fields, applied=False)
    batch = asked.batch
    if not batch.count:
        raise invalid_field("/messages", "an atomic batch must contain at least one message")
    if batch.count > MESSAGES_MAX or batch.size() > BYTES_MAX:
        limit = f"an atomic batch must not exceed {MESSAGES_MAX} messages or {BYTES_MAX} bytes"
        raise ApiError(errors.ATOMIC_TOO_LARGE, limit, applied=False)
    seen: set[int] = set()
    index = as_u32(batch.subject_index).tolist()
    for at, number in enumerate(index):
        problem = _problem(batch, at, first_of_subject=number not in seen)
        if problem is not None:
            spec, message = problem
            raise ApiError(spec, message, [FieldProblem(f"/messages/{at}", message)], applied=False)
        seen.add(number)
    batch.atomic = True
    return batch


def _problem(
    batch: MessageBatch, at: int, *, first_of_subject: bool
) -> tuple[ErrorSpec, str] | None:
    expected = (batch.expected or {}).get(at)
    rollup = (batch.rollups or {}).get(at)
    if expected is not None:
        if expected.last_msg_id is not None:
            return (
                errors.ATOMIC_UNSUPPORTED,
                "a message in an atomic batch cannot set an expected last message id",
            )
        if expected.last_seq is not None and at:
            message = (
                "only the first message of an atomic batch can set the stream's expected "
                "last sequence"
            )
            return errors.WRONG_LAST_SEQUENCE_IN_BATCH, message
        if expected.last_subject_seq is not None and not first_of_subject:
            message = "an earlier message in the batch has the same subject"
            return errors.WRONG_LAST_SEQUENCE_IN_BATCH, message
    if rollup == "all" and at:
        return (
            errors.ROLLUP_REFUSED,
            "only the first message of an atomic batch can roll up the whole stream",
        )
    if rollup is not None and not first_of_subject:
        message = "only the first message of its subject in an atomic batch can roll up the subject"
        return errors.ROLLUP_REFUSED, message
    return None


def atomic_answer(ack: PublishAck, form: str) -> Response:
    """Return 201 with the range of sequences; raise ApiError if nothing was stored."""
    for result in ack.results:
        if result.code:
            raise errors.from_code(result.code, result.detail)
    first_seq = ack.results[0].seq if ack.results else 0
    count = sum(result.count for result in ack.results)
    answer = AtomicAck(ack.stream, first_seq, first_seq + count - 1, count)
    if ack.results and ack.results[0].shard is not None:
        answer.shard = ack.results[0].shard
    body = _packer.encode(answer) if form == MSGPACK_TYPE else _encode(answer)
    return Response(201, body, form.encode(), [(b"durability", ack.durability.encode())])

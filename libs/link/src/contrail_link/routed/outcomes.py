"""Decides which requests may be sent again after an error, and what an answer then proves."""

from enum import Enum
from typing import Any, Final

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_link.contract.publish import PublishAck, PubResult
from contrail_link.contract.remote import Goal, OnLoss
from contrail_link.tcp.methods import DeclaredMethod

_AWAY: Final = (errors.NOT_READY, errors.SHUTTING_DOWN)
_REPEATED_ACKS: Final = ("ack", "term")


class Kind(Enum):
    """The meaning of an error for the request that got it."""

    FINAL = "the answer of the right node"
    ELSEWHERE = "no effect: another node may answer"
    LOST = "sent, and nobody knows the outcome"


def kind_of(error: ApiError) -> Kind:
    """Return what an error of one node means for the request.

    A refusal that names a leader comes from a node that cannot know: it does not lead the stream,
    or (STREAM_NOT_FOUND, NO_STREAM_FOR_SUBJECT) it follows the meta group.
    """
    if error.spec is errors.OUTCOME_UNKNOWN:
        return Kind.LOST
    if error.spec is errors.NOT_LEADER or error.spec in _AWAY:
        return Kind.ELSEWHERE if error.applied is False else Kind.LOST
    return Kind.ELSEWHERE if error.leader else Kind.FINAL


def may_repeat(method: DeclaredMethod, arguments: tuple[Any, ...]) -> bool:
    """Return True if a request that was sent and lost may be sent again."""
    if method.name == "acknowledge":
        # A repeated `nak` or `in_progress` could hit the next delivery.
        return all(item.kind in _REPEATED_ACKS for item in arguments[2])
    # What a leader undoes when its caller is gone can be begun again. Restores are not: the first
    # try holds the name of the stream.
    return method.on_loss is OnLoss.REPEAT or (
        method.on_loss is OnLoss.REFUSE and method.route.goal is Goal.LEADER
    )


def with_rest(method: DeclaredMethod, arguments: tuple[Any, ...], rest_ns: int) -> tuple[Any, ...]:
    """Return the arguments of a request that waits, with the rest of its time (at least 1 ns)."""
    rest_ns = max(1, rest_ns)
    if method.name == "erasure":
        return (arguments[0], rest_ns)
    field = "expires_ns" if method.name == "pull" else "wait_ns"
    return (msgspec.structs.replace(arguments[0], **{field: rest_ns}),)


def of_repeated(ack: PublishAck) -> PublishAck:
    """Return the outcome of a publish that was sent twice.

    A message that the second try refuses may have been stored by the first.
    """
    code = errors.OUTCOME_UNKNOWN.code
    results = [
        PubResult(0, code=code, detail=one.detail, count=one.count) if one.code else one
        for one in ack.results
    ]
    return PublishAck(ack.stream, results, ack.durability)


def no_leader(error: ApiError) -> ApiError:
    """Return the answer to a request that found no leader in time, and had no effect."""
    if error.spec is errors.NOT_LEADER or error.leader:
        detail = "no node leads the stream"
        return ApiError(errors.NOT_READY, detail, retry_after_s=1, applied=False)
    return error


def unknown(error: ApiError) -> ApiError:
    """Return the answer to a change whose outcome stayed unknown after ``error``."""
    if error.spec is errors.OUTCOME_UNKNOWN:
        return error
    return ApiError(errors.OUTCOME_UNKNOWN, f"the connection was lost; then: {error}")

"""Publishing over the link for callers that wait."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage
from contrail_link.contract.publish import PublishAck, PublishContent, PublishLink, PublishOutcome

_K = TypeVar("_K")

_STREAM_CHANGED: Final = (errors.STREAM_NOT_FOUND.code, errors.SUBJECT_NOT_CAPTURED.code)


def refusal_by_subject(code: int, detail: str) -> ApiError:
    """Return the error of a refused message that was published by its subject alone.

    After storage has chosen the stream of a message, and before it applies the message, the stream
    can be deleted or given other subjects. To the publisher, no stream captures the subject.
    """
    if code in _STREAM_CHANGED:
        return ApiError(errors.NO_STREAM_FOR_SUBJECT, applied=False)
    return errors.from_code(code, detail)


def positions_by_subject(
    messages: Sequence[PublishMessage], key_of: Callable[[str], _K]
) -> dict[_K, list[int]]:
    """Return the positions of ``messages`` by a key of their subjects.

    ``key_of`` is called once for each subject.
    """
    by_key: dict[_K, list[int]] = {}
    by_subject: dict[str, list[int]] = {}
    for at, message in enumerate(messages):
        positions = by_subject.get(message.subject)
        if positions is None:
            positions = by_key.setdefault(key_of(message.subject), [])
            by_subject[message.subject] = positions
        positions.append(at)
    return by_key


async def publish(link: PublishLink, stream: str, content: PublishContent) -> PublishAck:
    """Store messages as ``link.publish_then`` does; return when they are durable.

    Raises ApiError if the whole request was refused, or if all outcomes are unknown. If storage is
    away for a moment and the request had no effect, it is sent again.
    """
    refused_at_s: float | None = None
    while True:
        outcome = await outcome_of(link, stream, content)
        if isinstance(outcome, PublishAck):
            return outcome
        if refused_at_s is None:
            refused_at_s = asyncio.get_running_loop().time()
        # Only a refusal without effect is sent again. After an unknown outcome, that is the
        # caller's choice, who knows whether the messages have ids.
        if not await link.may_retry(outcome, refused_at_s):
            raise outcome


async def outcome_of(link: PublishLink, stream: str, content: PublishContent) -> PublishOutcome:
    """Publish once, and return the outcome."""
    outcome: asyncio.Future[PublishOutcome] = asyncio.get_running_loop().create_future()

    def done(known: PublishOutcome) -> None:
        if not outcome.done():  # the caller may have been cancelled
            outcome.set_result(known)

    try:
        link.publish_then(stream, content, done)
    except ApiError as refusal:
        return refusal
    return await outcome

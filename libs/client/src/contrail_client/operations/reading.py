"""Calls that read and delete messages without a consumer."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from contrail_client.calls import (
    JSON,
    LONG_POLL_S,
    Answer,
    Call,
    Page,
    call,
    given,
    item_problem,
    json_as,
    nothing,
    path_of,
    texts,
    with_staleness,
)
from contrail_client.errors import ApiProblem
from contrail_client.models import Consistency, Range, StoredMessage
from contrail_client.times import Duration, Time


class _Found(msgspec.Struct, frozen=True):
    """A stored message, or why it is not returned."""

    problem: dict[str, Any] | None = None


class _Many(msgspec.Struct, frozen=True):
    results: tuple[msgspec.Raw, ...]


class _LastPage(msgspec.Struct, frozen=True):
    messages: tuple[StoredMessage, ...]
    next_page_token: str | None = None


_many = json_as(_Many)
_found = msgspec.json.Decoder(_Found)
_one = msgspec.json.Decoder(StoredMessage)
_last = json_as(_LastPage)
_message = json_as(StoredMessage)
_range = json_as(Range)
_ACCEPT_JSON: Final = (("Accept", JSON),)


def get_message(
    stream: str, seq: int, *, shard: int | None = None, consistency: Consistency | None = None
) -> Call[StoredMessage]:
    """One message by its sequence."""
    return call(
        "GET",
        path_of("streams", stream, "messages", seq),
        _message,
        query={"shard": shard, "consistency": consistency},
        headers=_ACCEPT_JSON,
    )


def get_messages(
    stream: str,
    *,
    seqs: Sequence[int] | None,
    subjects: Sequence[str] | None,
    shard: int | None = None,
    consistency: Consistency | None = None,
) -> Call[tuple[StoredMessage | ApiProblem, ...]]:
    """Messages by their sequences, or the newest of each subject."""

    def parse(answer: Answer) -> tuple[StoredMessage | ApiProblem, ...]:
        return tuple(map(_result, _many(answer).results))

    return call(
        "POST",
        path_of("streams", stream, "messages", "get"),
        parse,
        query={"shard": shard, "consistency": consistency},
        json=given(
            seqs=None if seqs is None else list(seqs),
            subjects=None if subjects is None else list(texts(subjects)),
        ),
        headers=_ACCEPT_JSON,
        repeatable=True,
    )


def _result(raw: msgspec.Raw) -> StoredMessage | ApiProblem:
    problem = _found.decode(raw).problem
    return _one.decode(raw) if problem is None else item_problem(problem)


def read_range(  # noqa: PLR0913 - all of them are named
    stream: str,
    *,
    from_seq: int | str | None,
    start_time: Time | None,
    subject: str | None,
    limit: int | None,
    max_bytes: int | None,
    wait: Duration | None,
    shard: int | None = None,
    consistency: Consistency | None = None,
) -> Call[Range]:
    """Messages in order; with `wait` the server waits for the first one.

    `from_seq` is a sequence, or the cursor of the previous answer if all shards are read together.
    """
    cursor = from_seq if isinstance(from_seq, str) else None
    seq = None if isinstance(from_seq, str) else from_seq

    def parse(answer: Answer) -> Range:
        if not answer.body:  # 204: nothing came within `wait`
            return Range((), seq or 0, cursor=cursor)
        return _range(answer)

    query: dict[str, Any] = {
        "from_seq": seq,
        "start_time": start_time,
        "subject": subject,
        "limit": limit,
        "max_bytes": max_bytes,
        "wait": wait,
        "shard": shard,
        "cursor": cursor,
        "consistency": consistency,
    }
    return call(
        "GET",
        path_of("streams", stream, "messages"),
        with_staleness(parse),
        query=query,
        headers=_ACCEPT_JSON,
        wait_s=LONG_POLL_S if wait else 0.0,
    )


def last_messages(
    stream: str,
    *,
    subject: str | None,
    up_to_seq: int | None,
    up_to_time: Time | None,
    token: str | None,
    shard: int | None = None,
    consistency: Consistency | None = None,
) -> Call[Page[StoredMessage]]:
    """One page of the newest messages of all subjects."""
    query: dict[str, Any] = {
        "subject": subject,
        "up_to_seq": up_to_seq,
        "up_to_time": up_to_time,
        "page_token": token,
        "shard": shard,
        "consistency": consistency,
    }

    def parse(answer: Answer) -> Page[StoredMessage]:
        found = _last(answer)
        return Page(found.messages, found.next_page_token)

    path = path_of("streams", stream, "last")
    return call("GET", path, parse, query=query, headers=_ACCEPT_JSON)


def delete_message(stream: str, seq: int, *, shard: int | None = None) -> Call[None]:
    """Delete one message."""
    return call(
        "DELETE", path_of("streams", stream, "messages", seq), nothing, query={"shard": shard}
    )

"""Calls that manage consumers, pull from them and acknowledge."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec
from msgspec.structs import force_setattr

from contrail_client.calls import (
    LONG_POLL_S,
    MERGE_PATCH,
    MSGPACK,
    Answer,
    Call,
    Page,
    call,
    given,
    item_problem,
    json_as,
    nothing,
    path_of,
    precondition,
    with_etag,
)
from contrail_client.columns import Columns, messages_of
from contrail_client.configs import ConsumerConfig
from contrail_client.errors import AcksRefused, ApiProblem
from contrail_client.models import ConsumerInfo, D, Delivered, Delivery, Pull
from contrail_client.times import Duration

AckKind = Literal["ack", "nak", "term", "in_progress"]


class _Pulled(msgspec.Struct):
    """The answer to a pull: columns with one token for all of them, or messages with their own.

    Messages that are delivered again are never in columns, and servers of 0.2 know none.
    """

    messages: list[Delivered] = []
    cols: Columns | None = None
    num_pending: int = 0
    ack_token: str = ""


class _AckResult(msgspec.Struct):
    ok: bool = False
    problem: dict[str, Any] | None = None


class _AckResults(msgspec.Struct):
    results: list[_AckResult]


_ALL = ".*"
"""Ends a token that is for all messages of its head."""
_COLUMNS = f"{MSGPACK}; form=columns"
_pulled = msgspec.msgpack.Decoder(_Pulled)
_info = with_etag(json_as(ConsumerInfo))
_page = json_as(Page[ConsumerInfo])
_ack_results = json_as(_AckResults)


def create(stream: str, name: str | None, config: ConsumerConfig) -> Call[ConsumerInfo]:
    """Create a consumer: durable with a name, otherwise ephemeral and named by the server.

    An existing one with an identical configuration is returned.
    """
    body: dict[str, Any] = {**config}
    if name is not None:
        path_of("streams", stream, "consumers", name)  # refuses names that no path can have
        body["name"] = name
    # Without a name, each attempt would create another consumer.
    named = bool(body.get("name") or body.get("durable_name"))
    path = path_of("streams", stream, "consumers")
    return call("POST", path, _info, json=body, repeatable=named)


def put(
    stream: str,
    name: str,
    config: ConsumerConfig,
    *,
    if_match: str | None = None,
    only_create: bool = False,
) -> Call[ConsumerInfo]:
    """Create the durable consumer, or replace its whole configuration."""
    return call(
        "PUT",
        path_of("streams", stream, "consumers", name),
        _info,
        json=config,
        headers=precondition(if_match, only_create),
    )


def update(
    stream: str, name: str, changes: Mapping[str, Any], *, if_match: str | None
) -> Call[ConsumerInfo]:
    """Change the given fields; None restores a default (RFC 7396)."""
    headers = (("Content-Type", MERGE_PATCH), *precondition(if_match, only_create=False))
    path = path_of("streams", stream, "consumers", name)
    return call("PATCH", path, _info, json=changes, headers=headers)


def get(stream: str, name: str) -> Call[ConsumerInfo]:
    """The configuration and progress of a consumer."""
    return call("GET", path_of("streams", stream, "consumers", name), _info)


def page(stream: str, *, limit: int | None, token: str | None) -> Call[Page[ConsumerInfo]]:
    """One page of the consumers of a stream."""
    query = {"limit": limit, "page_token": token}
    return call("GET", path_of("streams", stream, "consumers"), _page, query=query)


def delete(stream: str, name: str) -> Call[None]:
    """Remove the consumer; its waiting pulls end."""
    return call("DELETE", path_of("streams", stream, "consumers", name), nothing)


def pull(
    stream: str,
    name: str,
    *,
    batch: int,
    expires: Duration | None,
    max_bytes: int | None,
    no_wait: bool | None,
    kind: type[D],
) -> Call[Pull[D]]:
    """Pull up to `batch` messages; the server waits up to `expires` for the first one.

    The messages are made as `kind`; pass the result to `bound`.
    """

    def parse(answer: Answer) -> Pull[D]:
        if not answer.body:  # 204: nothing came in time
            return Pull()
        found = _pulled.decode(answer.body)
        if found.cols is None:
            messages = [_delivery(kind, one, one.ack_token) for one in found.messages]
        else:
            head = found.ack_token.removesuffix(_ALL)
            rows = enumerate(messages_of(found.cols))
            messages = [_delivery(kind, one, f"{head}.{at}") for at, one in rows]
        return Pull(tuple(messages), found.num_pending)

    body = given(batch=batch, expires=expires, max_bytes=max_bytes, no_wait=no_wait)
    return call(
        "POST",
        path_of("streams", stream, "consumers", name, "next"),
        parse,
        json=body,
        headers=(("Accept", _COLUMNS),),
        # The timeout of the answer allows for the longest wait, whatever `expires` is.
        wait_s=LONG_POLL_S,
    )


def acknowledge(
    stream: str,
    name: str,
    kind: AckKind,
    deliveries: Sequence[Delivery],
    *,
    delay: Duration | None = None,
    reason: str | None = None,
    sync: bool = False,
) -> Call[None]:
    """Acknowledge deliveries in one request; raises `AcksRefused` if any of them was refused.

    With `sync` the answer comes once all of them are durable.
    """

    def parse(answer: Answer) -> None:
        results = _ack_results(answer).results
        # Results are matched by position.
        if len(results) != len(acks):
            raise ValueError(f"{len(results)} results for {len(acks)} acknowledgements")
        refused: dict[int, ApiProblem] = {}
        at = 0
        for result, count in zip(results, counts, strict=True):
            if not result.ok:
                problem = item_problem(result.problem or {})
                refused |= dict.fromkeys(range(at, at + count), problem)
            at += count
        if refused:
            raise AcksRefused(refused)

    grouped = list(_grouped([delivery.ack_token for delivery in deliveries]))
    acks = [
        given(token=token, kind=kind, delay=delay, reason=reason, ranges=ranges)
        for token, ranges, _ in grouped
    ]
    counts = [count for _, _, count in grouped]
    return call(
        "POST",
        path_of("streams", stream, "consumers", name, "ack"),
        parse,
        json={"acks": acks, "sync": sync},
    )


def bound(found: Pull[D], consumer: object) -> Pull[D]:
    """Set the consumer that acknowledges the pulled messages, and return them."""
    for each in found:
        force_setattr(each, "_consumer", consumer)  # safe: nobody else has the message yet
    return found


def _delivery(kind: type[D], one: Delivered, token: str) -> D:
    text: str | None = None
    with suppress(UnicodeDecodeError):
        text = one.data.decode()
    return kind(
        stream=one.stream,
        seq=one.seq,
        subject=one.subject,
        time=one.time,
        headers=one.headers,
        data=text,
        data_base64=one.data if text is None else None,
        shard=one.shard,
        consumer_seq=one.consumer_seq,
        num_delivered=one.num_delivered,
        num_pending=one.num_pending,
        ack_token=token,
    )


def _grouped(tokens: Sequence[str]) -> Iterator[tuple[str, list[list[int]] | None, int]]:
    """Tokens to send, with their ranges and the number of consecutive ``tokens`` that each is for.

    A token is a head and a position in it. Ascending positions of one head are one token.
    """
    at = 0
    while at < len(tokens):
        head, point, first = tokens[at].rpartition(".")
        end, ranges = at + 1, []
        if point and first.isdecimal():
            ranges.append([int(first), int(first)])
        while ranges and end < len(tokens):
            other, _, text = tokens[end].rpartition(".")
            if other != head or not text.isdecimal() or int(text) <= ranges[-1][1]:
                break
            if int(text) > ranges[-1][1] + 1:
                ranges.append([int(text), int(text)])
            ranges[-1][1] = int(text)
            end += 1
        if end == at + 1:
            yield tokens[at], None, 1
        else:
            yield f"{head}{_ALL}", ranges, end - at
        at = end

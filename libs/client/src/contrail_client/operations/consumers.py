"""Calls that manage consumers, pull from them and acknowledge."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import msgspec
from msgspec.structs import force_setattr

from contrail_client.calls import (
    JSON,
    LONG_POLL_S,
    MERGE_PATCH,
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
from contrail_client.configs import ConsumerConfig
from contrail_client.errors import AcksRefused
from contrail_client.models import ConsumerInfo, D, Delivery, Pull
from contrail_client.times import Duration

AckKind = Literal["ack", "nak", "term", "in_progress"]


class _AckResult(msgspec.Struct):
    ok: bool = False
    problem: dict[str, Any] | None = None


class _AckResults(msgspec.Struct):
    results: list[_AckResult]


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

    The messages are decoded as `kind`; pass the result to `bound`.
    """
    body = given(batch=batch, expires=expires, max_bytes=max_bytes, no_wait=no_wait)
    return call(
        "POST",
        path_of("streams", stream, "consumers", name, "next"),
        _pull_of(kind),
        json=body,
        headers=(("Accept", JSON),),
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
        if len(results) != len(deliveries):
            raise ValueError(f"{len(results)} results for {len(deliveries)} acknowledgements")
        refused = {
            position: item_problem(result.problem or {})
            for position, result in enumerate(results)
            if not result.ok
        }
        if refused:
            raise AcksRefused(refused)

    acks = [
        given(token=delivery.ack_token, kind=kind, delay=delay, reason=reason)
        for delivery in deliveries
    ]
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


@cache
def _pull_of(kind: type[D]) -> Callable[[Answer], Pull[D]]:
    read: Callable[[Answer], Pull[D]] = json_as(Pull[kind])  # type: ignore[valid-type]
    return lambda answer: read(answer) if answer.body else Pull()  # 204: nothing came in time

"""Calls that manage streams."""

from collections.abc import Mapping
from typing import Any

import msgspec

from contrail_client.calls import (
    MERGE_PATCH,
    SNAPSHOT,
    Answer,
    Call,
    Page,
    Request,
    call,
    given,
    json_as,
    nothing,
    path_of,
    precondition,
    query_items,
    with_etag,
    with_staleness,
)
from contrail_client.configs import StreamConfig
from contrail_client.models import Consistency, StreamInfo, SubjectCount


class _Purged(msgspec.Struct):
    purged: int


class _SteppedDown(msgspec.Struct):
    leader: str


_info = with_etag(json_as(StreamInfo))
_page = json_as(Page[StreamInfo])
_subjects = json_as(Page[SubjectCount])
_deleted = json_as(Page[tuple[int, int]])
_purged = json_as(_Purged)
_stepped_down = json_as(_SteppedDown)


def create(name: str, config: StreamConfig) -> Call[StreamInfo]:
    """Create a stream; an existing one with an identical configuration is returned."""
    path_of("streams", name)  # refuses names that no path can have
    body = {**config, "name": name}
    # The server answers an identical stream as if it had been created, so twice is like once.
    return call("POST", path_of("streams"), _info, json=body, repeatable=True)


def put(
    name: str, config: StreamConfig, *, if_match: str | None = None, only_create: bool = False
) -> Call[StreamInfo]:
    """Create the stream, or replace its whole configuration."""
    headers = precondition(if_match, only_create)
    return call("PUT", path_of("streams", name), _info, json=config, headers=headers)


def update(name: str, changes: Mapping[str, Any], *, if_match: str | None) -> Call[StreamInfo]:
    """Change the given fields; None restores a default (RFC 7396)."""
    headers = (("Content-Type", MERGE_PATCH), *precondition(if_match, only_create=False))
    return call("PATCH", path_of("streams", name), _info, json=changes, headers=headers)


def get(name: str, *, consistency: Consistency | None = None) -> Call[StreamInfo]:
    """The configuration and state of a stream."""
    query = {"consistency": consistency}
    return call("GET", path_of("streams", name), with_staleness(_info), query=query)


def page(
    *, subject: str | None, prefix: str | None, limit: int | None, token: str | None
) -> Call[Page[StreamInfo]]:
    """One page of the streams."""
    query = {"subject": subject, "prefix": prefix, "limit": limit, "page_token": token}
    return call("GET", path_of("streams"), _page, query=query)


def subjects(
    name: str,
    *,
    subject: str | None,
    limit: int | None,
    token: str | None,
    consistency: Consistency | None = None,
) -> Call[Page[SubjectCount]]:
    """One page of the subjects that have messages."""
    query = {
        "filter": subject,
        "limit": limit,
        "page_token": token,
        "consistency": consistency,
    }
    return call("GET", path_of("streams", name, "subjects"), _subjects, query=query)


def deleted(
    name: str,
    *,
    token: str | None,
    shard: int | None = None,
    consistency: Consistency | None = None,
) -> Call[Page[tuple[int, int]]]:
    """One page of the deleted sequences: the first and last of each run."""
    query = {"page_token": token, "shard": shard, "consistency": consistency}
    return call("GET", path_of("streams", name, "deleted"), _deleted, query=query)


def seal(name: str) -> Call[StreamInfo]:
    """Make the stream read-only for good."""
    return call("POST", path_of("streams", name, "seal"), _info)


def step_down(name: str, *, preferred: str | None) -> Call[str]:
    """Make another node the leader of the stream; returns its name."""
    path = path_of("streams", name, "leader", "stepdown")
    return call("POST", path, _leader, json=given(preferred=preferred))


def delete(name: str) -> Call[None]:
    """Remove the stream with its messages and consumers."""
    return call("DELETE", path_of("streams", name), nothing)


def purge(
    name: str,
    *,
    subject: str | None,
    up_to_seq: int | None,
    keep: int | None,
    shard: int | None = None,
) -> Call[int]:
    """Remove messages; returns how many. `up_to_seq` itself is not removed."""
    body = given(subject=subject, up_to_seq=up_to_seq, keep=keep, shard=shard)
    return call("POST", path_of("streams", name, "purge"), _purged_count, json=body)


def snapshot(name: str, *, consumers: bool) -> Request:
    """The request for a snapshot of the stream, as an archive."""
    query = query_items({"consumers": None if consumers else False})
    return Request("GET", path_of("streams", name, "snapshot"), query, (("Accept", SNAPSHOT),))


def restore(name: str) -> Call[StreamInfo]:
    """Create a stream from an archive, which is the body of the request."""
    headers = (("Content-Type", SNAPSHOT),)
    return call("PUT", path_of("streams", name, "restore"), _info, headers=headers)


def _leader(answer: Answer) -> str:
    return _stepped_down(answer).leader


def _purged_count(answer: Answer) -> int:
    return _purged(answer).purged

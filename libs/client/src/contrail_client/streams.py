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
)
from contrail_client.configs import StreamConfig
from contrail_client.models import StreamInfo, SubjectCount


class _Purged(msgspec.Struct):
    purged: int


_info = with_etag(json_as(StreamInfo))
_page = json_as(Page[StreamInfo])
_subjects = json_as(Page[SubjectCount])
_deleted = json_as(Page[tuple[int, int]])
_purged = json_as(_Purged)


def create(name: str, config: StreamConfig) -> Call[StreamInfo]:
    """Create the stream; one that exists with an identical configuration is found."""
    path_of("streams", name)  # what cannot stand in a path is no name
    body = {**config, "name": name}
    return call("POST", path_of("streams"), _info, json=body, repeatable=True)


def put(
    name: str, config: StreamConfig, *, if_match: str | None = None, only_create: bool = False
) -> Call[StreamInfo]:
    """Create the stream, or replace its whole configuration."""
    headers = precondition(if_match, only_create)
    return call("PUT", path_of("streams", name), _info, json=config, headers=headers)


def update(name: str, changes: Mapping[str, Any], *, if_match: str | None) -> Call[StreamInfo]:
    """Change the given fields; None takes a field back to its default (RFC 7396)."""
    headers = (("Content-Type", MERGE_PATCH), *precondition(if_match, only_create=False))
    return call("PATCH", path_of("streams", name), _info, json=changes, headers=headers)


def get(name: str) -> Call[StreamInfo]:
    """Configuration and state."""
    return call("GET", path_of("streams", name), _info)


def page(
    *, subject: str | None, prefix: str | None, limit: int | None, token: str | None
) -> Call[Page[StreamInfo]]:
    """A page of the list."""
    query = {"subject": subject, "prefix": prefix, "limit": limit, "page_token": token}
    return call("GET", path_of("streams"), _page, query=query)


def subjects(
    name: str, *, subject: str | None, limit: int | None, token: str | None
) -> Call[Page[SubjectCount]]:
    """A page of the subjects that have messages."""
    query = {"filter": subject, "limit": limit, "page_token": token}
    return call("GET", path_of("streams", name, "subjects"), _subjects, query=query)


def deleted(
    name: str, *, token: str | None, shard: int | None = None
) -> Call[Page[tuple[int, int]]]:
    """A page of the deleted sequences, as first and last of each run."""
    query = {"page_token": token, "shard": shard}
    return call("GET", path_of("streams", name, "deleted"), _deleted, query=query)


def seal(name: str) -> Call[StreamInfo]:
    """Let the stream be read only, from now on."""
    return call("POST", path_of("streams", name, "seal"), _info)


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
    """Remove messages; answers how many."""
    body = given(subject=subject, up_to_seq=up_to_seq, keep=keep, shard=shard)
    return call("POST", path_of("streams", name, "purge"), _purged_count, json=body)


def snapshot(name: str, *, consumers: bool) -> Request:
    """The request for the stream's archive."""
    query = query_items({"consumers": None if consumers else False})
    return Request("GET", path_of("streams", name, "snapshot"), query, (("Accept", SNAPSHOT),))


def restore(name: str) -> Call[StreamInfo]:
    """Make the stream out of an archive, which is the body."""
    headers = (("Content-Type", SNAPSHOT),)
    return call("PUT", path_of("streams", name, "restore"), _info, headers=headers)


def _purged_count(answer: Answer) -> int:
    return _purged(answer).purged

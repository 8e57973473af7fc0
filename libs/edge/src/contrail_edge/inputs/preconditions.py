"""Conditional requests on configurations: an ETag is the configuration's version."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Header

_TAG: Final = re.compile(rb'\s*(?:(W/)?"([\x21\x23-\x7e\x80-\xff]*)")\s*(?:,|$)')
_VERSION: Final = re.compile(rb"[1-9][0-9]{0,17}")

CurrentVersion = Callable[[], Awaitable[int | None]]
"""Looks up the current version; None if the resource does not exist."""


@dataclass(frozen=True, slots=True)
class Preconditions:
    """If-Match and If-None-Match of a request (RFC 9110 section 13.1).

    ``match`` and ``none_match`` are the listed versions; ``match`` is None without If-Match. Tags
    that are not versions match nothing and are left out. ``match_any`` and ``create_only`` stand
    for ``*``.
    """

    match: frozenset[int] | None
    match_any: bool
    none_match: frozenset[int]
    create_only: bool

    async def for_put(self, current: CurrentVersion) -> tuple[int | None, bool]:
        """Return ``if_match`` and ``if_none`` of the storage link for a create-or-replace.

        Raises PRECONDITION_FAILED if the headers cannot be met.
        """
        # Storage checks these forms itself, at the moment of the change.
        if not self.none_match:
            if self.match is None:
                return 0 if self.match_any else None, self.create_only
            if len(self.match) == 1:
                return next(iter(self.match)), self.create_only
        # For the others, check the current version, and let storage require that it is still that.
        version = await current()
        self.check(version)
        return version, self.create_only

    async def for_delete(self, current: Callable[[], Awaitable[int]]) -> int | None:
        """Return ``if_match`` of the storage link for a removal.

        ``current`` looks up the current version, and raises if there is nothing to remove.
        """
        if self.match is None and not self.none_match and not self.create_only:
            return None
        alone = not self.none_match and not self.create_only
        if alone and self.match is not None and len(self.match) == 1:
            return next(iter(self.match))
        version = await current()
        self.check(version)
        return version

    def check(self, version: int | None) -> None:
        """Raise PRECONDITION_FAILED unless a resource at ``version`` (None: absent) may be used."""
        failed = (
            (self.match is not None and version not in self.match)
            or (self.match_any and version is None)
            or (version is not None and (self.create_only or version in self.none_match))
        )
        if failed:
            raise ApiError(errors.PRECONDITION_FAILED, applied=False)


def preconditions(request: Request) -> Preconditions:
    """Return the preconditions of ``request``.

    Raise BAD_REQUEST if a header is not a list of ETags.
    """
    match = request.headers.get(b"if-match")
    none_match = request.headers.get(b"if-none-match")
    return Preconditions(
        match=None if match is None or match.strip() == b"*" else _versions(match, weak=False),
        match_any=match is not None and match.strip() == b"*",
        none_match=frozenset()
        if none_match is None or none_match.strip() == b"*"
        else _versions(none_match, weak=True),
        create_only=none_match is not None and none_match.strip() == b"*",
    )


def etag(version: int) -> Header:
    """Return the ETag header of a configuration."""
    return (b"etag", b'"%d"' % version)


def _versions(header: bytes, *, weak: bool) -> frozenset[int]:
    versions: set[int] = set()
    position = 0
    while position < len(header):
        tag = _TAG.match(header, position)
        if tag is None:
            raise ApiError(errors.BAD_REQUEST, "If-Match and If-None-Match must list quoted ETags")
        position = tag.end()
        # If-Match compares strongly: a weak tag never matches.
        if _VERSION.fullmatch(tag[2]) and (weak or not tag[1]):
            versions.add(int(tag[2]))
    return frozenset(versions)

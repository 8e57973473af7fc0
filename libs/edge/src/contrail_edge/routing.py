"""Routes of the data plane: one declaration for the fast lane, the FastAPI route and its document.

A handler takes a :class:`Request`, and returns an answer or raises ApiError. The fast lane calls it
directly. The FastAPI route of the same declaration calls it too, and documents it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import msgspec

from contrail_common.errors import ApiError, ErrorSpec
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Answer, Response
from contrail_edge.inputs.json_body import VALUES_MAX
from contrail_edge.ws.websocket import SocketEndpoint
from contrail_link.contract import StorageLink

if TYPE_CHECKING:
    from fastapi import APIRouter

_T = TypeVar("_T")

DIRECT_BODY_BYTES_MAX: Final = 64 << 10
"""Default of the largest body, in bytes, that a direct handler takes."""

Handler = Callable[[Request], Awaitable[Answer]]

ReadHandler = Callable[[Request], Awaitable[Response]]
"""A handler that never streams its answer."""

Reply = Callable[[Response | ApiError], None]

DirectHandler = Callable[[Request, bytes, Reply], None]
"""Takes a request and its whole body. It replies exactly once, now or later, or raises ApiError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyDoc:
    """One form of a body: its schema (a struct type or a JSON Schema) and an example."""

    shape: type[msgspec.Struct] | Mapping[str, Any]
    example: Any = None


Content = Mapping[str, BodyDoc]
"""Bodies by media type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderDoc:
    """A request or response header, as the document shows it."""

    name: str
    description: str
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDoc:
    """One successful answer of an operation."""

    description: str
    content: Content = field(default_factory=dict)
    headers: tuple[HeaderDoc, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The entry of a route in the OpenAPI document; ``errors`` are those beyond the common ones.

    A management route leaves out ``query`` and ``body`` if its endpoint declares them.
    """

    operation_id: str
    tag: str
    summary: str
    description: str
    answers: Mapping[int, AnswerDoc]
    query: type[msgspec.Struct] | None = None
    headers: tuple[HeaderDoc, ...] = ()
    body: Content = field(default_factory=dict)
    body_example: Any = None
    """Replaces the example of a body that a management endpoint declares."""
    body_required: bool = True
    errors: tuple[ErrorSpec, ...] = ()
    needs_token: bool = True
    body_values_max: int = VALUES_MAX
    """Maximum number of JSON values in the body of a management request."""


@dataclass(frozen=True, slots=True)
class Direct:
    """A faster handler for the usual requests of a route.

    It takes requests without a query and with a body of known length (POST), or with neither (GET).

    ``types`` are the content types that it accepts, and ``accepts`` the Accept headers, both
    compared literally (empty: any or none; a request without Accept has ``*/*``). Bodies above
    ``body_bytes_max`` go through the application, which reads them while they arrive.
    """

    handler: DirectHandler
    types: frozenset[bytes] = frozenset()
    body_bytes_max: int = DIRECT_BODY_BYTES_MAX
    accepts: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Route:
    """One method on one path template; it is only documented if it has an operation."""

    method: str
    template: str
    handler: Handler
    operation: Operation | None = None
    direct: Direct | None = None


class Elsewhere(Protocol):
    """Forwards requests and sockets of a module to the process that serves them."""

    async def forward(self, request: Request) -> Answer:
        """Return the unchanged answer of the other process."""
        ...

    def splice(
        self, request: Request, transport: asyncio.Transport, connections: set[Any]
    ) -> asyncio.Protocol:
        """Take over the connection of a handshake, and join it to one to the other process.

        The returned protocol has a ``shutdown`` method, and is in ``connections`` while it is open.
        """
        ...


@dataclass(frozen=True, slots=True)
class EdgeModule:
    """The part of a service at the edge: its storage link, routes and sockets.

    ``management`` makes the management routes when they are first needed. FastAPI and pydantic take
    longer to import than everything else, and a start does not have to wait for them. With
    ``elsewhere``, this process documents the module, and another one serves it.
    """

    link: StorageLink
    routes: tuple[Route, ...]
    management: Callable[[], "APIRouter"] | None = None
    sockets: tuple[SocketEndpoint, ...] = ()
    elsewhere: Elsewhere | None = None


class PathTable(Generic[_T]):
    """Maps path templates to values; a lookup uses the path's length and literal segments."""

    def __init__(self) -> None:
        # By the number of segments, in the order in which they were added; the first match counts.
        self._patterns: Final[dict[int, list[_Pattern[_T]]]] = {}

    def add(self, template: str, value: _T) -> None:
        """Put ``value`` under ``template``, such as ``/v1/streams/{stream}``."""
        parts = template.split("/")
        named = [(at, part[1:-1]) for at, part in enumerate(parts) if part[:1] == "{"]
        fixed = [(at, part) for at, part in enumerate(parts) if at and part[:1] != "{"]
        pattern = _Pattern(value, tuple(fixed), tuple(named))
        self._patterns.setdefault(len(parts), []).append(pattern)

    def match(self, segments: list[str]) -> tuple[_T, dict[str, str]] | None:
        """Return the value and parameters (never empty) of a decoded path, or None."""
        for pattern in self._patterns.get(len(segments), ()):
            for at, literal in pattern.literals:
                if segments[at] != literal:
                    break
            else:
                values = {name: segments[at] for at, name in pattern.names}
                # An empty segment is no name. The path is unknown, and is not one of a shorter
                # template.
                if "" not in values.values():
                    return pattern.value, values
        return None


@dataclass(frozen=True, slots=True)
class _Pattern(Generic[_T]):
    value: _T
    literals: tuple[tuple[int, str], ...]
    names: tuple[tuple[int, str], ...]

"""What work is part of: the request that asked for it and its trace, in every process it reaches.

The edge enters the context of each request; the service link carries it on to storage. Log lines
written meanwhile name both (``contrail_serve.logs``). Traces are W3C Trace Context: Contrail takes
part in none, it passes on what it is given.
"""

import re
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Final, NamedTuple, Protocol, Self

REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._~-]{1,128}")
"""Which ids a client may choose."""

_TRACEPARENT: Final = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]{1,64})?"
)
_TRACE_ID: Final = slice(3, 35)
BYTES_MAX: Final = 256
"""No encoded context is longer."""


class RequestContext(NamedTuple):
    """A request's id, and its ``traceparent`` when it has a valid one, else empty."""

    request_id: bytes
    traceparent: bytes = b""

    @classmethod
    def of(cls, request_id: bytes, traceparent: bytes) -> Self:
        """Leave out a ``traceparent`` that is not valid, as W3C Trace Context 2.3 asks for."""
        valid = traceparent and _TRACEPARENT.fullmatch(traceparent)
        return cls(request_id, traceparent if valid else b"")

    @property
    def context(self) -> Self:
        """Itself: a context carries what it is."""
        return self

    @property
    def trace_id(self) -> str:
        """The trace's id, 32 hexadecimal digits; empty without a trace."""
        return self.traceparent[_TRACE_ID].decode("ascii")

    def encode(self) -> bytes:
        """As it travels: neither part can hold a space."""
        return b"%b %b" % self

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """What :meth:`encode` made; ValueError for anything else."""
        request_id, _, traceparent = data.partition(b" ")
        if len(data) > BYTES_MAX or REQUEST_ID.fullmatch(request_id) is None:
            raise ValueError("not a request's context")
        return cls.of(request_id, traceparent)


class Carrier(Protocol):
    """What knows its context: a request, which makes it only when somebody asks."""

    @property
    def context(self) -> RequestContext:
        """The context."""
        ...


_current: Final[ContextVar[Carrier | None]] = ContextVar("request_context", default=None)


def current_context() -> RequestContext | None:
    """What the running work is part of; None for work of the process itself."""
    carrier = _current.get()
    return None if carrier is None else carrier.context


enter_context: Final[Callable[[Carrier | None], Token[Carrier | None]]] = _current.set
"""Say what the running task or connection is part of, and the tasks that it starts from now on."""
leave_context: Final[Callable[[Token[Carrier | None]], None]] = _current.reset
"""Return to the context before the :func:`enter_context` that returned this token."""

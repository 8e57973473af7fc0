"""The request that the current work belongs to, with its trace, in every process it reaches.

The edge enters the context of each request, and the link passes it on to storage. Log lines in this
context have the ids of the request and the trace (``contrail_serve.logs``). Traces are W3C Trace
Context. Contrail creates no spans; it only passes the client's ``traceparent`` on.
"""

import re
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Final, NamedTuple, Protocol, Self

REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._~-]{1,128}")
"""Pattern of the request ids that a client may choose."""

_TRACEPARENT: Final = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]{1,64})?"
)
_TRACE_ID: Final = slice(3, 35)
BYTES_MAX: Final = 256
"""Maximum length of an encoded context."""


class RequestContext(NamedTuple):
    """The id of a request, and its ``traceparent``, which is empty if it has no valid one."""

    request_id: bytes
    traceparent: bytes = b""

    @classmethod
    def of(cls, request_id: bytes, traceparent: bytes) -> Self:
        """Return a context without an invalid ``traceparent`` (W3C Trace Context, section 2.3)."""
        valid = traceparent and _TRACEPARENT.fullmatch(traceparent)
        return cls(request_id, traceparent if valid else b"")

    @property
    def context(self) -> Self:
        """This object, so that it can be entered like a request."""
        return self

    @property
    def trace_id(self) -> str:
        """The id of the trace, 32 hexadecimal digits; empty without a trace."""
        return self.traceparent[_TRACE_ID].decode("ascii")

    def encode(self) -> bytes:
        """Return the form on the link. Neither part can contain a space."""
        return b"%b %b" % self

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the context that :meth:`encode` encoded; raise ValueError for other bytes."""
        request_id, _, traceparent = data.partition(b" ")
        # The id goes into log lines, so it is checked again in each process.
        if len(data) > BYTES_MAX or REQUEST_ID.fullmatch(request_id) is None:
            raise ValueError("not a request's context")
        return cls.of(request_id, traceparent)


class Carrier(Protocol):
    """An object with a context, such as a request, which makes it only when it is needed."""

    @property
    def context(self) -> RequestContext:
        """The context."""
        ...


_current: Final[ContextVar[Carrier | None]] = ContextVar("request_context", default=None)


def current_context() -> RequestContext | None:
    """Return the context of the current work; None if it belongs to no request."""
    carrier = _current.get()
    return None if carrier is None else carrier.context


enter_context: Final[Callable[[Carrier | None], Token[Carrier | None]]] = _current.set
"""Set the context of the current task or connection, and of tasks that it starts afterwards."""
leave_context: Final[Callable[[Token[Carrier | None]], None]] = _current.reset
"""Return to the context before the :func:`enter_context` that returned this token."""

"""The errors of the client, as one tree.

    ContrailError
    ├── ApiProblem             the server refused the request and said why
    │   ├── Denied             401, 403
    │   ├── NotFound           404, 410
    │   ├── Conflict           409, 423
    │   ├── PreconditionFailed 412
    │   ├── Invalid            other 4xx
    │   ├── Busy               429, 503
    │   ├── Full               507
    │   └── ServerFault        other 5xx
    ├── AcksRefused            some acknowledgements of a request were refused
    ├── PublishesFailed        messages given to a publisher were not confirmed as stored
    ├── OutcomeUnknown         the request may or may not have taken effect
    ├── Unreachable            the request certainly had no effect: it got no answer
    ├── SocketRefused          the server closed the WebSocket for good
    ├── SubscriptionEnded      the stream or consumer of a subscription was deleted
    ├── Closed                 the publisher, subscription or client was closed here
    └── UnexpectedAnswer       the answer is not what the API promises
        └── ReplayCut          a replay ended before its end mark

To handle all of them, catch `ContrailError`. After `OutcomeUnknown` a publish is safe to repeat if
its message has an id; the client does that by itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec


class ContrailError(Exception):
    """Base of every error of this package."""


class FieldError(msgspec.Struct, frozen=True):
    """One invalid field. `pointer` is a JSON Pointer into the body, or a parameter or header."""

    pointer: str
    message: str


class ApiProblem(ContrailError):
    """A refusal (RFC 9457). `name` and `code` are stable; `detail` is for people.

    Attributes:
        status: the HTTP status.
        code: the error code of JetStream, or of Contrail from 20000 on; 0 if there is none.
        name: the name of the error in the registry, such as `stream_not_found`.
        retryable: whether the same request may succeed later.
        applied: False if the request certainly had no effect, None if the server does not say.
        errors: the invalid fields.
        retry_after_s: seconds to wait, if the server asks for that; otherwise None.
        request_id: the id of the request in the server's log; "" for the items of a batch.
    """

    def __init__(
        self,
        status: int,
        code: int = 0,
        name: str = "",
        detail: str = "",
        *,
        retryable: bool = False,
        applied: bool | None = None,
        errors: tuple[FieldError, ...] = (),
        retry_after_s: float | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(f"{status} {name or 'error'}: {detail}")
        self.status = status
        self.code = code
        self.name = name
        self.detail = detail
        self.retryable = retryable
        self.applied = applied
        self.errors = errors
        self.retry_after_s = retry_after_s
        self.request_id = request_id


class Denied(ApiProblem):
    """The token is missing or invalid, or does not permit the request."""


class NotFound(ApiProblem):
    """The stream, consumer, message or path does not exist, or no longer."""


class Conflict(ApiProblem):
    """The request conflicts with the state, such as another configuration or a sealed stream."""


class PreconditionFailed(ApiProblem):
    """An expectation about the state of the stream or of a configuration does not hold."""


class Invalid(ApiProblem):
    """The request is not valid; `errors` lists the invalid fields."""


class Busy(ApiProblem):
    """The server cannot serve the request now: too many requests, no leader, or not ready."""


class Full(ApiProblem):
    """A limit of the stream or of the disk is reached."""


class ServerFault(ApiProblem):
    """The server failed; the request is not the cause."""


_BY_STATUS: Final[Mapping[int, type[ApiProblem]]] = {
    401: Denied,
    403: Denied,
    404: NotFound,
    409: Conflict,
    410: NotFound,
    412: PreconditionFailed,
    423: Conflict,
    429: Busy,
    503: Busy,
    507: Full,
}
_SERVER_FAULTS: Final = 500


def api_problem(status: int, *arguments: Any, **details: Any) -> ApiProblem:
    """An `ApiProblem` of the class for its status."""
    rest = Invalid if status < _SERVER_FAULTS else ServerFault
    return _BY_STATUS.get(status, rest)(status, *arguments, **details)


class AcksRefused(ContrailError):
    """Some acknowledgements of a request were refused; the others were accepted.

    `refused` maps positions in the request to refusals.
    """

    def __init__(self, refused: Mapping[int, ApiProblem]) -> None:
        first = next(iter(refused.values()))
        super().__init__(f"{len(refused)} acknowledgements were refused, the first with: {first}")
        self.refused = refused


class PublishesFailed(ContrailError):
    """Messages were not confirmed as stored, and nobody had asked for their outcomes.

    `failures` has the subjects and errors of the first of them; `count` is the number of all.
    """

    def __init__(self, failures: Sequence[tuple[str, ContrailError]], count: int) -> None:
        subject, error = failures[0]
        super().__init__(f"{count} messages failed, the first on {subject}: {error}")
        self.failures = failures
        self.count = count


class OutcomeUnknown(ContrailError):
    """The request was sent, and may or may not have taken effect.

    `problem` is the server's answer (504); None if the connection broke.
    """

    def __init__(self, message: str, problem: ApiProblem | None = None) -> None:
        super().__init__(message)
        self.problem = problem


class Unreachable(ContrailError):
    """No connection, or no answer to a read in time. Nothing was changed."""


class SocketRefused(ContrailError):
    """The server closed the WebSocket with a close code that forbids to reconnect.

    `code` is the close code, such as 4500 to 4999; `reason` is the text of the server.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"the server closed the WebSocket with {code}: {reason or 'no reason'}")
        self.code = code
        self.reason = reason


class SubscriptionEnded(ContrailError):
    """The stream or consumer of a subscription was deleted; `reason` is for people."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the subscription has ended: {reason}")
        self.reason = reason


class Closed(ContrailError):
    """The publisher, subscription or client was closed by this program."""


class UnexpectedAnswer(ContrailError):
    """The answer does not have the promised form. It may come from a proxy or another server."""


class ReplayCut(UnexpectedAnswer):
    """The body of a replay ended before its end mark."""

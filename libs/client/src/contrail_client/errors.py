"""What can go wrong, as one tree.

    ContrailError
    ├── ApiProblem             the server refused the request and said why
    │   ├── Denied             401, 403
    │   ├── NotFound           404, 410
    │   ├── Conflict           409, 423
    │   ├── PreconditionFailed 412
    │   ├── Invalid            the rest of 4xx
    │   ├── Busy               429, 503
    │   ├── Full               507
    │   └── ServerFault        the rest of 5xx
    ├── AcksRefused            some acknowledgements of a request were refused
    ├── PublishesFailed        messages given to a publisher were not confirmed as stored
    ├── OutcomeUnknown         the request may or may not have taken effect
    ├── Unreachable            the request certainly had no effect: it got no answer
    ├── SocketRefused          the server closed the WebSocket and does not want it back
    ├── SubscriptionEnded      the server ended a subscription: what it reads is gone
    ├── Closed                 the publisher, subscription or client was closed here
    └── UnexpectedAnswer       the answer is not what the API promises
        └── ReplayCut          a replay ended before its end mark

A caller that handles `ContrailError` misses nothing. A publish that ends in `OutcomeUnknown` is
safe to repeat when its message has an id; the SDK does that by itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec


class ContrailError(Exception):
    """Base of every error of this package."""


class FieldError(msgspec.Struct, frozen=True):
    """One bad field: a JSON Pointer into the body, or the name of a parameter or header."""

    pointer: str
    message: str


class ApiProblem(ContrailError):
    """A refusal (RFC 9457). `name` and `code` are stable; `detail` is for people.

    Attributes:
        status: the HTTP status.
        code: JetStream's error code, from 20000 a code of Contrail's own, 0 when it has none.
        name: the error's name in the registry, such as `stream_not_found`.
        retryable: the same request may succeed later, unchanged.
        applied: False when the request certainly had no effect, None when the server does not say.
        errors: the bad fields.
        retry_after_s: how long the server asks to wait, None when it does not.
        request_id: what to look for in the server's log, "" for the items of a batch.
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
    """No or a bad token, or not permitted."""


class NotFound(ApiProblem):
    """No such stream, consumer, message or path, or no longer."""


class Conflict(ApiProblem):
    """It contradicts what is there: another configuration, a stale token, a sealed stream."""


class PreconditionFailed(ApiProblem):
    """An expectation about the state of the stream or of a configuration does not hold."""


class Invalid(ApiProblem):
    """The request is not valid as it is; `errors` names the bad fields."""


class Busy(ApiProblem):
    """Not now: too many requests, no leader, or not ready."""


class Full(ApiProblem):
    """A limit of the stream or of the disk is reached."""


class ServerFault(ApiProblem):
    """The server failed at something that the request is not to blame for."""


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
    """An `ApiProblem` of the class that its status stands for."""
    rest = Invalid if status < _SERVER_FAULTS else ServerFault
    return _BY_STATUS.get(status, rest)(status, *arguments, **details)


class AcksRefused(ContrailError):
    """Some acknowledgements were refused; the others were taken.

    `refused` maps the position in the request to the refusal.
    """

    def __init__(self, refused: Mapping[int, ApiProblem]) -> None:
        first = next(iter(refused.values()))
        super().__init__(f"{len(refused)} acknowledgements were refused, the first with: {first}")
        self.refused = refused


class PublishesFailed(ContrailError):
    """Messages were not confirmed as stored, and nobody had looked at their outcome yet.

    `failures` are the first of them, each subject with its error; `count` is how many there are.
    """

    def __init__(self, failures: Sequence[tuple[str, ContrailError]], count: int) -> None:
        subject, error = failures[0]
        super().__init__(f"{count} messages failed, the first on {subject}: {error}")
        self.failures = failures
        self.count = count


class OutcomeUnknown(ContrailError):
    """The request was sent, and nobody can say whether it took effect.

    `problem` is the server's own answer (504), None when the connection broke.
    """

    def __init__(self, message: str, problem: ApiProblem | None = None) -> None:
        super().__init__(message)
        self.problem = problem


class Unreachable(ContrailError):
    """No connection, or a read without an answer in time: nothing was changed."""


class SocketRefused(ContrailError):
    """The server closed the WebSocket with a code that says not to come back (4500 to 4999).

    `code` is the close code, `reason` the server's own words.
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
    """The publisher, subscription or client was closed here."""


class UnexpectedAnswer(ContrailError):
    """The answer does not have the promised form: another server, or a proxy, may stand there."""


class ReplayCut(UnexpectedAnswer):
    """The body of a replay ended before its end mark."""

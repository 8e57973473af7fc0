"""What can go wrong, as one tree.

    ContrailError
    ├── ApiProblem         the server refused the request and said why
    ├── AcksRefused        some acknowledgements of a request were refused
    ├── OutcomeUnknown     the request may or may not have taken effect
    ├── Unreachable        the request certainly had no effect: it got no answer
    └── UnexpectedAnswer   the answer is not what the API promises
        └── ReplayCut      a replay ended before its end mark

A caller that handles `ContrailError` misses nothing. A publish that ends in `OutcomeUnknown` is
safe to repeat when its message has an id; the SDK does that by itself.
"""

from collections.abc import Mapping

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


class AcksRefused(ContrailError):
    """Some acknowledgements were refused; the others were taken.

    `refused` maps the position in the request to the refusal.
    """

    def __init__(self, refused: Mapping[int, ApiProblem]) -> None:
        first = next(iter(refused.values()))
        super().__init__(f"{len(refused)} acknowledgements refused, the first: {first}")
        self.refused = refused


class OutcomeUnknown(ContrailError):
    """The request was sent, and nobody can say whether it took effect.

    `problem` is the server's own answer (504), None when the connection broke.
    """

    def __init__(self, message: str, problem: ApiProblem | None = None) -> None:
        super().__init__(message)
        self.problem = problem


class Unreachable(ContrailError):
    """No connection, or a read without an answer in time: nothing was changed."""


class UnexpectedAnswer(ContrailError):
    """The answer does not have the promised form: another server, or a proxy, may stand there."""


class ReplayCut(UnexpectedAnswer):
    """The body of a replay ended before its end mark."""

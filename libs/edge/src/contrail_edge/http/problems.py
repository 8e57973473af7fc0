"""Errors as ``application/problem+json`` (RFC 9457), built from the error registry."""

import functools
from http import HTTPStatus

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError, ErrorSpec
from contrail_edge.http.headers import X_REQUEST_ID
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Header, Response
from contrail_link.contract.publish import PubResult

PROBLEM_TYPE = "application/problem+json"
READING_METHODS = frozenset({"GET", "HEAD"})
_RETRY_AFTER_S = 1
FIELD_ERRORS_MAX = 100
"""Maximum number of invalid fields that a problem names."""
REFUSALS_SHOWN_MAX = 1_000
"""Refused messages of one batch whose problems have details; further ones only name the error."""
_POINTER_CHARS_MAX = 256
_TEXT_CHARS_MAX = 1024


class FieldError(msgspec.Struct, frozen=True):
    """An invalid field: a JSON Pointer into the body, or the name of a parameter or header."""

    pointer: str
    """JSON Pointer into the body, or name of a parameter or header."""
    message: str
    """What is wrong with the value."""


class Problem(msgspec.Struct, kw_only=True):
    """An error. ``code`` and ``name`` are stable. ``detail`` is for humans and may change."""

    type: str
    """URN of the error: `urn:contrail:error:` and its name."""
    title: str
    """The error in a few words."""
    status: int
    """HTTP status."""
    detail: str
    """Explanation for humans; may change."""
    instance: str | msgspec.UnsetType = msgspec.UNSET
    """Path of the request."""
    code: int
    """Number of the error; stable."""
    name: str
    """Name of the error; stable."""
    retryable: bool
    """True if the same request may succeed later."""
    errors: list[FieldError]
    """The invalid fields."""
    request_id: str | msgspec.UnsetType = msgspec.UNSET
    """Id of the request, as in logs."""
    applied: bool | msgspec.UnsetType = msgspec.UNSET
    """False if the request had no effect; absent if that is unknown."""


def problem(error: ApiError) -> Problem:
    """Return the problem of ``error``, in the form of batch results."""
    spec = error.spec
    return Problem(
        type=f"urn:contrail:error:{spec.name}",
        title=spec.title,
        status=spec.status,
        detail=_cut(error.detail or spec.title, _TEXT_CHARS_MAX),
        code=spec.code,
        name=spec.name,
        retryable=spec.retryable,
        errors=[
            FieldError(_cut(one.pointer, _POINTER_CHARS_MAX), _cut(one.message, _TEXT_CHARS_MAX))
            for one in error.fields[:FIELD_ERRORS_MAX]
        ],
        applied=msgspec.UNSET if error.applied is None else error.applied,
    )


def _cut(text: str, most: int) -> str:
    """Return at most ``most`` characters of ``text``, which may contain input of the caller."""
    return text if len(text) <= most else text[: most - 3] + "..."


@functools.lru_cache(maxsize=1024)
def result_problem(code: int, detail: str) -> Problem:
    """Return the problem of one batch result, from the error code that storage returned."""
    return problem(errors.from_code(code, detail))


class BatchResult(msgspec.Struct, gc=False):
    """Where one message was stored, or the ``problem`` that prevented it.

    ``duplicate`` is true if a message with the same id was already stored, under this ``seq``.
    ``shard`` is present for a stream with several shards.
    """

    seq: int | msgspec.UnsetType = msgspec.UNSET
    """Sequence of the message."""
    duplicate: bool | msgspec.UnsetType = msgspec.UNSET
    """True if a message with the same id was already stored."""
    problem: Problem | msgspec.UnsetType = msgspec.UNSET
    """Why the message was not stored, or why its outcome is unknown."""
    shard: int | msgspec.UnsetType = msgspec.UNSET
    """Shard of the message, if the stream has several."""


class Problems:
    """The problems of one batch. Those after ``REFUSALS_SHOWN_MAX`` only name the error."""

    def __init__(self) -> None:
        # Number of refusals so far.
        self._shown = 0
        # Shared problems without details, by code and `applied`.
        self._kinds: dict[tuple[int, bool | None], Problem] = {}

    def of(self, refused: ApiError | PubResult) -> Problem:
        """Return the problem of the next refused message. Problems without details are shared."""
        self._shown += 1
        if self._shown <= REFUSALS_SHOWN_MAX:
            return _problem_of(refused)
        if isinstance(refused, ApiError):
            kind = refused.spec.code, refused.applied
        else:
            kind = refused.code, None
        found = self._kinds.get(kind)
        if found is None:
            full = _problem_of(refused)
            found = msgspec.structs.replace(full, detail=full.title, errors=[])
            self._kinds[kind] = found
        return found


def _problem_of(refused: ApiError | PubResult) -> Problem:
    if isinstance(refused, ApiError):
        return problem(refused)
    return result_problem(refused.code, refused.detail)


def problem_body(
    error: ApiError,
    *,
    instance: str | msgspec.UnsetType = msgspec.UNSET,
    request_id: str | msgspec.UnsetType = msgspec.UNSET,
    reads: bool = False,
) -> bytes:
    """Return the JSON document of a refusal. Requests that only read (``reads``) have no effect."""
    answer = problem(error)
    if reads:
        answer.applied = False
    answer.instance = instance
    answer.request_id = request_id
    return msgspec.json.encode(answer)


def problem_headers(error: ApiError) -> list[Header]:
    """Return the headers of a refusal, except those of its body."""
    headers: list[Header] = []
    # These are about load, or about a state that passes, so they always say when to retry.
    if error.spec.status in (429, 503):
        seconds = _RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        headers.append((b"retry-after", str(seconds).encode()))
    elif error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    if error.spec is errors.UNAUTHENTICATED:
        headers.append((b"www-authenticate", b'Bearer realm="contrail"'))
    if error.spec is errors.UPGRADE_REQUIRED:
        headers += [(b"upgrade", b"websocket"), (b"sec-websocket-version", b"13")]
    return headers


def refusal(request: Request, error: ApiError, headers: tuple[Header, ...] = ()) -> Response:
    """Return the answer to a refused request, with additional ``headers``."""
    body = problem_body(
        error,
        instance=request.raw_path.decode("latin-1"),
        request_id=request.request_id.decode("ascii"),
        reads=request.method in READING_METHODS,
    )
    all_headers = [*problem_headers(error), *headers]
    return Response(error.spec.status, body, PROBLEM_TYPE.encode(), all_headers)


def invalid_field(pointer: str, message: str, spec: ErrorSpec = errors.INVALID_FIELD) -> ApiError:
    """Return the error for one field or parameter; the pointer of the whole body is empty."""
    detail = f"{pointer}: {message}" if pointer else message
    return ApiError(spec, detail, fields=[errors.FieldProblem(pointer, message)])


def last_problem(error: ApiError, request: Request | None) -> bytes:
    """Return the bytes of an answer after which the connection is closed.

    ``request`` is None if its head is not complete.
    """
    status = error.spec.status
    headers = problem_headers(error)
    if request is None:
        body = problem_body(error)
    else:
        path, request_id = request.raw_path.decode("latin-1"), request.request_id.decode()
        body = problem_body(error, instance=path, request_id=request_id)
        headers.append((X_REQUEST_ID, request.request_id))
        headers += request.cors_headers([name for name, _ in headers])
    lines = [
        b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode()),
        b"content-type: " + PROBLEM_TYPE.encode(),
        b"content-length: %d" % len(body),
        b"connection: close",
        *(b"%b: %b" % header for header in headers),
    ]
    return b"\r\n".join([*lines, b"", body])

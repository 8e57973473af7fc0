"""Requests and answers as values, without IO.

A `Call` is a request with the function that parses its answer. The modules `streams`, `publishing`,
`consumers`, `reading` and `replaying` build calls, and `transport` carries them out. So the
blocking and the asynchronous client share all rules.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote

import msgspec

from contrail_client.errors import (
    ApiProblem,
    ContrailError,
    FieldError,
    OutcomeUnknown,
    UnexpectedAnswer,
    Unreachable,
    api_problem,
)
from contrail_client.times import wire

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

JSON: Final = "application/json"
MSGPACK: Final = "application/vnd.msgpack"
SNAPSHOT: Final = "application/vnd.contrail.snapshot"
MERGE_PATCH: Final = "application/merge-patch+json"
NDJSON: Final = "application/x-ndjson"
ARROW: Final = "application/vnd.apache.arrow.stream"

OUTCOME_UNKNOWN: Final = "outcome_unknown"
"""The problem's name when a request may or may not have taken effect."""

_LATE_ATTEMPT: Final = 16
"""From this attempt on the pause does not grow any more. It bounds the exponent."""

LONG_POLL_S: Final = 60.0
"""The server ends every long poll after at most this time."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request; `path` is percent-encoded. The server may delay the answer for `wait_s`."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    wait_s: float = 0.0

    @property
    def is_read(self) -> bool:
        """Whether the request changes nothing."""
        return self.method in ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer; the names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def content_type(self) -> str:
        """The media type without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


@dataclass(frozen=True, slots=True)
class Failure:
    """No answer. `sent` is False if the request certainly did not reach the server."""

    sent: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request, and the function that parses its answer.

    `repeatable` means that carrying it out twice has the same effect as once.
    """

    request: Request
    parse: Callable[[Answer], T]
    repeatable: bool


def call(
    method: str,
    path: str,
    parse: Callable[[Answer], T],
    *,
    query: Mapping[str, Any] | None = None,
    json: Any = None,
    headers: tuple[tuple[str, str], ...] = (),
    wait_s: float = 0.0,
    repeatable: bool = False,
) -> Call[T]:
    """A call with an optional JSON body. It is repeatable if it is a read, or if `repeatable`."""
    body = b""
    if json is not None:
        body = msgspec.json.encode(wire(json))
        if not any(name == "Content-Type" for name, _ in headers):
            headers = (*headers, ("Content-Type", JSON))
    request = Request(method, path, query_items(query or {}), headers, body, wait_s)
    return Call(request, parse, repeatable=repeatable or request.is_read)


def path_of(*segments: str | int) -> str:
    """The path `/v1/...`; a segment may have any characters.

    Raises ValueError for a segment that would change the meaning of the path: deleting the consumer
    `..` must not delete the stream.
    """
    for segment in segments:
        # Clients and proxies remove such segments from a path, also if they are escaped.
        if segment in ("", ".", ".."):
            raise ValueError(f"{segment!r} cannot be used as a name or subject")
    return "/v1/" + "/".join(quote(str(segment), safe="") for segment in segments)


def query_items(query: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Query parameters as texts: None is left out, booleans become `true` and `false`."""
    return tuple(
        (name, str(value).lower() if isinstance(value, bool) else str(wire(value)))
        for name, value in query.items()
        if value is not None
    )


def texts(value: str | Sequence[T]) -> tuple[str | T, ...]:
    """A sequence of texts, where a `str` is one text and not a sequence of letters."""
    return (value,) if isinstance(value, str) else tuple(value)


def given(**fields: Any) -> dict[str, Any]:
    """The fields of a JSON body that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def conclude(of: Call[T], outcome: Answer | Failure) -> T:
    """The parsed answer of a call; raises `ContrailError` if there is no valid answer."""
    if isinstance(outcome, Failure):
        raise _no_answer(of.request, outcome)
    if not 200 <= outcome.status < 300:  # noqa: PLR2004 - the class of success
        raise refusal(outcome)
    try:
        return of.parse(outcome)
    except (msgspec.DecodeError, KeyError, ValueError) as error:
        raise UnexpectedAnswer(f"{of.request.method} {of.request.path}: {error}") from error


def _no_answer(request: Request, failure: Failure) -> ContrailError:
    what = f"{request.method} {request.path}: {failure.reason}"
    # A read that was sent changed nothing, so it is only unanswered.
    if failure.sent and not request.is_read:
        return OutcomeUnknown(what)
    return Unreachable(what)


class Problem(msgspec.Struct):
    """A problem document (RFC 9457), as in answers, results and frames."""

    status: int = 0
    code: int = 0
    name: str = ""
    title: str = ""
    detail: str = ""
    retryable: bool = False
    applied: bool | None = None
    errors: tuple[FieldError, ...] = ()
    request_id: str = ""


_problem_decoder = msgspec.json.Decoder(Problem)


def refusal(answer: Answer) -> ContrailError:
    """The error for an answer whose status is not 2xx."""
    try:
        problem = _to_error(_problem_decoder.decode(answer.body), answer)
    except msgspec.DecodeError:
        text = answer.body[:200].decode(errors="replace")
        return UnexpectedAnswer(f"status {answer.status} without a problem document: {text!r}")
    if problem.name == OUTCOME_UNKNOWN:
        return OutcomeUnknown(str(problem), problem)
    return problem


def item_problem(document: Mapping[str, Any]) -> ApiProblem:
    """The refusal of one item of a batch."""
    return _to_error(msgspec.convert(document, Problem), Answer(0, {}))


def problem_of(document: Problem) -> ContrailError:
    """The error for a problem document that came without HTTP headers, as in a frame."""
    problem = _to_error(document, Answer(0, {}))
    if problem.name == OUTCOME_UNKNOWN:
        return OutcomeUnknown(str(problem), problem)
    return problem


def _to_error(problem: Problem, answer: Answer) -> ApiProblem:
    # The header may also be a date, which this server never sends.
    retry_after = answer.headers.get("retry-after", "")
    return api_problem(
        problem.status or answer.status,
        problem.code,
        problem.name,
        problem.detail or problem.title,
        retryable=problem.retryable,
        applied=problem.applied,
        errors=problem.errors,
        retry_after_s=float(retry_after) if retry_after.isdecimal() else None,
        request_id=problem.request_id,
    )


@dataclass(frozen=True, slots=True)
class Retries:
    """When to retry: `attempts` in all, with growing, jittered pauses between them.

    A call is retried only if its failure may pass. In addition, either the failed attempt certainly
    had no effect, or carrying out the call twice has the same effect as once.
    """

    attempts: int = 4
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0

    def pause_s(
        self, of: Call[Any], error: ContrailError, attempt: int, chance: float
    ) -> float | None:
        """Seconds to wait after failed attempt number `attempt` (from 1); None to give up.

        `chance` is uniform in [0, 1). It keeps many clients from returning at the same moment.
        """
        return self.pause_after(error, of.repeatable, attempt, chance)

    def pause_after(
        self, error: ContrailError, repeatable: bool, attempt: int, chance: float
    ) -> float | None:
        """As `pause_s`, for something that is not a `Call`; `repeatable` is as there."""
        asked = error.retry_after_s if isinstance(error, ApiProblem) else None
        # The caller should hear of a long pause now, and decide for itself.
        if asked is not None and asked > self.longest_pause_s:
            return None
        return (
            None
            if attempt >= self.attempts
            else self.pause_while(error, repeatable, attempt, chance)
        )

    def pause_while(
        self, error: ContrailError, repeatable: bool, attempt: int, chance: float
    ) -> float | None:
        """As `pause_after`, for something that has its own deadline instead of `attempts`."""
        if not _may_pass(error, repeatable):
            return None
        asked = error.retry_after_s if isinstance(error, ApiProblem) else None
        return max(asked or 0.0, self.backoff_s(min(attempt, _LATE_ATTEMPT), chance))

    def backoff_s(self, attempt: int, chance: float) -> float:
        """The pause after failed attempt number `attempt` if the server does not ask for one."""
        pause = min(self.longest_pause_s, self.first_pause_s * 2.0 ** (attempt - 1))
        # Half of the pause is certain, so that a busy server gets its break; the rest is random.
        return pause * (0.5 + chance / 2)


def _may_pass(error: ContrailError, repeatable: bool) -> bool:
    match error:
        case ApiProblem(retryable=retryable, applied=applied):
            return retryable and (applied is False or repeatable)
        case Unreachable():
            return True
        case OutcomeUnknown():
            return repeatable
    return False


class Page(msgspec.Struct, Generic[T], frozen=True):
    """A page of a list. The last page has no `next_page_token`."""

    items: tuple[T, ...]
    next_page_token: str | None = None


def json_as(kind: type[T]) -> Callable[[Answer], T]:
    """A parser of JSON answers of the given type."""
    decoder = msgspec.json.Decoder(kind)
    return lambda answer: decoder.decode(answer.body)


def with_etag(parse: Callable[[Answer], S]) -> Callable[[Answer], S]:
    """A parser that also puts the answer's ETag into the field `etag`."""

    def parse_both(answer: Answer) -> S:
        return msgspec.structs.replace(parse(answer), etag=answer.headers.get("etag", ""))

    return parse_both


def with_staleness(parse: Callable[[Answer], S]) -> Callable[[Answer], S]:
    """A parser that also puts the age of the replica that answered into `staleness_ms`."""

    def parse_both(answer: Answer) -> S:
        value, text = parse(answer), answer.headers.get("contrail-staleness")
        return value if text is None else msgspec.structs.replace(value, staleness_ms=int(text))

    return parse_both


def nothing(answer: Answer) -> None:
    """Parse an answer that has no content: its status is enough."""


def precondition(if_match: str | None, only_create: bool) -> tuple[tuple[str, str], ...]:
    """The headers of a conditional PUT."""
    if only_create:
        return (("If-None-Match", "*"),)
    return (("If-Match", if_match),) if if_match else ()


ALIVE: Final[Call[None]] = call("GET", "/livez", nothing)
"""An empty request, for measuring the time to an answer."""

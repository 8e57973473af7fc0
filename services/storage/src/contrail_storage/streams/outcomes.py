"""Turns the results of commands into what callers expect: a value, or an ApiError."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from contrail_common import errors
from contrail_common.errors import REGISTRY, ApiError
from contrail_storage.core.results import Refused, Result

ResultT = TypeVar("ResultT", bound=Result)


def expect(result: Result, kind: type[ResultT]) -> ResultT:
    """Return ``result`` if it is of ``kind``; raise its ApiError if it is a refusal."""
    if isinstance(result, Refused):
        raise error_of(result)
    assert isinstance(result, kind), f"{result} is not a {kind.__name__}"
    return result


def error_of(refused: Refused) -> ApiError:
    """Return the ApiError for a refusal by ``apply``; nothing was applied."""
    if refused.problem is not None:
        return refused.problem.as_error()
    return ApiError(REGISTRY[refused.code], refused.detail, applied=False)


@contextmanager
def begun(has_effect: bool = True) -> Iterator[None]:
    """After a step that had an effect, turn "not applied" refusals into an unknown outcome."""
    try:
        yield
    except ApiError as error:
        if has_effect and error.applied is False:
            raise ApiError(errors.OUTCOME_UNKNOWN, str(error)) from error
        raise

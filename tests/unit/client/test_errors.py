"""Every refusal that a server can answer has a class of its own kind."""

from contrail_client import (
    ApiProblem,
    Busy,
    Conflict,
    Denied,
    Full,
    Invalid,
    NotFound,
    PreconditionFailed,
    PublishesFailed,
    ServerFault,
    Unreachable,
)
from contrail_client.calls import Answer, Problem, problem_of, refusal
from contrail_client.errors import OutcomeUnknown, api_problem
from contrail_common.errors import BY_NAME, ErrorSpec
from tests.support.each import each

KINDS = (Busy, Conflict, Denied, Full, Invalid, NotFound, PreconditionFailed, ServerFault)


@each("spec", BY_NAME.values(), ids=BY_NAME.keys())
def test_every_error_of_the_registry_has_a_class(spec: ErrorSpec) -> None:
    error = problem_of(Problem(status=spec.status, code=spec.code, name=spec.name))
    if spec.name == "outcome_unknown":
        assert type(error) is OutcomeUnknown
    else:
        assert type(error) in KINDS
        assert isinstance(error, ApiProblem)
        assert (error.status, error.code, error.name) == (spec.status, spec.code, spec.name)


@each(
    ("status", "kind"),
    [
        (400, Invalid),
        (401, Denied),
        (403, Denied),
        (404, NotFound),
        (409, Conflict),
        (410, NotFound),
        (412, PreconditionFailed),
        (413, Invalid),
        (422, Invalid),
        (423, Conflict),
        (429, Busy),
        (431, Invalid),
        (500, ServerFault),
        (503, Busy),
        (507, Full),
    ],
)
def test_status_decides_the_class(status: int, kind: type[ApiProblem]) -> None:
    assert type(api_problem(status)) is kind
    body = b'{"status": %d, "name": "x"}' % status
    assert type(refusal(Answer(status, {}, body))) is kind


def test_failed_publishes_name_the_first() -> None:
    error = PublishesFailed([("a.b", Unreachable("gone"))], 3)
    assert str(error) == "3 messages failed, the first on a.b: gone"

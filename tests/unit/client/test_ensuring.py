"""Which fields of a configuration that exists differ from what was asked for."""

from typing import Any

from contrail_client.errors import Conflict, FieldError, NotFound
from contrail_client.models import Difference
from contrail_client.operations.ensuring import differences, exists_otherwise
from tests.support.each import each


def refusal(*fields: str) -> Conflict:
    errors = tuple(FieldError(f"/{field}", "is 1, not 2") for field in fields)
    return Conflict(409, 10058, "stream_exists", errors=errors)


EXISTING = {
    "max_age": "7d",
    "max_msgs": -1,
    "consumer_limits": {"max_ack_pending": 5, "inactive_threshold": "1h"},
}


@each(
    ("asked", "found"),
    [
        ({"max_msgs": 10}, (Difference("max_msgs", 10, -1),)),
        ({"subjects": ["a"]}, ()),  # the server did not name it
        ({}, ()),  # what is not given is not compared
        ({"consumer_limits": {"max_ack_pending": 5}}, ()),
        (
            {"consumer_limits": {"max_ack_pending": 6}},
            (Difference("consumer_limits", {"max_ack_pending": 6}, EXISTING["consumer_limits"]),),
        ),
    ],
)
def test_only_fields_that_were_given_differ(
    asked: dict[str, Any], found: tuple[Difference, ...]
) -> None:
    assert differences(refusal("max_age", "max_msgs", "consumer_limits"), asked, EXISTING) == found


def test_other_conflicts_are_not_about_the_configuration() -> None:
    assert exists_otherwise(refusal())
    assert not exists_otherwise(Conflict(409, 10065, "subject_overlap"))
    assert not exists_otherwise(NotFound(404, 10059, "stream_not_found"))


def test_difference_reads_as_a_sentence() -> None:
    assert str(Difference("max_age", "1d", "7d")) == "max_age is '7d', not '1d'"

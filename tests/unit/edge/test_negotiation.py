"""Content negotiation."""

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.inputs.negotiation import acceptable, content_type, names_json
from tests.support.each import each

OFFERS = ("application/json", "application/x-ndjson")


@each(
    ("header", "chosen"),
    [
        (None, OFFERS[0]),
        (b"", OFFERS[0]),
        (b"*/*", OFFERS[0]),
        (b"application/*", OFFERS[0]),
        (b"application/x-ndjson", OFFERS[1]),
        (b"APPLICATION/X-NDJSON; charset=utf-8", OFFERS[1]),
        (b"application/json;q=0.5, application/x-ndjson", OFFERS[1]),
        (b"application/json;q=0, */*", OFFERS[1]),
        (b"text/html, */*;q=0.1", OFFERS[0]),
        (b"text/html," * 100 + b"application/x-ndjson", OFFERS[1]),
    ],
)
def test_best_offer_is_chosen(header: bytes | None, chosen: str) -> None:
    assert acceptable(header, OFFERS) == chosen


@each("header", [b"text/event-stream", b"application/json;q=0", b"*/*;q=0", b"*/*;q=2", b";;,,"])
def test_nothing_acceptable_is_refused(header: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        acceptable(header, OFFERS)
    assert refused.value.spec is errors.NOT_ACCEPTABLE


@each(
    "header",
    [
        b"application/json",
        b"Application/JSON",
        b'application/json; charset="UTF-8"',
        b" application/json ",
    ],
)
def test_content_type_is_matched_without_case_and_parameters(header: bytes) -> None:
    assert content_type(header, OFFERS) == OFFERS[0]


@each(
    "header", [None, b"", b"text/plain", b"application/json; charset=latin-1", b"application/jsonx"]
)
def test_other_content_type_is_refused(header: bytes | None) -> None:
    with pytest.raises(ApiError) as refused:
        content_type(header, OFFERS)
    assert refused.value.spec is errors.UNSUPPORTED_MEDIA


@each(
    ("header", "json"),
    [
        (None, False),
        (b"*/*", False),
        (b"text/html, */*;q=0.8", False),
        (b"application/json", True),
        (b"application/json, */*;q=0.5", True),
        (b"application/octet-stream, application/json;q=0.9", False),
        (b"application/json;q=0", False),
    ],
)
def test_json_is_meant_only_when_it_is_named(header: bytes | None, json: bool) -> None:
    assert names_json(header) is json

"""If-Match and If-None-Match."""

import asyncio
from typing import Any

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.http.budgets import BodyBudget, UnreadBudget
from contrail_edge.http.cors import Cors
from contrail_edge.http.requests import EdgeState, Request
from contrail_edge.inputs.preconditions import Preconditions, etag, preconditions
from tests.support.each import each


async def unused() -> Any:
    raise AssertionError("nothing is received")


_NOTHING_SHARED = EdgeState(BodyBudget(0), UnreadBudget(0, 1), Cors(frozenset()), 0)


def wanted(**headers: str) -> Preconditions:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "PUT", "raw_path": b"/", "query_string": b"", "headers": raw}
    return preconditions(Request(scope, unused, _NOTHING_SHARED))


def for_put(conditions: Preconditions, version: int | None) -> tuple[int | None, bool]:
    async def current() -> int | None:
        return version

    return asyncio.run(conditions.for_put(current))


def test_no_precondition_asks_for_nothing() -> None:
    assert for_put(wanted(), 3) == (None, False)


def test_one_etag_is_left_to_the_storage_to_compare() -> None:
    assert for_put(wanted(if_match='"3"'), None) == (3, False)
    assert etag(3) == (b"etag", b'"3"')


def test_star_in_if_none_match_only_creates() -> None:
    assert for_put(wanted(if_none_match="*"), None) == (None, True)


def test_star_in_if_match_needs_something_there() -> None:
    # Whichever version stands when the change is applied, so there is none to look up.
    assert for_put(wanted(if_match="*"), None) == (0, False)
    with pytest.raises(ApiError) as refused:
        for_put(wanted(if_match="*", if_none_match='"2"'), None)
    assert refused.value.spec is errors.PRECONDITION_FAILED


def for_delete(conditions: Preconditions, version: int) -> int | None:
    async def current() -> int:
        return version

    return asyncio.run(conditions.for_delete(current))


def test_removal_leaves_one_etag_to_the_storage_and_looks_others_up() -> None:
    assert for_delete(wanted(), 3) is None
    assert for_delete(wanted(if_match="*"), 3) is None
    assert for_delete(wanted(if_match='"2"'), 3) == 2
    assert for_delete(wanted(if_match='"2", "3"'), 3) == 3
    assert for_delete(wanted(if_none_match='"2"'), 3) == 3
    for conditions in (
        wanted(if_match='"2", "4"'),
        wanted(if_none_match='"3"'),
        wanted(if_none_match="*"),
        wanted(if_match='"2"', if_none_match="*"),
    ):
        with pytest.raises(ApiError) as refused:
            for_delete(conditions, 3)
        assert refused.value.spec is errors.PRECONDITION_FAILED


def test_one_of_several_etags_is_enough() -> None:
    assert for_put(wanted(if_match='"2", "3"'), 3) == (3, False)
    with pytest.raises(ApiError):
        for_put(wanted(if_match='"2", "4"'), 3)


@each("header", ['W/"3"', '"three"', '"03"'])
def test_etag_that_is_not_ours_never_matches(header: str) -> None:
    with pytest.raises(ApiError) as refused:
        for_put(wanted(if_match=header), 3)
    assert refused.value.spec is errors.PRECONDITION_FAILED


def test_if_none_match_with_etags_refuses_those_versions() -> None:
    assert for_put(wanted(if_none_match='"2"'), 3) == (3, False)
    with pytest.raises(ApiError):
        for_put(wanted(if_none_match='W/"3"'), 3)


@each("header", ["3", '"3', '"3" "4"', '"3 "', "x"])
def test_header_that_is_no_list_of_etags_is_400(header: str) -> None:
    with pytest.raises(ApiError) as refused:
        wanted(if_match=header)
    assert refused.value.spec is errors.BAD_REQUEST

"""What travels: every method of the link as it is declared, every refusal with all it says."""

import inspect
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common import errors
from contrail_common.errors import BY_NAME, ApiError, FieldProblem
from contrail_link.contract import StorageLink
from contrail_link.contract.remote import REPEAT, Remote
from contrail_link.tcp.client import RemoteLink
from contrail_link.tcp.methods import (
    METHODS,
    PUBLISH,
    PUBLISH_BATCH,
    PUBLISH_EACH,
    DeclaredMethod,
    Method,
    encode,
)
from contrail_link.tcp.refusals import WireError, decode_error, encode_error
from tests.support.each import each

COROUTINES = {
    name: method
    for name, method in inspect.getmembers(StorageLink, inspect.iscoroutinefunction)
    if not name.startswith("_")
}


PUBLISHES = {PUBLISH.name, PUBLISH_BATCH.name, PUBLISH_EACH.name}
LOCAL = {"may_retry", "metrics_text"}


@each(
    "method",
    [method for method in METHODS.values() if method.name not in PUBLISHES],
    ids=lambda method: method.name,
)
def test_method_has_the_types_of_its_declaration(method: Method[Any]) -> None:
    hints = get_type_hints(COROUTINES[method.name])
    result = hints.pop("return")
    assert get_args(method.arguments.type) == tuple(hints.values())
    if not method.streams:
        assert method.result.type == result


def test_publish_travels_in_both_forms_of_its_declaration() -> None:
    content = get_type_hints(StorageLink.publish_then)["content"]
    forms = [get_args(method.arguments.type) for method in (PUBLISH, PUBLISH_BATCH)]
    assert forms == [(str, one) for one in get_args(content)]
    each = get_type_hints(StorageLink.publish_each_then)["messages"]
    assert get_args(PUBLISH_EACH.arguments.type) == (each,)


def test_every_method_travels_under_a_number_of_its_own() -> None:
    assert {method.name for method in METHODS.values()} - PUBLISHES == COROUTINES.keys() - LOCAL
    assert all(number == method.number for number, method in METHODS.items())


def test_client_has_every_method_as_it_is_declared() -> None:
    declared = {
        name: inspect.signature(method)
        for name, method in inspect.getmembers(StorageLink, inspect.isfunction)
        if not name.startswith("_")
    }
    assert declared
    assert {name: inspect.signature(getattr(RemoteLink, name)) for name in declared} == declared


@pytest.mark.parametrize(
    "call",
    [((1,), {"b": 2, "c": 3}), ((1, 2), {}), ((1, 2, 3), {}), ((), {"c": 3, "a": 1, "b": 2})],
)
def test_arguments_travel_in_the_order_of_their_declaration(
    call: tuple[tuple[int, ...], dict[str, int]],
) -> None:
    async def method(self: object, a: int, b: int, c: int = 3) -> None: ...

    assert DeclaredMethod(method, Remote(1, REPEAT, None)).in_order(*call) == (1, 2, 3)


def test_method_without_a_result_answers_nothing() -> None:
    for method in METHODS.values():
        if method.result.type is NoneType:
            assert method.result.decode(encode(None)) is None


@given(
    st.sampled_from(sorted(BY_NAME)),
    st.text(max_size=30),
    st.lists(st.builds(FieldProblem, st.text(max_size=9), st.text(max_size=9)), max_size=3),
    st.none() | st.integers(0, 60),
    st.none() | st.booleans(),
)
def test_refusal_arrives_as_it_was(
    name: str,
    detail: str,
    fields: list[FieldProblem],
    retry_after_s: int | None,
    applied: bool | None,
) -> None:
    error = ApiError(BY_NAME[name], detail, fields, retry_after_s, applied)
    assert decode_error(encode_error(error)) == error


@pytest.mark.parametrize(
    ("code", "spec"), [(10059, errors.STREAM_NOT_FOUND), (29_999, errors.INTERNAL)]
)
def test_refusal_of_an_unknown_name_is_known_by_its_code(code: int, spec: errors.ErrorSpec) -> None:
    body = encode(WireError("a_newer_name", code, "why", [], False, None))
    assert decode_error(body) == ApiError(spec, "why", applied=False)

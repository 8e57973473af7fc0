"""JSON bodies: the nesting bound, and where errors are said to be."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.inputs import json_steps
from contrail_edge.inputs.json_body import (
    NESTING_MAX,
    check_nesting,
    check_values,
    decode_json,
    decode_untyped,
    json_pointer,
)
from tests.support.each import each

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='"\\[]{}aé', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=40,
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


def count_values(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(count_values, inner))


@pytest.mark.long
@given(JSON, st.integers(1, 8))
def test_values_are_counted_outside_of_strings(value: Any, limit: int) -> None:
    text = json.dumps(value).encode()
    try:
        check_values(text, limit)
    except ApiError:
        # An empty list or object is taken for one that holds a value.
        assert 2 * count_values(value) > limit
    else:
        assert count_values(value) <= limit


@given(JSON, st.integers(1, 6), st.integers(1, 5))
def test_nesting_is_the_same_however_the_text_is_cut(value: Any, limit: int, size: int) -> None:
    text = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_steps, "_SLICE_BYTES", size)
        try:
            check_nesting(text, limit)
        except ApiError:
            assert depth(value) > limit
        else:
            assert depth(value) <= limit


@given(JSON, st.integers(1, 6))
def test_nesting_is_measured_outside_of_strings(value: Any, limit: int) -> None:
    text = json.dumps(value).encode()
    if depth(value) <= limit:
        check_nesting(text, limit)
    else:
        with pytest.raises(ApiError) as refused:
            check_nesting(text, limit)
        assert refused.value.spec is errors.MALFORMED_BODY


def test_sixty_four_levels_are_taken_and_one_more_is_not() -> None:
    decode_untyped(b"[" * NESTING_MAX + b"]" * NESTING_MAX)
    with pytest.raises(ApiError, match="nested deeper"):
        decode_untyped(b"[" * (NESTING_MAX + 1) + b"]" * (NESTING_MAX + 1))


@each(
    "body",
    [
        b"",
        b"{",
        b'{"a":1,}',
        b"{'a':1}",
        b'{"a":"\xff"}',
        b'{"a":"\\ud800"}',
        b'{"a":NaN}',
        b'{"a":1e999}',
        b'{"a":' + b"9" * 100_000 + b"}",
        b"{" * 100_000,
        b"[" * 100_000,
        b"\xef\xbb\xbf{}",
        b"{} {}",
        b"\x00",
    ],
)
def test_malformed_json_is_400(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        decode_untyped(body)
    assert (refused.value.spec.status, refused.value.spec.code) == (400, 10025)


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    number: int
    names: dict[str, list[str]] = {}


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    inner: list[Inner]


@each(
    ("body", "pointer"),
    [
        (b"[]", ""),
        (b'{"inner":{}}', "/inner"),
        (b'{"inner":[{"number":1},{"number":"2"}]}', "/inner/1/number"),
        (b'{"inner":[{}]}', "/inner/0/number"),
        (b'{"inner":[],"a/b~c":1}', "/a~1b~0c"),
        (b'{"inner":[{"number":1,"names":{"x":[1]}}]}', "/inner/0/names"),
    ],
)
def test_wrong_shape_is_422_with_a_pointer(body: bytes, pointer: str) -> None:
    with pytest.raises(ApiError) as refused:
        decode_json(msgspec.json.Decoder(Outer), body)
    assert refused.value.spec is errors.INVALID_FIELD
    assert [field.pointer for field in refused.value.fields] == [pointer]


def test_number_beyond_any_width_is_malformed_in_a_typed_place_too() -> None:
    with pytest.raises(ApiError) as refused:
        decode_json(msgspec.json.Decoder(Outer), b'{"inner":[{"number":' + b"9" * 10_000 + b"}]}")
    assert refused.value.spec is errors.MALFORMED_BODY


def test_pointer_of_a_path() -> None:
    assert json_pointer("$") == ""
    assert json_pointer("$.messages[3].data") == "/messages/3/data"

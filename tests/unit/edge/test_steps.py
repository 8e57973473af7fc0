"""Parts of large texts, found in slices: the same as the decoder finds at once."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.errors import ApiError
from contrail_edge.http.steps import at_once
from contrail_edge.inputs import json_steps, packed_steps
from contrail_edge.inputs.json_steps import check_utf8, compact, outline
from contrail_edge.inputs.packed_steps import PackedParts

texts = st.text('"\\[]{}, :ab\té\U0001f600', max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.floats(-1, 1) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=12,
)
sizes = st.integers(1, 9)


@st.composite
def written(draw: st.DrawFn, value: Any) -> bytes:
    """JSON of a value with blanks and escapes in it."""
    text = json.dumps(
        value, indent=draw(st.sampled_from([None, 1, "\t"])), ensure_ascii=draw(st.booleans())
    )
    return text.replace("\n", draw(st.sampled_from(["\n", "\r\n", " \n"]))).encode()


@given(st.data(), values, sizes)
def test_value_is_compacted_as_the_library_does(data: st.DataObject, value: Any, size: int) -> None:
    text = data.draw(written(value))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_steps, "_SLICE_BYTES", size)
        assert at_once(compact(text)) == msgspec.json.format(text, indent=-1)


@pytest.mark.parametrize("text", [b"[1 2]", b"[tr ue]", b"1\n2", b"[1  ,2 3]"])
@pytest.mark.parametrize("size", [1, 2, 3, 99])
def test_blanks_that_part_values_are_not_dropped(
    text: bytes, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_steps, "_SLICE_BYTES", size)
    with pytest.raises(ApiError):
        at_once(compact(text))


@given(st.data(), st.lists(values, max_size=4), sizes)
def test_elements_of_an_array_are_found(data: st.DataObject, items: list[Any], size: int) -> None:
    text = data.draw(written({"m": items, "s": "[,"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_steps, "_SLICE_BYTES", size)
        found = at_once(outline(text, 2, 4, "items"))
        assert json.loads(found.skeleton) == {"m": [], "s": "[,"}
        assert [json.loads(text[start:end]) for start, end in found.inner[0]] == items
        if len(items) > 1:
            with pytest.raises(ApiError, match=f"limit is {len(items) - 1} items"):
                at_once(outline(text, 2, len(items) - 1, "items"))


@given(st.text('[]{}",:1 \\', max_size=12), sizes)
def test_text_that_is_not_json_is_not_taken(text: str, size: int) -> None:
    """What is found of it, or one of its parts, is refused by the decoder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_steps, "_SLICE_BYTES", size)
        try:
            found = at_once(outline(text.encode(), 1, 99, "items"))
            json.loads(found.skeleton)
            inner = found.inner[0] if found.inner else []
            if text.strip()[:1] == "[":
                parts = [json.loads(text[start:end]) for start, end in inner]
                assert parts == json.loads(text)
        except (ApiError, ValueError):
            with pytest.raises(ValueError):  # noqa: PT011 json's own
                json.loads(text)


@given(st.lists(values | st.binary(max_size=9), max_size=4), st.integers(9, 40))
def test_elements_of_a_packed_array_are_found(items: list[Any], window: int) -> None:
    packed = msgspec.msgpack.encode(items)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_steps, "WINDOW_BYTES", window)
        parts = PackedParts(packed)
        head = parts.array(0)
        assert head is not None
        spans = at_once(parts.spans(head[1], head[0]))
    assert [msgspec.msgpack.decode(packed[start:end]) for start, end in spans] == items


@given(st.binary(max_size=30))
def test_bytes_that_are_not_msgpack_are_refused(packed: bytes) -> None:
    try:
        [(start, end)] = at_once(PackedParts(packed).spans(0, 1))
    except ApiError:
        with pytest.raises((msgspec.DecodeError, RecursionError)):
            msgspec.msgpack.Decoder(msgspec.Raw).decode(packed)
    else:
        assert start == 0 < end <= len(packed)


@given(st.text(max_size=9), sizes)
def test_characters_may_lie_across_slices(text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_steps, "_SLICE_BYTES", size)
        at_once(check_utf8(text.encode()))
        with pytest.raises(UnicodeDecodeError):
            at_once(check_utf8(text.encode() + b"\xe2\x82"))

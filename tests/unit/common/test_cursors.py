"""Cursors over all shards: what goes out comes back, and nothing else is taken for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.cursors import Cursor, after_each, read_cursor
from contrail_common.timeunits import INT64_MAX
from tests.support.each import each

seqs = st.lists(st.integers(0, INT64_MAX), min_size=1, max_size=64)


@given(st.text(max_size=16), seqs)
def test_cursor_comes_back_as_it_went_out(incarnation: str, next_seqs: list[int]) -> None:
    cursor = Cursor(incarnation, next_seqs)
    assert read_cursor(cursor.text()) == cursor
    assert not cursor.text().isdigit()
    assert cursor.text().replace("-", "").replace("_", "").isalnum()


@given(st.text(max_size=40))
def test_any_text_is_a_cursor_or_refused(text: str) -> None:
    try:
        cursor = read_cursor(text)
    except ValueError:
        return
    assert isinstance(cursor, Cursor)


@each(
    "text",
    ["", "12", "k", "ä", "====", Cursor("i", [1] * 65).text(), Cursor("i", [-1]).text()],
)
def test_text_that_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cursor"):
        read_cursor(text)


def test_cursor_after_each_message_moves_its_shard_alone() -> None:
    begin = Cursor("i", [1, 5, 9])
    texts = after_each(begin, [(1, 5), (0, 3), (1, 8)])
    assert [read_cursor(text).next_seqs for text in texts] == [[1, 6, 9], [4, 6, 9], [4, 9, 9]]

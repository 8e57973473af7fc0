"""Pages of subjects by name, while subjects come and go."""

import gc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.core.results import Writes
from contrail_storage.core.subjects.subject_table import SubjectTable
from contrail_storage.reading import name_order
from contrail_storage.reading.filter_cache import FilterCache
from contrail_storage.reading.name_order import NameOrders
from tests.unit.storage.dispatcher_rig import run
from tests.unit.storage.naive_subjects import naive_matches
from tests.unit.storage.test_filters import add, numbered, remove

NAMES = [f"{first}.{second}" for first in ("a", "ab", "é", "z") for second in "0123xyz"]
FILTERS = ["", "a.*", "*.x", "z.>", "*.*", "a.1", "q.*"]
changes = st.lists(st.tuples(st.booleans(), st.sampled_from(NAMES)), max_size=30)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs of few names, used for every page."""
    with monkeypatch.context() as patch:
        patch.setattr(name_order, "_RUNS", (8, 4, 2))
        patch.setattr(name_order, "_FEW", -1)
        patch.setattr(name_order, "_WINDOW", 2)
        yield


def change(table: SubjectTable, some: list[tuple[bool, str]]) -> None:
    for kept, name in some:
        if kept:
            add(table, name, 1)
        elif name in table.ids:
            remove(table, name)


@pytest.mark.usefixtures("small")
@given(changes, st.sampled_from(FILTERS), st.integers(1, 5), st.lists(changes, max_size=3))
def test_pages_have_each_name_in_order_while_subjects_come_and_go(
    before: list[tuple[bool, str]],
    pattern: str,
    limit: int,
    between: list[list[tuple[bool, str]]],
) -> None:
    async def scene() -> None:
        table, filters = SubjectTable(1), FilterCache()
        orders = NameOrders(filters)
        wanted = filters.share(table, (pattern,) if pattern else ())
        change(table, before)
        happens, after = iter(between), ""
        while True:
            matching = sorted(
                (name, table.count(name))
                for _, name in table.live()
                if name > after and (not pattern or naive_matches(pattern, name))
            )
            page = await orders.page(table, wanted, after, limit)
            assert page == matching[:limit]
            if not page:
                return
            after = page[-1][0]
            change(table, next(happens, []))
            if len(page) == 1:  # slots move
                table.restore_next_id(table.next_id + 7, Writes())

    run(scene())


@pytest.mark.usefixtures("small")
def test_orders_are_kept_within_their_bytes_and_with_their_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(name_order, "_BYTES_MAX", 2 * 4 * 8)

    async def scene() -> None:
        orders = NameOrders(FilterCache())
        tables = [numbered(*NAMES[:8]) for _ in range(4)]
        for table in tables:
            assert len(await orders.page(table, FilterCache().share(table, ()), "", 9)) == 8
            assert orders.size_bytes <= 2 * 4 * 8
        assert orders.size_bytes == 2 * 4 * 8
        del table, tables[3:]
        gc.collect()
        assert orders.size_bytes == 4 * 8

    run(scene())

"""The duplicate window: exact at its edge, bounded, and the same after a restart."""

import asyncio
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.timeunits import INT64_MAX
from contrail_storage.core import id_index
from contrail_storage.core.dedupe import DedupeWindow
from contrail_storage.core.id_index import NO_ID, IdHashes
from contrail_storage.core.results import Step, Writes
from tests.support.slices import assert_no_stall
from tests.unit.storage.machine_rig import SHARD, RowStore, hash_of

WINDOW_NS = 100


class Kept:
    """A window with its rows."""

    def __init__(self) -> None:
        self.window = DedupeWindow(SHARD)
        self.store = RowStore()
        self.index = 0
        self.seq = 0

    def append(self, time_ns: int, *ids: bytes, same_entry: bool = False) -> None:
        """Store one message for each id, in one entry."""
        self.index += not same_entry
        writes = Writes()
        self.window.expire(time_ns, WINDOW_NS, writes)
        seqs = np.arange(self.seq + 1, self.seq + 1 + len(ids))
        self.seq += len(ids)
        self.window.add(IdHashes.of(b"".join(ids)), seqs, Step(self.index, time_ns, writes))
        self.store.write(writes.rows)

    def find(self, time_ns: int, *ids: bytes) -> list[int]:
        writes = Writes()
        self.window.expire(time_ns, WINDOW_NS, writes)
        self.store.write(writes.rows)
        return self.known(*ids)

    def known(self, *ids: bytes) -> list[int]:
        """Sequences of the ids, as the window stands."""
        return self.window.find(IdHashes.of(b"".join(ids))).tolist()

    def restart(self) -> None:
        self.window = DedupeWindow(SHARD)
        self.window.load(self.store.scan(b"D"))


A, B, C = (hash_of(text) for text in "ABC")


def test_id_is_known_until_its_message_is_exactly_a_window_old() -> None:
    kept = Kept()
    kept.append(1_000, A)
    assert kept.find(1_000 + WINDOW_NS - 1, A) == [1]
    assert kept.find(1_000 + WINDOW_NS, A) == [0]


def test_expired_id_may_be_stored_again_under_its_new_sequence() -> None:
    kept = Kept()
    kept.append(0, A)
    kept.append(WINDOW_NS, A)
    assert kept.find(WINDOW_NS, A) == [2]
    kept.restart()
    assert kept.find(2 * WINDOW_NS - 1, A) == [2]
    assert kept.find(2 * WINDOW_NS, A) == [0]


def test_newest_sequence_of_a_held_id_is_found_however_the_window_was_made() -> None:
    """An id may be in the window twice: held for producers, and stored again since."""
    kept = Kept()
    kept.append(0, A)
    writes = Writes()
    kept.window.expire(WINDOW_NS, WINDOW_NS, writes, held_from=1)
    kept.index, kept.seq = 2, 2
    kept.window.add(IdHashes.of(A), np.array([2]), Step(2, WINDOW_NS, writes))
    kept.store.write(writes.rows)
    asked = IdHashes.of(A)
    grown, restored, loaded = kept.window, DedupeWindow(SHARD), DedupeWindow(SHARD)
    restored.restore(list(grown.runs()), Step(1, WINDOW_NS, Writes()))
    loaded.load(kept.store.scan(b"D"), live_seq=2)
    more = IdHashes.of(b"".join(hash_of(str(number)) for number in range(1_000)))
    grown.add(more, np.arange(3, 1_003), Step(3, WINDOW_NS, Writes()))  # to another segment
    for window in grown, restored, loaded:
        assert window.find(asked).tolist() == window.find(asked, 1).tolist() == [2]


def test_rows_go_when_their_ids_expire() -> None:
    kept = Kept()
    for time_ns in (0, 10, 20, 110):
        kept.append(time_ns, hash_of(str(time_ns)))
    assert len(kept.store.scan(b"D")) == 2
    kept.restart()
    assert kept.find(110, *(hash_of(str(time_ns)) for time_ns in (0, 10, 20))) == [0, 0, 3]


def test_two_appends_of_one_entry_share_its_row() -> None:
    kept = Kept()
    kept.append(0, A, B)
    kept.append(0, C, same_entry=True)
    assert len(kept.store.scan(b"D")) == 1
    kept.restart()
    assert kept.known(A, B, C) == [1, 2, 3]


@pytest.mark.long
def test_memory_is_bounded_by_the_ids_of_one_window() -> None:
    kept = Kept()
    for number in range(60_000):
        kept.append(number, hash_of(str(number)))
    assert len(kept.window) < 20_000
    live = kept.known(*(hash_of(str(number)) for number in range(59_900, 60_000)))
    assert live == list(range(59_901, 60_001))


@pytest.mark.long
def test_every_id_of_a_window_that_grows_and_shrinks_is_known() -> None:
    kept = Kept()
    number = 0
    live: list[tuple[int, int]] = []
    for now_ns, count in enumerate([1, 1_500, 3, 20_000, 20_000, 7] + [500] * 150 + [1] * 150):
        live = [(each, at) for each, at in live if now_ns - at < WINDOW_NS]
        kept.append(now_ns, *(hash_of(str(each)) for each in range(number, number + count)))
        live += [(each, now_ns) for each in range(number, number + count)]
        number += count
        if now_ns % 50 == 5:
            kept.restart()
        if now_ns % 50 == 45:
            known = kept.known(*(hash_of(str(each)) for each, _ in live))
            assert known == [each + 1 for each, _ in live]
            fresh = kept.known(*(hash_of(str(number + each)) for each in range(1_000)))
            assert not any(fresh)
    assert len(kept.window) < 3_000


def test_ids_of_one_hash_bucket_are_distinguished() -> None:
    kept = Kept()
    alike = [(7 + (number << 40)).to_bytes(8, "little") + bytes(8) for number in range(3_000)]
    kept.append(0, *alike[:2_000])
    kept.append(0, *alike[2_000:2_500])
    assert kept.known(*alike) == [*range(1, 2_501), *[0] * 500]
    other_half = [each[:8] + (1 << 40).to_bytes(8, "little") for each in alike]
    assert not any(kept.known(*other_half))


def colliding(number: int) -> bytes:
    """Ids that differ only where the table does not look first."""
    return (7 + (number << 40)).to_bytes(8, "little") + (number % 3 << 32).to_bytes(8, "little")


ids = st.builds(colliding, st.integers(0, 30)) | st.builds(hash_of, st.sampled_from("ABCDEFGH"))
steps = st.lists(
    st.tuples(st.integers(0, 40), st.lists(ids, max_size=8, unique=True), st.booleans()),
    max_size=20,
)


@given(steps)
def test_window_is_a_dict_that_forgets_by_time(script: list[tuple[int, list[bytes], bool]]) -> None:
    kept = Kept()
    known: dict[bytes, tuple[int, int]] = {}
    now_ns = 0
    for step_ns, batch, restarting in script:
        now_ns += step_ns
        known = {each: at for each, at in known.items() if now_ns - at[1] < WINDOW_NS}
        new = [each for each in batch if each not in known]
        found = kept.find(now_ns, *batch)
        assert [each for each, seq in zip(batch, found, strict=True) if not seq] == new
        if new:
            kept.append(now_ns, *new)
            known |= {each: (kept.seq - len(new) + 1 + at, now_ns) for at, each in enumerate(new)}
        if restarting:
            kept.restart()
        assert kept.known(*known) == [seq for seq, _ in known.values()]


few_ids = st.integers(0, 400).map(lambda number: hash_of(str(number)))
# The same bucket and pattern, or the same half, with another rest.
alike_ids = st.builds(
    lambda bucket, rest: bucket.to_bytes(8, "little") + rest.to_bytes(8, "little"),
    st.sampled_from([1, 1 << 20, (1 << 20) + 1]),
    st.integers(0, 40).map(lambda number: number << 32),
)


@given(
    st.lists(
        st.tuples(
            st.integers(0, WINDOW_NS // 2),
            st.lists(few_ids | alike_ids, min_size=1, max_size=200, unique=True),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_window_knows_what_a_plain_dict_knows(steps: list[tuple[int, list[bytes], bool]]) -> None:
    kept = Kept()
    times: dict[bytes, tuple[int, int]] = {}
    now_ns = 0
    for later_ns, asked, restarted in steps:
        now_ns += later_ns
        times = {each: found for each, found in times.items() if now_ns - found[0] < WINDOW_NS}
        known = kept.find(now_ns, *asked)
        assert known == [times.get(each, (0, 0))[1] for each in asked]
        new = [each for each in asked if each not in times]
        if new:
            times |= {each: (now_ns, kept.seq + at) for at, each in enumerate(new, 1)}
            kept.append(now_ns, *new)
        if restarted:
            kept.restart()


@given(
    st.lists(
        st.tuples(
            st.integers(0, WINDOW_NS // 4),
            st.lists(few_ids, min_size=1, max_size=60, unique=True),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_window_of_many_segments_is_a_dict_too(steps: list[tuple[int, list[bytes], bool]]) -> None:
    with (
        patch.object(id_index, "_SEGMENT_MIN", 4),
        patch.object(id_index, "_MOVED_MAX", 16),
        patch.object(id_index, "_SEGMENT_MAX", 32),
    ):
        test_window_knows_what_a_plain_dict_knows.hypothesis.inner_test(steps)


def test_row_of_consecutive_sequences_is_as_good_as_one_that_names_each() -> None:
    ids = [hash_of(str(number)) for number in range(50)]
    consecutive, each_named = Kept(), Kept()
    consecutive.append(0, *ids)
    hashes, writes = IdHashes.of(b"".join(ids)), Writes()
    seqs = np.arange(1, 51)
    seqs[-1] = 60
    each_named.window.add(hashes, seqs, Step(1, 0, writes))
    each_named.store.write(writes.rows)
    [(_, short)], [(_, long)] = consecutive.store.scan(b"D"), each_named.store.scan(b"D")
    assert len(short) < 13 * 50 < 24 * 50 < len(long)
    for kept in consecutive, each_named:
        kept.restart()
    assert consecutive.known(*ids) == list(range(1, 51))
    assert each_named.known(*ids) == [*range(1, 50), 60]


def test_id_that_comes_twice_is_seen_and_none_that_comes_often_is_not() -> None:
    assert IdHashes.of(A + B + A).repeat()
    assert not IdHashes.of(A + B + C).repeat()
    assert not IdHashes.of(NO_ID + A + NO_ID + NO_ID).repeat()
    assert IdHashes.of(NO_ID + A + NO_ID + A).repeat()


def test_hash_is_present_when_any_bit_of_it_is() -> None:
    low, high = b"\1" + bytes(15), bytes(15) + b"\1"
    assert IdHashes.of(low + NO_ID + high).present().tolist() == [True, False, True]
    assert IdHashes.of(low + high).present().all()


@pytest.mark.long
def test_many_appends_expire_in_a_short_step() -> None:
    """100,000 single publishes, when the next one comes after a pause; held, and not held."""
    source, writes, appends = DedupeWindow(SHARD), Writes(), 100_000
    for number in range(1, appends + 1):
        run = number, number.to_bytes(8, "little") * 2, number.to_bytes(8, "little")
        source.restore([run], Step(number, 0, writes))
    rows = [(row[1], row[2]) for row in writes.rows if row[0] == "put"]
    for held_from, held in (INT64_MAX, 0), (1, appends):
        windows = [DedupeWindow(SHARD) for _ in range(3)]  # for three tries
        for window in windows:
            window.load(rows)

        expire = partial(_expire_all, windows, appends + WINDOW_NS, held_from, held)
        asyncio.run(assert_no_stall(expire))


async def _expire_all(windows: list[DedupeWindow], now_ns: int, held_from: int, held: int) -> None:
    window = windows.pop()
    window.expire(now_ns, WINDOW_NS, Writes(), held_from)
    assert (len(window.marks), window.held_ids) == (0, held)


@pytest.mark.long
def test_ids_of_many_appends_are_restored_in_a_short_step() -> None:
    """As many as one record of an archive has."""
    runs = [(at, hash_of(str(at)), at.to_bytes(8, "little")) for at in range(1, 4_097)]

    async def operation() -> None:
        window = DedupeWindow(SHARD)
        window.restore(runs, Step(1, 0, Writes()))
        assert len(window) == len(runs)

    asyncio.run(assert_no_stall(operation))

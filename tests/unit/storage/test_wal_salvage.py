"""What is used of a damaged log: entries one behind the other, and doubt wherever some may lack."""

from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.disk.files import Files
from contrail_storage.repair.salvage import SalvagedGroup, begin_again, salvage
from contrail_storage.wal.newest_segment import NEWEST_NAME
from contrail_storage.wal.node_log import LogOptions, NodeLog
from tests.unit.storage.wal_disk import HandLoop, SimDisk

ROOT: Final = Path("/wal")
GROUPS: Final = (0, 1)
ENTRIES: Final = 12
SMALL: Final = LogOptions(idle_s=1000.0, segment_bytes=200, keep_bytes=0)


def data(group: int, index: int) -> bytes:
    return f"entry {index} of {group}".encode()


def written(entries: int = ENTRIES) -> SimDisk:
    """A log of several segments in which two groups take turns, a batch for each entry."""
    disk, loop = SimDisk(), HandLoop()
    reached: dict[int, int] = {}
    log = NodeLog.open(ROOT, files=disk, options=SMALL)
    for group in GROUPS:
        log.attach(group, lambda position, _, group=group: reached.__setitem__(group, position))
    log.start(call_soon=loop.call_soon, on_failure=lambda _: None)
    for index in range(1, entries + 1):
        for group in GROUPS:
            position = log.append(group, index, 1, data(group, index))
            loop.run_until(lambda group=group, at=position: reached.get(group, 0) >= at)
    log.close()
    return disk


def salvaged(disk: SimDisk, applied: dict[int, int]) -> dict[int, SalvagedGroup]:
    return salvage(disk, ROOT, applied, None)


def check(group: int, held: SalvagedGroup, applied: int) -> None:
    """Everything that is used follows what the store holds, and is what was written."""
    expected = range(applied + 1, applied + 1 + len(held.entries))
    assert held.entries == [(data(group, index), index, 1) for index in expected]


LOG: Final = written()
NAMES: Final = sorted(LOG.segments)


def copy_of_log() -> SimDisk:
    return LOG.survivor(1.0)


@given(
    place=st.integers(0, len(NAMES) - 1),
    offset=st.integers(0, 10_000),
    applied=st.tuples(st.integers(0, ENTRIES), st.integers(0, ENTRIES)),
)
def test_flipped_bit_anywhere_leaves_a_prefix_and_no_false_certainty(
    place: int, offset: int, applied: tuple[int, int]
) -> None:
    disk = copy_of_log()
    content = disk.names[NAMES[place]].content
    content[offset % len(content)] ^= 1
    found = salvaged(disk, dict(enumerate(applied)))
    is_last = place == len(NAMES) - 1
    for group, held in found.items():
        check(group, held, applied[group])
        # The last batch of all may be a torn one: it has no successor.
        if not held.lost:
            assert held.end >= ENTRIES - is_last


@given(
    missing=st.sets(st.integers(0, len(NAMES) - 1), min_size=1),
    applied=st.tuples(st.integers(0, ENTRIES), st.integers(0, ENTRIES)),
)
def test_missing_segments_leave_a_prefix(missing: set[int], applied: tuple[int, int]) -> None:
    disk = copy_of_log()
    for place in missing:
        del disk.names[NAMES[place]]
    found = salvaged(disk, dict(enumerate(applied)))
    for group, held in found.items():
        check(group, held, applied[group])


def test_sound_log_is_used_whole() -> None:
    found = salvaged(copy_of_log(), {0: 3, 1: 0})
    assert [(held.end, held.lost) for held in found.values()] == [(ENTRIES, False)] * 2
    check(0, found[0], 3)
    check(1, found[1], 0)


def test_nothing_is_lost_where_the_store_is_ahead_of_the_damage() -> None:
    disk = copy_of_log()
    disk.names[NAMES[1]].content[-1] ^= 1
    found = salvaged(disk, {0: 8, 1: 8})
    assert [(held.end, held.lost) for held in found.values()] == [(ENTRIES, False)] * 2


def test_log_that_is_gone_leaves_doubt() -> None:
    found = salvaged(SimDisk(), {0: 4, 1: 0})
    assert [(held.end, held.lost) for held in found.values()] == [(4, True), (0, True)]


@pytest.mark.parametrize("spoil", ["newest segment", "its record"])
def test_newest_segment_that_may_be_missing_leaves_doubt(spoil: str) -> None:
    disk = copy_of_log()
    assert [held.lost for held in salvaged(disk, {}).values()] == [False] * 2
    if spoil == "newest segment":
        del disk.names[max(disk.segments)]
    else:
        disk.names[ROOT / NEWEST_NAME].content[-1] ^= 1
    assert [held.lost for held in salvaged(disk, {}).values()] == [True] * 2


def test_log_begun_again_stands_where_the_store_does(tmp_path: Path) -> None:
    held = SalvagedGroup(7, 3, "n1")
    begin_again(Files(), tmp_path / "wal", None, {1: (7, 3, held)})
    log = NodeLog.open(tmp_path / "wal", keep_from={1: 7})
    assert log.recovery.rot is None
    group = log.recovery.groups[1]
    assert (group.base_index, group.base_term, group.term, group.voted_for) == (7, 3, 3, "n1")
    log.close()
    assert NodeLog.open(tmp_path / "wal", keep_from={1: 7}).recovery.groups[1].last_index == 7

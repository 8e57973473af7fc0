"""Reading the log by index: always the entries that count, never a copy that was replaced."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contrail_storage.seal.frames import Sealer
from contrail_storage.wal import EntriesGoneError, LogOptions, LogRottenError, NodeLog
from tests.unit.storage.test_seal_wal import KEYRING
from tests.unit.storage.wal_disk import HandLoop, SimDisk

ROOT: Final = Path("/wal")
GROUPS: Final = (1, 2)
OPTIONS: Final = LogOptions(idle_s=1000.0, segment_bytes=500, keep_bytes=0, ahead_bytes=0)


class Model:
    """A group's log as a list, and the index up to which entries may be gone."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[int, bytes]] = {}
        self.last, self.term, self.applied, self.gone = 0, 1, 0, 0
        self.flags = 0

    def cut(self, from_index: int) -> None:
        self.entries = {at: one for at, one in self.entries.items() if at < from_index}
        self.last = from_index - 1

    def from_index(self, index: int) -> list[tuple[bytes, int, int]]:
        found = sorted((at, one) for at, one in self.entries.items() if at >= index)
        return [(data, at, term) for at, (term, data) in found]


class Life:
    """A log under changes, restarts, failures, and drops, and what it should have."""

    def __init__(self, random: Random, sealer: Sealer | None) -> None:
        self.random, self.sealer = random, sealer
        self.disk = SimDisk()
        self.models = {group: Model() for group in GROUPS}
        self.open()

    def open(self) -> None:
        self.loop, self.failures = HandLoop(), list[Exception]()
        self.reached = dict.fromkeys(GROUPS, 0)
        applied = {group: model.applied for group, model in self.models.items()}
        self.log = NodeLog.open(
            ROOT, files=self.disk, options=OPTIONS, keep_from=applied, sealer=self.sealer
        )
        for group, model in self.models.items():
            held = self.log.attach(group, lambda at, _, group=group: self.note(group, at))
            assert (held.flags, held.last_index) == (model.flags, model.last)
            assert held.entries == model.from_index(model.applied + 1)
        self.log.start(call_soon=self.loop.call_soon, on_failure=self.failures.append)

    def note(self, group: int, position: int) -> None:
        self.reached[group] = position

    def settle(self, group: int, position: int) -> None:
        self.loop.run_until(lambda: self.reached[group] >= position or bool(self.failures))

    def step(self) -> None:
        usual = (self.append,) * 6 + (self.replace,) * 3 + (self.drop,) * 2
        others = self.reset, self.rotate, self.fail, self.restart, self.mark
        self.random.choice(usual + others)(self.random.choice(GROUPS))

    def add(self, group: int) -> int:
        model = self.models[group]
        model.last += 1
        data = self.random.randbytes(self.random.choice((0, 1, 30, 200)))
        model.entries[model.last] = model.term, data
        return self.log.append(group, model.last, model.term, data)

    def append(self, group: int) -> None:
        for _ in range(self.random.randint(0, 5)):
            position = self.add(group)
            if self.random.random() < 0.5:
                self.settle(group, position)
        self.settle(group, self.add(group))

    def replace(self, group: int) -> None:
        """Another leader: entries that are not applied give way to others, maybe in one batch."""
        model = self.models[group]
        from_index = self.random.randint(model.applied + 1, model.last + 1)
        term = self.log.term_at(group, from_index - 1)
        assert term is not None
        model.cut(from_index)
        model.term += self.random.randint(0, 1)
        position = self.log.truncate(group, from_index, term)
        for _ in range(self.random.randint(0, 3)):
            position = self.add(group)
        self.settle(group, position)

    def reset(self, group: int) -> None:
        """A snapshot was installed: at an entry that is there, of another history, or beyond."""
        model = self.models[group]
        index = self.random.randint(model.applied + 1, model.last + 5)
        model.term += self.random.randint(0, 1)
        term = model.term
        if index in model.entries and self.random.random() < 0.7:
            term = model.entries[index][0]
        if index in model.entries and term == model.entries[index][0]:
            model.cut(index + 1)
        else:
            model.entries.clear()
            model.last = model.gone = index
        model.applied = index
        self.settle(group, self.log.reset(group, index, term))

    def drop(self, _: int) -> None:
        for model in self.models.values():
            model.applied = self.random.randint(model.applied, model.last)
        applied = {number: model.applied for number, model in self.models.items()}
        self.log.drop_segments(applied, keep_bytes=self.random.choice((0, 600, 2_000)))
        for model in self.models.values():
            model.gone = max(model.gone, model.applied)

    def rotate(self, _: int) -> None:
        self.log.rotate()

    def mark(self, group: int) -> None:
        self.models[group].flags = flags = self.random.randint(0, 3)
        self.settle(group, self.log.save_flags(group, flags))
        assert self.log.flags(group) == flags

    def fail(self, group: int) -> None:
        self.disk.fail("sync")
        model = self.models[group]
        self.log.append(group, model.last + 1, model.term, b"lost")
        self.loop.run_until(lambda: bool(self.failures))
        self.disk.heal()
        self.log.recover()
        self.failures.clear()
        # As a group does, because the failure may have lost a cut.
        term = self.log.term_at(group, model.last)
        assert term is not None
        self.settle(group, self.log.truncate(group, model.last + 1, term))

    def restart(self, _: int) -> None:
        survivor = self.disk.survivor(self.random.choice((0.0, 1.0)))
        self.log.close()
        self.disk = survivor
        self.open()

    def check(self) -> None:
        for group, model in self.models.items():
            index = self.random.randint(1, model.last + 2)
            limit = self.random.choice((1, 100, 1 << 20))
            try:
                found = self.log.read(group, index, limit)
            except EntriesGoneError:
                assert index <= model.gone
                continue
            expected = model.from_index(index)
            assert found == expected[: len(found)]
            assert found or not expected
            assert sum(len(data) for data, _, _ in found) <= limit or len(found) == 1
            for _, at, term in found:
                assert self.log.term_at(group, at) == term


@pytest.mark.parametrize("sealer", [None, KEYRING], ids=["plain", "sealed"])
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_any_life_of_a_log_gives_the_entries_that_count(sealer: Sealer | None, seed: int) -> None:
    life = Life(Random(seed), sealer)
    try:
        for _ in range(25):
            life.step()
            life.check()
    finally:
        life.log.close()


@contextmanager
def filled(disk: SimDisk) -> Iterator[NodeLog]:
    loop, durable = HandLoop(), [0]
    log = NodeLog.open(ROOT, files=disk, options=OPTIONS)
    log.attach(1, lambda _, index: durable.__setitem__(0, index))
    log.start(call_soon=loop.call_soon, on_failure=lambda error: pytest.fail(str(error)))
    try:
        for index in range(1, 31):
            log.append(1, index, 1, b"%d" % index * 20)
            loop.run_until(lambda index=index: durable[0] == index)
        yield log
    finally:
        log.close()


def test_entries_that_were_dropped_are_gone_and_those_of_the_tail_are_not() -> None:
    with filled(SimDisk()) as log:
        log.drop_segments({1: 20})
        with pytest.raises(EntriesGoneError):
            log.read(1, 1)
        assert [index for _, index, _ in log.read(1, 21)] == list(range(21, 31))
        assert log.read(1, 31) == []
        assert log.term_at(1, 1) is None


def test_groups_with_other_members_keep_the_tail_and_others_do_not() -> None:
    with filled(SimDisk()) as log:
        log.keep_tail(1)
        assert log.drop_segments({1: 30}) == 0
        assert len(log.read(1, 1)) == 30
        assert log.drop_segments({1: 30}, keep_bytes=0) > 0


class SlowDisk(SimDisk):
    """A disk that is read when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.reading, self.go_on = threading.Event(), threading.Event()

    def read_part(self, path: Path, offset: int, size: int) -> bytes:
        self.reading.set()
        assert self.go_on.wait(30)
        return super().read_part(path, offset, size)


def test_entries_after_a_state_that_is_fetched_are_held_as_far_as_another_tail() -> None:
    disk = SimDisk()
    with filled(disk) as log:
        log.keep_tail(1)
        log.hold(1, 0)
        tail = LogOptions(segment_bytes=300, keep_bytes=0, tail_bytes=600)
        log._options = tail
        log.drop_segments({1: 20, 2: 20})
        held = log.base_index(1)
        assert log.read(1, held + 1)[0][1] == held + 1
        log.hold(1, None)
        log.drop_segments({1: 20, 2: 20})
        assert log.base_index(1) > held > 0


def start_reading(log: NodeLog, disk: SlowDisk, found: list[int]) -> threading.Thread:
    reader = threading.Thread(target=lambda: found.extend(at for _, at, _ in log.read(1, 1)))
    reader.start()
    assert disk.reading.wait(30)
    return reader


def test_entries_that_are_replaced_while_they_are_read_are_left_out() -> None:
    disk = SlowDisk()
    found: list[int] = []
    with filled(disk) as log:
        reader = start_reading(log, disk, found)
        log.truncate(1, 6, 1)
        log.append(1, 6, 2, b"another")
        while log.term_at(1, 6) != 2:
            pass
        disk.go_on.set()
        reader.join()
        assert found == [1, 2, 3, 4, 5]


def test_segment_that_is_being_read_is_not_dropped() -> None:
    disk = SlowDisk()
    found: list[int] = []
    with filled(disk) as log:
        oldest = min(disk.segments)
        reader = start_reading(log, disk, found)
        dropper = threading.Thread(target=lambda: log.drop_segments({1: 30}))
        dropper.start()
        while log.term_at(1, 1) is not None:  # until nobody can begin to read it
            pass
        assert oldest in disk.names
        disk.go_on.set()
        reader.join()
        dropper.join()
        assert found[:16] == list(range(1, 17))
        assert oldest not in disk.names


def test_damage_found_while_reading_is_said() -> None:
    disk = SimDisk()
    with filled(disk) as log:
        disk.segments[min(disk.segments)].content[-3] ^= 1
        with pytest.raises(LogRottenError):
            log.read(1, 1)


def test_group_that_has_ended_is_in_no_later_log() -> None:
    disk = SimDisk()
    with filled(disk) as log:
        log.end(1)
        with pytest.raises(ValueError, match="has ended"):
            log.append(1, 31, 1, b"late")
        log.rotate()
        assert log.drop_segments({}, keep_bytes=0) > 0
    assert NodeLog.open(ROOT, files=disk.survivor()).recovery.groups == {}


def test_batch_larger_than_what_is_read_at_once_is_read() -> None:
    disk, loop, durable = SimDisk(), HandLoop(), [0]
    log = NodeLog.open(ROOT, files=disk, options=LogOptions(idle_s=1000.0))
    log.attach(1, lambda _, index: durable.__setitem__(0, index))
    log.start(call_soon=loop.call_soon, on_failure=lambda error: pytest.fail(str(error)))
    for index in range(1, 5):
        log.append(1, index, 1, bytes(3 << 20))
    loop.run_until(lambda: durable[0] == 4)
    assert [at for _, at, _ in log.read(1, 1)] == [1, 2]
    assert [at for _, at, _ in log.read(1, 3, 1)] == [3]
    log.close()

"""Room on the disk: what is owed counts, a message costs twice, refusals end by themselves."""

import os
from pathlib import Path
from typing import NamedTuple

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_storage.store.rocks_store import StoreFailedError
from contrail_storage.upkeep.disk_budget import DiskBudget

MIB = 1 << 20
REQUEST = 512


class Disk(NamedTuple):
    f_bavail: int
    f_blocks: int
    f_frsize: int = 1


class Rig:
    """A disk of 10 GiB whose figures are set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.total = 100 * MIB, 10 << 30
        self.owed = self.log = self.waiting = 0
        self.fails = False
        self.times_full = 0
        monkeypatch.setattr(os, "statvfs", lambda _: Disk(self.free, self.total))
        self.budget = DiskBudget(
            Path("/"), self, lambda: self.log, lambda: self.waiting, self._note_full
        )

    def owed_bytes(self, compaction_max: int) -> int:
        if self.fails:
            raise StoreFailedError("the disk")
        return self.owed

    def _note_full(self) -> None:
        self.times_full += 1


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def refused(rig: Rig, size: int) -> bool:
    problem: ApiError | None = None
    try:
        rig.budget.check(size)
    except ApiError as error:
        problem = error
    assert problem is None or (problem.spec, problem.applied) == (errors.STORAGE_FULL, False)
    return problem is not None


def test_message_is_taken_up_to_the_last_byte_that_is_not_owed(rig: Rig) -> None:
    rig.owed, rig.waiting = 20 * MIB, MIB
    left = 100 * MIB - 20 * MIB - 2 * MIB - 64 * MIB
    assert rig.budget.measure() == left
    assert refused(rig, (left - REQUEST) // 2 + 1)
    assert not refused(rig, (left - REQUEST) // 2)


def test_log_counts_where_it_is_more_than_what_the_store_holds(rig: Rig) -> None:
    rig.owed, rig.log = 10 * MIB, 30 * MIB
    assert rig.budget.measure() == 6 * MIB
    rig.fails = True
    assert rig.budget.measure() == 6 * MIB


def test_reserve_of_a_small_disk_is_a_part_of_it(rig: Rig) -> None:
    rig.total = 160 * MIB
    assert rig.budget.measure() == 80 * MIB


def test_what_was_taken_since_the_disk_was_asked_counts(rig: Rig) -> None:
    assert not refused(rig, 10 * MIB)
    rig.free -= 1  # not asked again: what is left is enough
    assert not refused(rig, 7 * MIB)
    rig.free -= 34 * MIB
    assert refused(rig, 2 * MIB)
    assert not refused(rig, MIB // 2)


def test_refusal_is_reported_once_and_ends_when_there_is_space(rig: Rig) -> None:
    rig.free = 64 * MIB
    assert refused(rig, 0)
    assert refused(rig, 0)
    assert (rig.times_full, rig.budget.short) == (1, True)
    rig.free = 10 << 30
    assert not refused(rig, MIB)
    assert not rig.budget.short
    rig.free = 0
    rig.budget.measure()
    assert refused(rig, 0)
    assert rig.times_full == 2

"""The power goes at every call of a scripted run: what was reported durable is always there."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from contrail_storage.disk.node_file import NodeFileDamagedError
from contrail_storage.wal import LogFailedError, LogOptions, NodeLog, RecoveredGroup
from tests.support.each import each
from tests.unit.storage.wal_disk import HandLoop, PowerCutError, SimDisk

ROOT = Path("/wal")
OPTIONS = LogOptions(idle_s=1000.0, segment_bytes=160, keep_bytes=0, ahead_bytes=100)
GROUPS = (1, 2)


@dataclass
class State:
    """What a group's log should hold after some number of its records."""

    term: int = 0
    vote: str | None = None
    entries: list[tuple[int, int, bytes]] = field(default_factory=list)


@dataclass
class Model:
    """All states of one group in order, by position, and which of them was reported durable."""

    # The first record of a new group says where its log starts.
    states: dict[int, State] = field(default_factory=lambda: {0: State(), 1: State()})
    durable: int = 0
    applied: int = 0

    def latest(self) -> State:
        return self.states[max(self.states)]

    def agrees(self, held: RecoveredGroup) -> bool:
        """Whether this is the state last reported durable, or one that came after it."""
        acked = max(position for position in self.states if position <= self.durable)
        found = [(index, term, data) for data, index, term in held.entries]
        for position, state in self.states.items():
            expected = [entry for entry in state.entries if entry[0] > self.applied]
            same_vote = (held.term, held.voted_for) == (state.term, state.vote)
            if position >= acked and found == expected and same_vote:
                return True
        return False


class Run:
    """A run of the script on one disk, until its end or the power cut."""

    def __init__(self, disk: SimDisk) -> None:
        self.models = {group: Model() for group in GROUPS}
        self.loop = HandLoop()
        self.failures: list[Exception] = []
        try:
            self.log = NodeLog.open(ROOT, files=disk, options=OPTIONS)
        except PowerCutError:
            return
        try:
            self._start()
            for _ in self._script():
                if self.failures:
                    break
        except (PowerCutError, LogFailedError):
            assert disk.cut_at is not None
        self.log.close()

    def _start(self) -> None:
        for group, model in self.models.items():

            def on_durable(position: int, _index: int, model: Model = model) -> None:
                model.durable = position

            self.log.attach(group, on_durable)
        self.log.start(call_soon=self.loop.call_soon, on_failure=self.failures.append)

    def _script(self) -> Iterator[None]:
        """Yield after each step that has been made durable."""
        self._vote(1, 1, "a")
        self._vote(2, 1, "a")
        self._entry(2, 1, b"quiet")
        self._settle()
        yield
        for index in range(1, 9):
            self._entry(1, index, b"x" * 30)
            if index % 2:
                self._settle()
                yield
        self._settle()
        yield
        self._truncate(1, 7)
        self._vote(1, 2, None)
        self._settle()
        yield
        self._entry(1, 7, b"other")
        self._settle()
        yield
        self.models[1].applied = 6
        self.log.drop_segments({1: 6})
        self._entry(2, 2, b"awake")
        self._entry(1, 8, b"y" * 200)
        self._settle()
        yield
        self._entry(1, 9, b"last")
        self._settle()
        yield

    def _settle(self) -> None:
        self.loop.run_until(lambda: bool(self.failures) or all(map(self._is_settled, GROUPS)))

    def _is_settled(self, group: int) -> bool:
        return self.models[group].durable >= max(self.models[group].states)

    def _record(self, group: int, position: int, state: State) -> None:
        self.models[group].states[position] = state

    def _entry(self, group: int, index: int, data: bytes) -> None:
        old = self.models[group].latest()
        new = State(old.term, old.vote, [*old.entries, (index, old.term, data)])
        self._record(group, self.log.append(group, index, old.term, data), new)

    def _vote(self, group: int, term: int, vote: str | None) -> None:
        new = State(term, vote, self.models[group].latest().entries)
        self._record(group, self.log.save_hard_state(group, term, vote), new)

    def _truncate(self, group: int, from_index: int) -> None:
        old = self.models[group].latest()
        new = State(old.term, old.vote, old.entries[: from_index - 1])
        self._record(group, self.log.truncate(group, from_index, old.term), new)


def losses(run: Run, survivor: SimDisk) -> list[str]:
    """Open the log on what is left of the disk; say what is wrong with it."""
    applied = {group: model.applied for group, model in run.models.items()}
    try:
        log = NodeLog.open(ROOT, files=survivor, options=OPTIONS, keep_from=applied)
    except NodeFileDamagedError as error:
        return [str(error)]
    wrong = [f"rot: {log.recovery.rot}"] if log.recovery.rot else []
    for group, model in run.models.items():
        held = log.attach(group, lambda _position, _index: None)
        if not model.agrees(held):
            wrong.append(f"group {group} holds {held}, durable is position {model.durable}")
    log.close()
    return wrong


def crash_points() -> int:
    disk = SimDisk()
    Run(disk)
    return disk.calls


@pytest.mark.long
@each("keep", [0.0, 0.4, 1.0])
def test_power_cut_at_every_call_loses_nothing_reported_durable(keep: float) -> None:
    for cut_at in range(1, crash_points() + 1):
        disk = SimDisk(cut_at=cut_at)
        run = Run(disk)
        assert losses(run, disk.survivor(keep)) == [], f"cut at call {cut_at}"


def test_power_cut_during_the_recovery_from_a_power_cut_loses_nothing() -> None:
    points = crash_points()
    for first in range(1, points + 1, 3):
        disk = SimDisk(cut_at=first)
        run = Run(disk)
        for second in range(1, 14):
            again = disk.survivor(0.4)
            again.cut_at = second
            try:
                NodeLog.open(ROOT, files=again, options=OPTIONS).close()
            except Exception:
                assert again.calls >= second
            assert losses(run, again.survivor(0.4)) == [], f"cuts at {first} and {second}"


def test_disk_that_lies_about_syncs_is_caught_by_this_simulation() -> None:
    found = []
    for cut_at in range(1, crash_points() + 1):
        disk = SimDisk(cut_at=cut_at, sync_lies=True)
        run = Run(disk)
        found += losses(run, disk.survivor())
    assert found

"""The checks of a simulated run find what they are for."""

from contrail_client import StoredMessage
from tests.sim.checks import early, misordered, misplaced, stale
from tests.sim.load import History, Read, Write


def stored(*names: str) -> list[StoredMessage]:
    return [
        StoredMessage(stream="S", seq=seq, subject="s", time="", data=name)
        for seq, name in enumerate(names, 1)
    ]


def write(name: str, *, expected: int = 0, at: float = 0.0, seq: int | None = None) -> Write:
    return Write(name, expected, at, at + 1.0, seq)


def test_a_write_is_where_it_was_acknowledged() -> None:
    history = [write("a", seq=1), write("b"), write("c", seq=0), write("d")]
    assert misplaced(history, stored("a", "b")) == []
    assert misplaced(history, stored("b", "a")) == ["a at [2], answered 1"]
    assert misplaced(history, stored("a", "c")) == ["c at [2], answered 0"]
    assert misplaced(history, stored("a", "d", "d")) == ["d at [2, 3], answered None"]
    assert misplaced(history, stored("a", "x")) == ["x, never sent"]


def test_a_change_follows_what_it_expected() -> None:
    history = [write("a", expected=0, seq=1), write("b", expected=1, seq=2)]
    assert misordered(history, stored("a", "b")) == []
    assert misordered(history, stored("b", "a")) == [
        "b at 1 follows 0, not 1",
        "a at 2 follows 1, not 0",
    ]


def test_a_read_sees_what_was_acknowledged_or_read_before() -> None:
    history = [write("a", at=0.0, seq=1), write("b", at=2.0, seq=2)]
    assert stale(history, [Read(0.5, 0.9, 0), Read(2.5, 4.0, 1), Read(3.5, 4.0, 2)]) == []
    assert stale(history, [Read(3.5, 4.0, 1)]) == ["1 at 3.500, after 2"]
    assert stale(history, [Read(2.1, 2.2, 2), Read(2.3, 2.4, 1)]) == ["1 at 2.300, after 2"]


def test_a_read_sees_nothing_from_the_future() -> None:
    history = History(writes=[write("a", at=1.0, seq=1)])
    history.reads = [Read(0.0, 1.5, 1)]
    assert early(history, stored("a")) == []
    history.reads = [Read(0.0, 0.5, 1)]
    assert early(history, stored("a")) == ["1 at 0.500"]

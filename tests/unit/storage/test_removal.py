"""Removal by subject: bounds that stay bounds, slices, and what an append leaves for later."""

import msgspec
import numpy as np
import pytest

from contrail_common.model import StreamConfig
from contrail_storage.core import commands as cmd
from contrail_storage.core.results import Appended, Refused, Removed, Result
from contrail_storage.core.stream.removal import by_subject
from tests.unit.storage.machine_rig import (
    Message,
    Rig,
    append_of,
    configure,
    consumer_config,
    removal_of,
)


def stream(**fields: object) -> Rig:
    """A rig with a stream that captures everything below ``s``."""
    rig = Rig()
    rig.apply(1, configure(StreamConfig(name="S", subjects=("s.>",), **fields)))  # type: ignore[arg-type]
    return rig


def publish(rig: Rig, subjects: str, rollup: str | None = None) -> None:
    """Append one message for each letter, all in one entry."""
    messages = [Message(f"s.{letter}", b"x", rollup=rollup) for letter in subjects]  # type: ignore[arg-type]
    rig.apply(1, append_of(messages))


def live(rig: Rig) -> list[int]:
    """The sequences that are left."""
    counters = rig.machine.counters
    return [seq for seq in range(1, counters.last_seq + 1) if rig.machine.is_live(seq)]


def test_subject_whose_share_is_met_early_loses_its_next_oldest_later() -> None:
    rig = stream(max_msgs_per_subject=2)
    for subjects in ("bb", "cc", "aa", "ab"):
        publish(rig, subjects)  # the last looks for the oldest of a far beyond that of b
    assert live(rig) == [2, 3, 4, 6, 7, 8]
    rig.restart()
    publish(rig, "b")
    assert live(rig) == [3, 4, 6, 7, 8, 9]
    publish(rig, "a")
    assert live(rig) == [3, 4, 7, 8, 9, 10]


def test_counts_and_sizes_follow_what_is_removed_in_the_middle() -> None:
    rig = stream(max_msgs_per_subject=1)
    publish(rig, "abcab")
    counters = rig.machine.counters
    assert (counters.messages, counters.bytes, counters.first_seq) == (3, 3, 3)
    assert rig.machine.subjects.count("s.a") == 1
    assert rig.machine.state().num_deleted == 0


def test_append_removes_no_more_than_it_has_time_for_and_the_rest_is_enforced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(by_subject, "REMOVED_MAX", 3)
    rig = stream()
    publish(rig, "a" * 10)
    rig.apply(1, configure(StreamConfig(name="S", subjects=("s.>",), max_msgs_per_subject=2)))
    assert rig.machine.subjects_over
    publish(rig, "a")
    assert (len(live(rig)), rig.machine.subjects_over) == (8, True)
    rig.restart()
    assert rig.machine.subjects_over
    assert rig.apply(1, removal_of(rig.machine, ["s.a"], reason="limit")) == [Removed(6)]
    assert rig.apply(1, cmd.EnforceLimits(0)) == [Removed(0)]
    assert (live(rig), rig.machine.subjects_over) == ([10, 11], False)


def test_search_that_ends_early_continues_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_subject, "SEARCH_SEQS", 4)
    rig = stream(allow_rollup_hdrs=True)
    publish(rig, "aXXXXXXXXXaa")
    counts = []
    for _ in range(4):
        publish(rig, "a", rollup="sub")
        counts.append(rig.machine.subjects.count("s.a"))
    assert counts == [3, 4, 3, 1]
    assert live(rig) == [*range(2, 11), 16]


def test_rollup_of_a_long_subject_leaves_the_rest_for_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(by_subject, "REMOVED_MAX", 3)
    rig = stream(allow_rollup_hdrs=True)
    publish(rig, "a" * 8)
    publish(rig, "a", rollup="sub")
    assert (len(live(rig)), rig.machine.counters.replaced) == (6, {"s.a": 9})
    publish(rig, "ab")
    rig.restart()
    rest = removal_of(rig.machine, ["s.a"], 9, "rollup")
    rest.finished = {"s.a": 9}
    assert rig.apply(1, rest, rest) == [Removed(5), Removed(0)]
    assert (live(rig), rig.machine.counters.replaced) == ([9, 10, 11], {})


def remove(rig: Rig, reason: cmd.RemovalReason, seqs: list[int], sids: list[int]) -> Result:
    """Remove messages of one byte."""
    command = cmd.Remove.of(
        reason, np.array(seqs), np.array(sids, np.uint32), np.ones(len(seqs), np.int64)
    )
    return rig.apply(1, command)[0]


def test_rest_of_a_rollup_is_found_by_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_subject, "REMOVED_MAX", 1)
    rig = stream(allow_rollup_hdrs=True)
    publish(rig, "ab" * 2)
    publish(rig, "a", rollup="sub")
    publish(rig, "b", rollup="sub")
    assert rig.machine.counters.replaced == {"s.a": 5, "s.b": 6}
    rest = cmd.Remove.of("rollup", np.array([3, 4]), np.array([0, 1], np.uint32), np.ones(2, int))
    # A newer roll-up of `b` came after the leader looked.
    rest.finished = {"s.a": 5, "s.b": 3, "s.c": 1}
    assert rig.apply(1, rest) == [Removed(2)]
    rig.restart()
    assert (live(rig), rig.machine.counters.replaced) == ([5, 6], {"s.b": 6})


def test_removal_with_columns_that_do_not_agree_is_refused() -> None:
    rig = stream()
    publish(rig, "ab")
    whole = cmd.Remove.of("purge", np.array([1, 2]), np.array([0, 1], np.uint32), np.ones(2, int))
    for wrong in (
        {"sids": b"\1\0"},
        {"sids": b"\1\0\1\0"},
        {"distances": b"\1\0\0"},
        {"distances": b"\3\0\0\0"},
        {"sizes": b""},
        {"first_seq": -1},
        {"first_seq": 1 << 63},
    ):
        [result] = rig.apply(1, msgspec.structs.replace(whole, **wrong))
        assert isinstance(result, Refused)
    assert live(rig) == [1, 2]


def test_subjects_of_removed_messages_are_read_from_blocks_after_damage() -> None:
    rig = stream()
    publish(rig, "abab")
    rig.machine.recounted = True
    assert remove(rig, "purge", [1, 3], [1, 1]) == Removed(2)
    assert (live(rig), rig.machine.subjects.count("s.b")) == ([2, 4], 2)
    assert "s.a" not in rig.machine.subjects.ids


def test_removed_message_is_pending_at_no_consumer() -> None:
    rig = stream(max_msgs_per_subject=1)
    rig.apply(1, cmd.PutConsumer(consumer_config("c"), 1))
    publish(rig, "ab")
    rig.apply(1, cmd.Deliver(1, 1, [1, 2], 3))
    publish(rig, "b")
    (consumer,) = rig.machine.consumers.values()
    assert sorted(consumer.pending) == [1]
    rig.restart()
    (consumer,) = rig.machine.consumers.values()
    assert sorted(consumer.pending) == [1]


# Discard new -------------------------------------------------------------------------------------


def put(rig: Rig, *messages: Message, atomic: bool = False) -> list[str]:
    """Append messages in one command: what became of each."""
    (result,) = rig.apply(1, append_of(messages, atomic=atomic))
    assert isinstance(result, Appended)
    verdicts = [(result.exceptions or {}).get(at) for at in range(result.count)]
    return [each.detail if isinstance(each, Refused) else "stored" for each in verdicts]


def test_roll_ups_of_new_subjects_do_not_pass_the_limit() -> None:
    rig = stream(discard="new", max_msgs=10, allow_rollup_hdrs=True)
    messages = [Message(f"s.{number}", b"x", rollup="sub") for number in range(100)]
    stored = [put(rig, message) for message in messages]
    assert [each for (each,) in stored].count("stored") == 10
    assert put(rig, *messages[5:15]) == ["stored"] * 5 + ["maximum messages exceeded"] * 5
    assert rig.machine.counters.messages == 10


def test_what_replaces_as_much_as_it_brings_is_stored_in_a_full_stream() -> None:
    rig = stream(discard="new", max_bytes=100, max_msgs_per_subject=1, allow_rollup_hdrs=True)
    assert put(rig, Message("s.a", b"x" * 60), Message("s.b", b"x" * 40)) == ["stored"] * 2
    assert put(rig, Message("s.a", b"x" * 61)) == ["maximum bytes exceeded"]
    assert put(rig, Message("s.a", b"x" * 60)) == ["stored"]
    assert put(rig, Message("s.a", b"x" * 50), Message("s.b", b"x" * 50)) == ["stored"] * 2
    assert put(rig, Message("s.b", b"x" * 51, rollup="sub")) == ["maximum bytes exceeded"]
    assert put(rig, Message("s.c", b"x"), Message("s.b", b"", rollup="sub")) == [
        "maximum bytes exceeded",
        "stored",
    ]
    assert put(rig, Message("s.c", b"x" * 100, rollup="all")) == ["stored"]
    assert live(rig) == [rig.machine.counters.last_seq]
    assert rig.machine.counters.bytes == 100


@pytest.mark.parametrize("atomic", [False, True])
def test_space_made_by_one_message_of_a_command_is_for_those_after_it(atomic: bool) -> None:
    limits = {"max_msgs": 4, "max_bytes": 40, "allow_rollup_hdrs": True, "allow_atomic": True}
    rig = stream(discard="new", **limits)
    assert put(rig, *[Message(f"s.{name}", b"x" * 10) for name in "aaab"]) == ["stored"] * 4
    batch = [Message("s.a", b"x", rollup="sub"), *[Message(f"s.{n}", b"x" * 10) for n in "cdef"]]
    expected = ["stored"] * 3 + ["maximum messages exceeded"] * 2
    if atomic:
        assert put(rig, *batch, atomic=True) == ["maximum messages exceeded"] * 5
        assert (rig.machine.counters.messages, rig.machine.counters.bytes) == (4, 40)
        batch, expected = batch[:3], expected[:3]
    assert put(rig, *batch, atomic=atomic) == expected
    assert (rig.machine.counters.messages, rig.machine.counters.bytes) == (4, 31)


def test_lowered_limits_still_take_what_makes_the_stream_no_fuller() -> None:
    rig = stream(discard="new", max_msgs_per_subject=2)
    assert put(rig, *[Message("s.a", b"x" * 10)] * 2, Message("s.b", b"x" * 10)) == ["stored"] * 3
    lowered = {"max_msgs": 2, "max_bytes": 20, "max_msgs_per_subject": 2}
    config = StreamConfig(name="S", subjects=("s.>",), discard="new", **lowered)  # type: ignore[arg-type]
    rig.apply(1, configure(config))
    assert put(rig, Message("s.b", b"")) == ["maximum messages exceeded"]
    assert put(rig, Message("s.a", b"x" * 11)) == ["maximum bytes exceeded"]
    assert put(rig, Message("s.a", b"x" * 10)) == ["stored"]


def test_only_message_of_a_subject_is_found_at_once_however_far_away() -> None:
    rig = stream(discard="new", max_bytes=12, max_msgs_per_subject=1)
    assert put(rig, *[Message(f"s.{name}", b"xx") for name in "abcdef"]) == ["stored"] * 6
    for name in "ab" * 20:
        assert put(rig, Message(f"s.{name}", b"yy")) == ["stored"]
        table = rig.machine.subjects
        at = table.numbered.slot(table.ids[f"s.{name}"])
        assert table.first[at] == table.last[at]


def test_stream_made_again_is_not_over_the_limit_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(by_subject, "REMOVED_MAX", 1)
    config = StreamConfig(name="S", subjects=("a",), max_msgs_per_subject=1)
    rig = Rig()
    rig.apply(0, configure(config))
    rig.apply(0, append_of([Message("a")] * 4))
    assert rig.machine.over_limits
    rig.apply(0, cmd.DropStream())
    rig.apply(0, configure(config))
    assert not rig.machine.over_limits

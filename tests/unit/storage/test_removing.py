"""Removal by subject: bounds that stay bounds, slices, and what an append leaves for later."""

import pytest

from contrail_common.model import StreamConfig
from contrail_storage.core import commands as cmd
from contrail_storage.core import removing
from contrail_storage.core.results import Removed
from tests.unit.storage.machine_rig import Message, Rig, append_of, configure, consumer_config


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
    monkeypatch.setattr(removing, "REMOVED_MAX", 3)
    rig = stream()
    publish(rig, "a" * 10)
    rig.apply(1, configure(StreamConfig(name="S", subjects=("s.>",), max_msgs_per_subject=2)))
    assert rig.machine.remover.subjects_over
    publish(rig, "a")
    assert (len(live(rig)), rig.machine.remover.subjects_over) == (8, True)
    rig.restart()
    assert rig.machine.remover.subjects_over
    results = [rig.apply(1, cmd.EnforceLimits(4))[0] for _ in range(2)]
    assert results == [Removed(4, more=True), Removed(2, more=False)]
    assert (live(rig), rig.machine.remover.subjects_over) == ([10, 11], False)


def test_search_that_ends_early_goes_on_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removing, "SEARCH_SEQS", 4)
    rig = stream()
    publish(rig, "aXXXXXXXXXa")
    found = [rig.apply(1, cmd.PurgeSubjects(["s.a"], 100, 50))[0] for _ in range(4)]
    assert [result.count for result in found if isinstance(result, Removed)] == [1, 0, 1, 0]
    assert [result.more for result in found if isinstance(result, Removed)] == [
        True, True, False, False,
    ]  # fmt: skip
    assert live(rig) == list(range(2, 11))


def test_rollup_of_a_long_subject_leaves_the_rest_for_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(removing, "REMOVED_MAX", 3)
    rig = stream(allow_rollup_hdrs=True)
    publish(rig, "a" * 8)
    publish(rig, "a", rollup="sub")
    assert (len(live(rig)), rig.machine.counters.replaced) == (6, {"s.a": 9})
    publish(rig, "ab")
    rig.restart()
    results = [rig.apply(1, cmd.FinishRollup("s.a", 50))[0] for _ in range(3)]
    assert results == [Removed(3, more=True), Removed(2, more=False), Removed(0)]
    assert (live(rig), rig.machine.counters.replaced) == ([9, 10, 11], {})


def test_message_that_goes_is_pending_at_no_consumer() -> None:
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

"""What interest leaves for later, and bounds; the model of the machine has the rest."""

import pytest

from contrail_common import errors
from contrail_common.model import Expected, StreamConfig
from contrail_storage.core import commands as cmd
from contrail_storage.core.results import Done, Refused, Removed
from contrail_storage.core.stream.removal import deletion, interest
from tests.unit.storage.machine_rig import (
    Message,
    Rig,
    append_of,
    configure,
    consumer_config,
    outcomes,
)

CONFIG = StreamConfig(name="S", subjects=("a.*",), retention="interest")
RED, BLUE = 1, 2


def rig_with(*subjects: str, consumers: int = 1) -> Rig:
    """A stream whose messages are delivered to consumers without a filter."""
    rig = Rig()
    rig.apply(1, configure(CONFIG))
    for name in ("red", "blue")[:consumers]:
        rig.apply(1, cmd.PutConsumer(consumer_config(name), 1))
    rig.apply(1, append_of([Message(subject, b"x") for subject in subjects]))
    seqs = list(range(1, len(subjects) + 1))
    for number in range(1, consumers + 1):
        rig.apply(1, cmd.Deliver(number, 1, seqs, len(subjects) + 1))
    return rig


def expecting(subject: str, last_seq: int, pattern: str | None = None) -> cmd.Append:
    expected = Expected(last_subject_seq=last_seq, last_subject_seq_subject=pattern)
    return append_of([Message(subject, b"x", expected=expected)])


@pytest.fixture
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "APPLY_SEQS", 3)
    monkeypatch.setattr(interest, "ALONE_SEQS", 3)


@pytest.mark.usefixtures("short_searches")
@pytest.mark.parametrize(("others", "settled"), [(0, True), (1, True), (2, False)])
def test_last_message_is_found_as_far_as_a_command_searches(others: int, settled: bool) -> None:
    rig = rig_with("a.1", *["a.2"] * others, "a.1")
    rig.apply(2, cmd.Acknowledge(RED, 1, [others + 2]))
    assert bool(rig.machine.subjects.unsettled) is not settled
    assert rig.machine.subjects.last_seq("a.1") == 1  # of the unsettled one no more than a bound


@pytest.mark.usefixtures("short_searches")
def test_expectation_of_an_unsettled_subject_is_refused_until_it_is_settled() -> None:
    rig = rig_with("a.1", *["a.2"] * 8, "a.1")
    rig.apply(2, cmd.Acknowledge(RED, 1, [10]))
    for command in (expecting("a.1", 1), expecting("a.2", 1, "a.1")):
        [result] = rig.apply(2, command)
        assert outcomes(result, 1) == [("refused", errors.LAST_UNSETTLED.code)]
    # Another subject's last message lies higher: that one is known.
    [result] = rig.apply(2, expecting("a.2", 9, "a.*"))
    assert outcomes(result, 1) == [("stored", 11)]
    rig.restart()
    assert rig.machine.pending_recheck
    commands = 0
    while rig.machine.pending_recheck:
        rig.apply(2, cmd.EnforceInterest(100))
        commands += 1
    assert commands == 3  # 10 to 8 were looked at before; then 7 to 5, 4 to 2, and the first
    [result] = rig.apply(2, expecting("a.1", 1))
    assert outcomes(result, 1)[0][0] == "stored"


@pytest.mark.usefixtures("short_searches")
def test_message_on_an_unsettled_subject_settles_it() -> None:
    rig = rig_with("a.1", *["a.2"] * 8, "a.1")
    rig.apply(2, cmd.Acknowledge(RED, 1, [10]))
    rig.apply(2, append_of([Message("a.1", b"x")]))
    assert not rig.machine.subjects.unsettled
    assert rig.machine.subjects.last_seq("a.1") == 11


@pytest.mark.usefixtures("short_searches")
def test_delete_after_an_ack_finds_the_last_message_again() -> None:
    rig = rig_with("a.1", "a.1", "a.1")
    rig.apply(2, cmd.Acknowledge(RED, 1, [2]))
    # The leader looked for the message before 3 while 2 was still there.
    rig.apply(2, cmd.DeleteMessage(3, 2))
    assert rig.machine.subjects.last_seq("a.1") == 1


@pytest.mark.parametrize(("messages", "at_once"), [(3, True), (4, False)])
def test_more_checks_than_a_command_makes_are_left_for_later(
    messages: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rig_with(*["a.1"] * messages, consumers=2)
    monkeypatch.setattr(interest, "CHECKS_MAX", 6)
    acked = list(range(1, messages + 1))
    rig.apply(2, cmd.Acknowledge(RED, 1, acked))
    rig.apply(2, cmd.Acknowledge(BLUE, 1, acked))
    assert (rig.machine.counters.messages == 0) is at_once
    more = not at_once
    while more:
        rig.restart()
        [result] = rig.apply(2, cmd.EnforceInterest(100))
        assert isinstance(result, Removed)
        assert result.count <= 3
        more = result.more
    assert rig.machine.counters.messages == 0


def test_slices_end_at_their_messages_and_go_on_after_a_restart() -> None:
    rig = rig_with("a.1", "a.2", "a.1", "a.2", "a.1", consumers=2)
    rig.apply(2, cmd.Acknowledge(BLUE, 1, [1, 3, 5]))
    rig.apply(2, cmd.DropConsumer(RED))
    removed = []
    while rig.machine.pending_recheck:
        [result] = rig.apply(2, cmd.EnforceInterest(2))
        assert isinstance(result, Removed)
        removed.append(result.count)
        rig.restart()
    assert removed == [1, 1, 1]
    assert [seq for seq in range(1, 6) if rig.machine.is_live(seq)] == [2, 4]


def test_without_consumers_everything_is_removed_in_one_command() -> None:
    rig = rig_with(*["a.1"] * 10)
    rig.apply(2, cmd.DropConsumer(RED))
    assert rig.apply(2, cmd.EnforceInterest(1)) == [Removed(10)]


def test_roll_up_that_nobody_wants_replaces_what_is_there_and_is_not_stored() -> None:
    rig = rig_with("a.1", "a.2", "a.1")
    rolling = StreamConfig(
        name="S", subjects=("a.*",), retention="interest", allow_rollup_hdrs=True
    )
    rig.apply(2, configure(rolling), cmd.PutConsumer(consumer_config("red"), 0))
    narrow = consumer_config("red", filter_subjects=("a.2",))
    rig.apply(2, cmd.PutConsumer(narrow, 0))
    rig.apply(3, append_of([Message("a.1", b"x", rollup="sub"), Message("a.2", b"x")]))
    assert [seq for seq in range(1, 6) if rig.machine.is_live(seq)] == [2, 5]


def test_retention_to_or_from_workqueue_is_refused_in_apply_too() -> None:
    rig = Rig()
    rig.apply(1, configure(StreamConfig(name="S", subjects=("a",), retention="workqueue")))
    [refused] = rig.apply(2, configure(StreamConfig(name="S", subjects=("a",))))
    assert isinstance(refused, Refused)
    assert refused.code == errors.STREAM_UPDATE_REFUSED.code


def test_what_a_consumer_without_acks_passed_under_limits_is_looked_at() -> None:
    rig = Rig()
    rig.apply(1, configure(StreamConfig(name="S", subjects=("a",))))
    rig.apply(1, cmd.PutConsumer(consumer_config("red", ack_policy="none"), 1))
    rig.apply(1, append_of([Message("a", b"x")] * 4))
    interested = StreamConfig(name="S", subjects=("a",), retention="interest")
    rig.apply(2, configure(interested), cmd.EnforceInterest(100))
    assert rig.machine.counters.messages == 4
    # This was proposed before the stream was changed.
    assert rig.apply(3, cmd.Advance(RED, 1, 3, 3, 4)) == [Done()]
    assert rig.apply(3, cmd.EnforceInterest(100)) == [Removed(3)]

"""What interest leaves for later, and bounds; the model of the machine has the rest."""

import msgspec
import pytest

from contrail_common import errors
from contrail_common.model import Expected, StreamConfig
from contrail_storage.core import commands as cmd
from contrail_storage.core.expected import ProvenExpected
from contrail_storage.core.results import Done, Refused, Removed
from contrail_storage.core.stream.removal import interest
from tests.unit.storage.dispatcher_rig import SECOND_NS, DispatcherRig, run_by_hand
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


def proven(last_seq: int, as_of: int, newest: int) -> cmd.Append:
    expected = ProvenExpected(last_subject_seq=last_seq, as_of=as_of, newest=newest)
    return append_of([Message("a.1", b"x", expected=expected)])


UNKNOWN = [("refused", errors.LAST_UNSETTLED.code)]
WRONG = [("refused", errors.WRONG_LAST_SEQUENCE.code)]


def test_expectation_of_a_subject_without_its_newest_message_needs_a_proof() -> None:
    rig = rig_with("a.1", "a.1", "a.2", "a.1")
    rig.apply(2, cmd.Acknowledge(RED, 1, [4]))
    rig.restart()
    assert not rig.machine.pending_recheck
    for command, outcome in (
        (expecting("a.1", 2), UNKNOWN),
        (expecting("a.2", 2, "a.1"), UNKNOWN),
        (proven(2, as_of=3, newest=2), UNKNOWN),  # from before message 4
        (proven(2, as_of=5, newest=2), UNKNOWN),
        (proven(2, as_of=4, newest=4), UNKNOWN),  # removed since
        (proven(2, as_of=4, newest=0), UNKNOWN),
        (proven(4, as_of=4, newest=2), WRONG),
        (proven(2, as_of=4, newest=2), [("stored", 5)]),
        (proven(2, as_of=4, newest=2), WRONG),  # the newest message is live
        (expecting("a.1", 5), [("stored", 6)]),
    ):
        [result] = rig.apply(2, command)
        assert outcomes(result, 1) == outcome


def test_proof_of_a_message_that_was_removed_since_is_none() -> None:
    rig = rig_with("a.1", "a.1", "a.1")
    rig.apply(2, cmd.Acknowledge(RED, 1, [2, 3]))
    rig.apply(2, cmd.Acknowledge(RED, 1, [1]))
    # Nothing is left: no proof is needed.
    [result] = rig.apply(2, proven(0, as_of=3, newest=1))
    assert outcomes(result, 1) == [("stored", 4)]


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


def test_what_was_delivered_ahead_without_acks_is_removed_when_the_position_passes_it() -> None:
    rig = Rig()
    rig.apply(1, configure(CONFIG))
    rig.apply(1, cmd.PutConsumer(consumer_config("red", ack_policy="none"), 1))
    rig.apply(1, cmd.PutConsumer(consumer_config("blue"), 1))
    rig.apply(1, append_of([Message("a.1", b"x")] * 3))
    rig.apply(1, cmd.Deliver(RED, 1, [1], 2))
    rig.apply(1, cmd.Deliver(RED, 1, [2], 1))  # while the first was on its way
    rig.apply(1, cmd.Deliver(BLUE, 1, [1, 2, 3], 4))
    rig.apply(1, cmd.Acknowledge(BLUE, 1, [1, 2, 3]))
    rig.apply(1, cmd.Deliver(RED, 1, [3], 4))
    rig.apply(1, cmd.EnforceInterest(9))
    assert rig.machine.counters.messages == 0


def test_what_only_other_filters_skipped_is_removed_when_the_position_passes_it() -> None:
    async def scene() -> None:
        config = msgspec.structs.replace(CONFIG, subjects=("a.*", "b"))
        rig = DispatcherRig(config, {"filter_subjects": ("b",)})
        rig.apply(cmd.PutConsumer(consumer_config("blue", filter_subjects=("a.*",)), 1))
        rig.publish("b", "a.1", "b")
        rig.apply(cmd.Deliver(BLUE, 1, [2], 3))
        assert await rig.pull_seqs(9) == [1, 3]  # and their record follows
        rig.apply(cmd.PutConsumer(consumer_config("red", filter_subjects=("a.*", "b")), 0))
        rig.apply(cmd.EnforceInterest(9))
        rig.apply(cmd.Acknowledge(BLUE, 1, [2]))
        await rig.record()
        await rig.acknowledge(1, 3)
        await rig.let_pass(SECOND_NS)
        rig.apply(cmd.EnforceInterest(9))
        assert rig.machine.counters.messages == 0

    run_by_hand(scene())

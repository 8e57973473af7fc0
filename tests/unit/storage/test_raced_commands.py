"""Commands that were proposed on what stood, and applied when something else stands."""

from typing import Any

import msgspec

from contrail_common import errors
from contrail_common.model import ConsumerLimits, StreamConfig
from contrail_storage.core import commands as cmd
from contrail_storage.core.meta_machine import MetaMachine
from contrail_storage.core.results import ConsumerPut, Done, Refused, Removed, Result, Writes
from tests.support.each import each
from tests.unit.storage.machine_rig import (
    Message,
    Rig,
    append_of,
    consumer_config,
    picture,
    removal_of,
)

CONFIG = StreamConfig(name="S", subjects=("a.*",))
RED = consumer_config("red")
CREATE, UPDATE = cmd.Precondition(create=True), cmd.Precondition(update=True)
SUBJECTS = ("a.1", "a.2", "a.1", "a.2", "a.1")


def make_stream(config: StreamConfig = CONFIG, given: cmd.Precondition = CREATE) -> Rig:
    rig = Rig()
    assert rig.apply(1, stream_put(config, given)) == [Done()]
    return rig


def stream_put(config: StreamConfig, given: cmd.Precondition | None, incarnation: str = "i") -> Any:
    return cmd.ConfigureStream(config, incarnation, b"k" * 32, given=given)


def rig_with_red() -> Rig:
    """A stream with five messages and a consumer, made by entry 2: that is its version."""
    rig = make_stream()
    assert rig.apply(1, cmd.PutConsumer(RED, 1, given=CREATE)) == [ConsumerPut(1, created=True)]
    rig.apply(1, append_of([Message(subject, b"x") for subject in SUBJECTS]))
    return rig


def change(given: cmd.Precondition | None, **fields: object) -> cmd.PutConsumer:
    return cmd.PutConsumer(consumer_config("red", **fields), 0, given=given)


def codes(results: list[Result]) -> list[int]:
    """Code of each refusal, 0 for what took effect."""
    return [one.code if isinstance(one, Refused) else 0 for one in results]


PRECONDITION, EXISTS = errors.PRECONDITION_FAILED.code, errors.CONSUMER_EXISTS.code
GONE, FIXED = errors.CONSUMER_NOT_FOUND.code, errors.CONSUMER_UPDATE_REFUSED.code
WIDER = consumer_config("red", max_ack_pending=7)


@each(
    ("raced", "expected"),
    [
        # An update loses to a delete, and makes nothing.
        ([cmd.DropConsumer(1), change(UPDATE, max_ack_pending=7)], [0, GONE]),
        ([change(UPDATE, max_ack_pending=7), cmd.DropConsumer(1)], [0, 0]),
        # Of two that name the same version one wins, whichever kinds they are.
        (
            [
                change(cmd.Precondition(update=True, version=2), max_ack_pending=7),
                change(cmd.Precondition(update=True, version=2), max_ack_pending=8),
            ],
            [0, PRECONDITION],
        ),
        (
            [
                change(cmd.Precondition(update=True, version=2), max_ack_pending=7),
                cmd.DropConsumer(1, 2),
            ],
            [0, PRECONDITION],
        ),
        (
            [cmd.DropConsumer(1, 2), change(cmd.Precondition(update=True, version=2))],
            [0, PRECONDITION],
        ),
        ([cmd.DropConsumer(1, 2), cmd.DropConsumer(1, 2)], [0, GONE]),
        # What is made anew is another: neither its name nor an old version hits it.
        (
            [
                cmd.DropConsumer(1),
                cmd.PutConsumer(WIDER, 1, given=CREATE),
                cmd.DropConsumer(1),
                change(cmd.Precondition(update=True, version=2)),
                change(cmd.Precondition(version=0), max_ack_pending=9),
            ],
            [0, 0, GONE, PRECONDITION, 0],
        ),
        # Two creations that both found nothing.
        ([cmd.DropConsumer(1), change(CREATE), cmd.PutConsumer(WIDER, 1, given=CREATE)],
         [0, 0, EXISTS]),
        ([cmd.DropConsumer(1), change(CREATE), change(CREATE)], [0, 0, 0]),
        (
            [cmd.DropConsumer(1), change(CREATE), change(cmd.Precondition(absent=True))],
            [0, 0, PRECONDITION],
        ),
        # A PUT that found nothing replaces what came in between, as far as that may be changed.
        (
            [
                cmd.DropConsumer(1),
                change(CREATE),
                change(cmd.Precondition(), max_ack_pending=7),
                change(cmd.Precondition(), ack_policy="none"),
                change(UPDATE, deliver_policy="new"),
            ],
            [0, 0, 0, FIXED, FIXED],
        ),
        ([cmd.DropConsumer(1), change(cmd.Precondition(version=0))], [0, PRECONDITION]),
    ],
)  # fmt: skip
def test_consumer_is_what_the_commands_made_of_it_in_their_order(
    raced: list[cmd.StreamCommand], expected: list[int]
) -> None:
    rig, alone = rig_with_red(), rig_with_red()
    assert codes([rig.apply(2, one)[0] for one in raced]) == expected
    # What was refused left nothing behind, in memory or in rows.
    for command, code in zip(raced, expected, strict=True):
        if code:
            alone.index += 1
        else:
            alone.apply(2, command)
    assert picture(rig.machine) == picture(alone.machine)
    assert rig.store.rows == alone.store.rows


def test_refusal_of_a_change_names_the_field() -> None:
    [refused] = rig_with_red().apply(2, change(UPDATE, max_waiting=3))
    assert isinstance(refused, Refused)
    assert refused.problem is not None
    assert (refused.problem.spec, refused.problem.field) == (
        errors.CONSUMER_UPDATE_REFUSED,
        "max_waiting",
    )


def test_shards_after_the_first_take_over_what_that_decided() -> None:
    rig = Rig()
    rig.apply(1, cmd.ConfigureStream(CONFIG, "i", b"k" * 32, 1))
    rig.apply(1, cmd.PutConsumer(RED, 1))
    assert codes(rig.apply(2, change(UPDATE, deliver_policy="new"))) == [0]
    assert codes(rig.apply(2, cmd.DropConsumer(1), change(UPDATE))) == [0, GONE]


STREAM_GONE, STREAM_EXISTS = errors.STREAM_NOT_FOUND.code, errors.STREAM_EXISTS.code
STREAM_FIXED = errors.STREAM_UPDATE_REFUSED.code
LARGER = msgspec.structs.replace(CONFIG, max_msgs=7)
SEALED = msgspec.structs.replace(CONFIG, sealed=True)


@each(
    ("raced", "expected"),
    [
        ([cmd.DropStream("i"), stream_put(LARGER, UPDATE)], [0, STREAM_GONE]),
        ([cmd.DropStream("i", 1), cmd.DropStream("i", 1)], [0, STREAM_GONE]),
        ([cmd.DropStream("j"), cmd.DropStream("i", 7)], [STREAM_GONE, PRECONDITION]),
        ([stream_put(LARGER, UPDATE), cmd.DropStream("i", 1)], [0, PRECONDITION]),
        (
            [
                stream_put(LARGER, cmd.Precondition(update=True, version=1)),
                stream_put(CONFIG, cmd.Precondition(update=True, version=1)),
            ],
            [0, PRECONDITION],
        ),
        ([stream_put(LARGER, CREATE), stream_put(CONFIG, CREATE)], [STREAM_EXISTS, 0]),
        ([stream_put(LARGER, UPDATE, "j"), stream_put(LARGER, CREATE, "j")],
         [STREAM_GONE, STREAM_GONE]),
        # Sealing overtakes whatever was to change the stream.
        (
            [stream_put(SEALED, UPDATE), stream_put(LARGER, UPDATE), cmd.Trim(99, 10)],
            [0, STREAM_FIXED, errors.STREAM_SEALED.code],
        ),
        (
            [
                cmd.PutConsumer(RED, 1, given=CREATE),
                stream_put(
                    msgspec.structs.replace(
                        CONFIG, consumer_limits=ConsumerLimits(max_ack_pending=3)
                    ),
                    UPDATE,
                ),
            ],
            [0, STREAM_FIXED],
        ),
    ],
)  # fmt: skip
def test_stream_is_what_the_commands_made_of_it_in_their_order(
    raced: list[cmd.StreamCommand], expected: list[int]
) -> None:
    rig, alone = make_stream(), make_stream()
    assert codes([rig.apply(2, one)[0] for one in raced]) == expected
    for command, code in zip(raced, expected, strict=True):
        if code:
            alone.index += 1
        else:
            alone.apply(2, command)
    assert picture(rig.machine) == picture(alone.machine)
    assert rig.store.rows == alone.store.rows


def test_purge_keeps_the_newest_as_of_its_turn() -> None:
    rig = rig_with_red()
    # This one came in between: it is the newest when the purge is applied.
    rig.apply(2, append_of([Message("a.1", b"x")]))
    assert rig.apply(2, cmd.Trim(1 << 62, 100, 2)) == [Removed(4)]
    assert [seq for seq in range(1, 7) if rig.machine.is_live(seq)] == [5, 6]


def test_purge_in_slices_keeps_no_more_and_no_fewer() -> None:
    rig = rig_with_red()
    results = []
    while not results or results[-1].more:
        [result] = rig.apply(2, cmd.Trim(1 << 62, 2, 1))
        assert isinstance(result, Removed)
        results.append(result)
    assert [one.count for one in results] == [2, 2]
    assert rig.machine.counters.messages == 1
    assert rig.machine.is_live(5)


def test_content_that_no_key_opens_is_removed_although_the_stream_was_sealed_meanwhile() -> None:
    rig = rig_with_red()
    rig.apply(2, stream_put(SEALED, UPDATE))
    purge = removal_of(rig.machine, ["a.1"])
    assert codes(rig.apply(2, purge)) == [errors.STREAM_SEALED.code]
    purge.reason = "shredded"
    assert rig.apply(2, purge) == [Removed(3)]


def test_names_are_of_the_stream_that_is_meant() -> None:
    meta = MetaMachine()

    def apply(command: cmd.MetaCommand) -> int:
        return codes([meta.apply(command, Writes())])[0]

    def reserve(incarnation: str) -> cmd.ReserveStream:
        return cmd.ReserveStream("S", ("a",), incarnation, in_memory=True)

    assert not apply(reserve("i"))
    assert not apply(cmd.ListStream("S", ("a",), CONFIG, "i"))
    # A removal has begun: a change of subjects does not list the stream again.
    assert not apply(cmd.UnlistStream("S", "i"))
    assert apply(cmd.ListStream("S", ("a", "b"), CONFIG, "i")) == STREAM_GONE
    assert meta.streams["S"].stage == "unlisted"
    assert not apply(cmd.ReleaseStream("S", "i"))
    # The name has been taken by another: none of these is about that one.
    assert not apply(reserve("j"))
    assert not apply(cmd.ListStream("S", ("a",), CONFIG, "j"))
    before = meta.streams["S"]
    for late in (
        cmd.ListStream("S", ("b",), CONFIG, "i"),
        cmd.UnlistStream("S", "i"),
        cmd.ReleaseStream("S", "i"),
        cmd.RenewStream("S", "k", "i"),
    ):
        assert apply(late) == STREAM_GONE
    assert meta.streams["S"] is before
    assert not apply(cmd.RenewStream("S", "k", "j"))
    assert apply(cmd.RenewStream("S", "l", "j")) == STREAM_GONE

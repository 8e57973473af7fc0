"""A stream after accepted damage: what is left of it, and that nothing old is taken for new."""

from contrail_common import errors
from contrail_common.model import StreamConfig
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.commands import RANGES_MAX
from contrail_storage.core.deleted import PAGE
from contrail_storage.core.results import Appended, ConsumerPut, Done, Refused, Writes
from contrail_storage.core.stream.data_loss import Recount
from tests.unit.storage.machine_rig import (
    SHARD,
    Message,
    Rig,
    append_of,
    configure,
    consumer_config,
)


def made(*batches: list[Message], **config: object) -> Rig:
    """A stream with a block per batch."""
    rig = Rig()
    given = {"name": "S", "subjects": (">",)} | config
    rig.apply(1, configure(StreamConfig(**given)))  # type: ignore[arg-type]
    for batch in batches:
        rig.apply(2, append_of(batch))
    return rig


def subjects(*names: str) -> list[Message]:
    return [Message(name, b"12345") for name in names]


def accept(incarnation: str = "again") -> cmd.AcceptLoss:
    return cmd.AcceptLoss(incarnation, "the disk", True, 2, [(3, 4)])


def live(rig: Rig) -> list[int]:
    return [seq for seq in range(1, 100) if rig.machine.is_live(seq)]


def test_lost_block_in_the_middle_leaves_deleted_sequences_and_exact_subjects() -> None:
    rig = made(subjects("a", "b"), subjects("a", "c"), subjects("b", "b"))
    before = rig.machine.counters.bytes
    del rig.shelf.blocks[1]
    assert rig.recount() == (2, [(3, 4)])
    machine = rig.machine
    assert live(rig) == [1, 2, 5, 6]
    assert {name: machine.subjects.count(name) for name in "abc"} == {"a": 1, "b": 3, "c": 0}
    assert machine.subjects.last_seq("a") == 1
    assert (machine.counters.messages, machine.counters.last_seq) == (4, 6)
    assert machine.counters.bytes == before * 4 // 6


def test_lost_first_blocks_move_the_first_sequence() -> None:
    rig = made(subjects("a", "a"), subjects("a", "c"))
    del rig.shelf.blocks[0]
    assert rig.recount() == (2, [(1, 2)])
    assert rig.machine.counters.first_seq == 3
    assert rig.machine.deleted.total == 0


def test_lost_last_block_leaves_the_last_sequence() -> None:
    rig = made(subjects("a"), subjects("a", "c"))
    del rig.shelf.blocks[1]
    assert rig.recount() == (2, [(2, 3)])
    assert (live(rig), rig.machine.counters.last_seq) == ([1], 3)
    (result,) = rig.apply(3, append_of(subjects("a")))
    assert result == Appended(4, 1)


def test_stream_of_which_nothing_is_left_continues_after_its_last_sequence() -> None:
    rig = made(subjects("a", "b"))
    rig.shelf.clear()
    assert rig.recount() == (2, [(1, 2)])
    assert (rig.machine.counters.first_seq, rig.machine.counters.messages) == (3, 0)
    assert rig.apply(3, append_of(subjects("z")))[0] == Appended(3, 1)
    assert rig.machine.subjects.last_seq("z") == 3


def test_messages_whose_subject_has_no_name_any_more_are_lost() -> None:
    rig = made(subjects("a", "b", "a", "c", "d"))
    rig.store.write([("put", keys.small_key(keys.SUBJECT_NAME, SHARD, 0), b"a\0\0c\0d")])
    rig.restart()
    assert rig.recount() == (1, [(2, 2)])
    assert live(rig) == [1, 3, 4, 5]


def test_what_was_deleted_before_is_not_counted_as_lost() -> None:
    rig = made(subjects("a"), subjects("b", "b"), subjects("c"))
    rig.apply(3, cmd.DeleteMessage(2))
    del rig.shelf.blocks[1]
    assert rig.recount() == (1, [(3, 3)])


def lose_marks(rig: Rig, page: int) -> None:
    """Lose the row with the deleted sequences of one page."""
    rig.store.write([("delete", keys.large_key(keys.DELETED, SHARD, page))])
    rig.restart()


def test_what_was_deleted_does_not_come_back_when_its_mark_is_lost() -> None:
    rig = made(subjects("a", "b", "a"), subjects("b", "c", "a"))
    rig.apply(3, cmd.DeleteMessage(3))
    lose_marks(rig, 0)
    assert rig.recount(marks_lost=True) == (5, [(1, 4), (6, 6)])
    # The only message of its subject was not deleted.
    assert live(rig) == [5]


def test_values_of_keys_are_kept_when_the_marks_of_older_ones_are_lost() -> None:
    rig = Rig()
    rig.apply(1, configure(StreamConfig(name="S", subjects=(">",), max_msgs_per_subject=1)))
    for name in "abcabaXb":
        rig.apply(2, append_of(subjects(name)))
    rig.apply(3, cmd.DeleteMessage(7))
    lose_marks(rig, 0)
    rig.recount(marks_lost=True)
    assert live(rig) == [3, 6, 8]


def test_no_message_is_doubted_while_the_count_of_messages_accounts_for_all() -> None:
    rig = made(subjects("a", "a"), subjects("a"))
    assert rig.recount(marks_lost=True) == (0, [])
    assert live(rig) == [1, 2, 3]


def test_messages_whose_marks_are_known_are_kept_beside_a_page_that_is_lost() -> None:
    rig = made(*[subjects(*"ab" * (PAGE // 4)) for _ in range(4)])
    last = rig.machine.counters.last_seq
    for deleted in (2, PAGE + 1, last):
        rig.apply(3, cmd.DeleteMessage(deleted))
    lose_marks(rig, 1)
    rig.recount(marks_lost=True)
    kept = [seq for seq in range(1, last + 1) if rig.machine.is_live(seq)]
    assert kept == [1, *range(3, PAGE)]


def test_sequence_that_was_given_out_is_known_from_elsewhere() -> None:
    rig = made(subjects("a"))
    writes = Writes()
    recount = Recount(rig.machine)
    recount.finish(50, writes)
    assert rig.machine.counters.last_seq == 50
    assert rig.machine.counters.first_seq == 51


def test_ranges_are_listed_up_to_their_bound_and_all_are_counted() -> None:
    rig = made(*[subjects("a") for _ in range(2 * RANGES_MAX + 5)])
    rig.shelf.blocks = rig.shelf.blocks[::2]
    lost, ranges = rig.recount()
    assert (lost, len(ranges)) == (RANGES_MAX + 2, RANGES_MAX)


def test_accepted_loss_is_kept_and_makes_another_incarnation() -> None:
    rig = made(subjects("a"))
    assert rig.apply(7, accept()) == [Done()]
    rig.restart()
    loss, record = rig.machine.loss, rig.machine.record
    assert loss is not None
    assert record is not None
    assert (loss.accepted_ns, loss.messages, loss.ranges, loss.unknown) == (7, 2, [(3, 4)], True)
    assert record.incarnation == "again"
    rig.apply(8, accept("once more"))
    assert rig.machine.loss is not None
    assert rig.machine.loss.times == 2


def test_versions_epochs_and_numbers_of_consumers_go_on_far_above_all_earlier_ones() -> None:
    rig = made(subjects("a", "b"))
    put = cmd.PutConsumer(consumer_config("c"), 1)
    assert rig.apply(3, put) == [ConsumerPut(1, created=True)]
    rig.apply(3, cmd.Deliver(1, 1, [1], 2))
    before = rig.machine.record.version  # type: ignore[union-attr]
    rig.apply(4, accept())
    rig.restart()
    machine = rig.machine
    assert machine.record is not None
    assert machine.record.version > before + 1_000_000
    stale = rig.apply(5, cmd.Acknowledge(1, 1, [1]))
    assert stale == [Refused(errors.TOKEN_STALE.code)]
    epoch = machine.consumers[1].epoch
    assert rig.apply(5, cmd.Acknowledge(1, epoch, [1])) == [Done()]
    other = rig.apply(6, cmd.PutConsumer(consumer_config("d"), 1))
    assert isinstance(other[0], ConsumerPut)
    assert other[0].consumer_id > 60_000


def test_dropped_stream_takes_the_report_with_it() -> None:
    rig = made(subjects("a"))
    rig.apply(4, accept())
    rig.apply(5, cmd.DropStream())
    assert rig.store.rows == {}
    assert rig.machine.loss is None


def test_lost_messages_are_not_pending_any_more() -> None:
    rig = made(subjects("a", "b"), subjects("a", "c"), subjects("b", "b"))
    rig.apply(3, cmd.PutConsumer(consumer_config("red"), 1))
    rig.apply(3, cmd.Deliver(1, 1, [1, 3, 4, 6], 7))
    del rig.shelf.blocks[1]
    rig.recount()
    rig.apply(4, accept())
    rig.restart()
    assert sorted(rig.machine.consumers[1].pending) == [1, 6]

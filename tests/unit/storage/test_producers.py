"""Numbered batches: each message is stored once, however late and in which parts it is repeated."""

import string

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common import errors
from contrail_common.model import Numbered, StreamConfig
from contrail_common.timeunits import INT64_MAX
from contrail_storage.core import commands as cmd
from contrail_storage.core import dedupe, producers
from contrail_storage.core import key_layout as keys
from contrail_storage.core.archive.format import ArchiveError
from contrail_storage.core.commands import NumberedAppend
from contrail_storage.core.producers import PRODUCERS_MAX, Producers
from contrail_storage.core.results import Writes
from contrail_storage.core.stream import stream_machine
from tests.unit.storage.archive_rig import checked, packed, records_of, restored
from tests.unit.storage.machine_rig import (
    SHARD,
    Message,
    Outcome,
    Rig,
    RowStore,
    append_of,
    configure,
    outcomes,
)

SECOND_NS = 10**9
PLAIN = StreamConfig(name="S", subjects=("a.>",), duplicate_window_ns=SECOND_NS)
FORGOTTEN = ("refused", errors.NUMBER_FORGOTTEN.code)
TEXTS = "abcdef"


def rig_of(config: StreamConfig = PLAIN) -> Rig:
    rig = Rig()
    rig.apply(0, configure(config))
    return rig


def numbered(producer: str, number: int, ids: str) -> NumberedAppend:
    """A part of a batch: a message for each letter, which is its id and payload."""
    messages = [Message("a.b", text.encode(), msg_id=text) for text in ids]
    return NumberedAppend.of(append_of(messages), Numbered(producer, number))


def put(rig: Rig, producer: str, number: int, ids: str, *, second: int = 0) -> list[Outcome]:
    (result,) = rig.apply(second * SECOND_NS, numbered(producer, number, ids))
    return outcomes(result, len(ids))


def publish(rig: Rig, ids: str, *, second: int = 0) -> list[Outcome]:
    """As `put`, without a number."""
    messages = [Message("a.b", text.encode(), msg_id=text) for text in ids]
    (result,) = rig.apply(second * SECOND_NS, append_of(messages))
    return outcomes(result, len(ids))


def stored(rig: Rig) -> str:
    """All payloads, one after the other."""
    return b"".join([block.columns.payload for block in rig.shelf.blocks]).decode()


class Naive:
    """What a stream knows of ids, in dicts."""

    def __init__(self) -> None:
        self.seq = 0
        self.stored: list[tuple[int, str]] = []
        """The second in which the message of each sequence was stored, and its id."""
        self.last: dict[str, tuple[int, int]] = {}
        """By producer: the number of its last batch, and the last id that had expired before it."""

    def put(self, second: int, ids: str, producer: str = "", number: int = 0) -> list[Outcome]:
        from_seq = len(self.stored)
        if number:
            last, begun = self.last.get(producer, (0, 0))
            if number < last:
                return [("duplicate", 0)] * len(ids)
            expired = sum(second - then >= 1 for then, _ in self.stored)
            from_seq = begun if number == last else expired
            self.last[producer] = number, from_seq
        found: list[Outcome] = []
        for text in ids:
            known = [
                seq
                for seq, (then, one) in enumerate(self.stored, 1)
                if one == text and (second - then < 1 or seq > from_seq)
            ]
            if known:
                found.append(("duplicate", known[-1]))
            else:
                self.stored.append((second, text))
                found.append(("stored", len(self.stored)))
        return found


steps = st.tuples(
    st.sampled_from(["", "p", "q"]),
    st.integers(1, 3),
    st.text(TEXTS, min_size=1, max_size=3),
    st.integers(0, 2),
    st.sampled_from(["", "", "restart", "archive"]),
)


@given(st.lists(steps, max_size=14))
def test_machine_knows_what_the_naive_one_knows(
    history: list[tuple[str, int, str, int, str]],
) -> None:
    rig, naive, second = rig_of(), Naive(), 0
    for producer, number, ids, seconds, then in history:
        second += seconds
        if producer:
            found = put(rig, producer, number, ids, second=second)
            assert found == naive.put(second, ids, producer, number)
        else:
            assert publish(rig, ids, second=second) == naive.put(second, ids)
        if then == "restart":
            rig.restart()
        elif then == "archive":
            rig = restored(packed(records_of(rig)), restarts=bool(seconds))
    assert stored(rig) == "".join(text for _, text in naive.stored)


def test_ids_of_the_last_batch_outlive_the_window_and_not_the_next_batch() -> None:
    rig = rig_of()
    assert put(rig, "p", 1, "ab") == [("stored", 1), ("stored", 2)]
    assert put(rig, "p", 1, "bc", second=9) == [("duplicate", 2), ("stored", 3)]
    # Others see the window only.
    assert publish(rig, "a", second=9) == [("stored", 4)]
    assert put(rig, "p", 2, "a", second=20) == [("stored", 5)]
    assert put(rig, "p", 1, "x", second=20) == [("duplicate", 0)]
    assert rig.machine.dedupe.held_ids == 0
    assert [key for key in rig.store.rows if key.startswith(keys.DEDUPE)] == [
        keys.large_key(keys.DEDUPE, SHARD, rig.machine.dedupe.marks[0].entries[0])
    ]


def test_longer_window_brings_no_held_id_back() -> None:
    longer = msgspec.structs.replace(PLAIN, duplicate_window_ns=60 * SECOND_NS)
    for restarts in (False, True):  # as two replicas
        rig = rig_of()
        put(rig, "p", 1, "ab")
        rig.apply(5 * SECOND_NS, configure(longer))
        if restarts:
            rig.restart()
        assert publish(rig, "a", second=6) == [("stored", 3)]
        assert put(rig, "p", 1, "b", second=6) == [("duplicate", 2)]


def test_restored_stream_takes_no_held_id_for_one_in_its_longer_window() -> None:
    longer = msgspec.structs.replace(PLAIN, duplicate_window_ns=60 * SECOND_NS)
    rig = rig_of()
    put(rig, "p", 1, "ab", second=1_000)
    rig.apply(1_005 * SECOND_NS, configure(longer))
    put(rig, "q", 1, "c", second=1_006)
    for restarts in (False, True):
        again = restored(packed(records_of(rig)), restarts=restarts)
        assert publish(again, "c", second=1_007) == [("duplicate", 3)]
        assert publish(again, "a", second=1_007) == [("stored", 4)]
        assert put(again, "p", 1, "b", second=1_007) == [("duplicate", 2)]


def test_more_ids_than_may_be_held_are_forgotten_and_the_batch_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_machine, "HELD_IDS_MAX", 3)
    rig = rig_of()
    monkeypatch.setattr(dedupe, "_HELD_TOGETHER", 1)
    put(rig, "p", 1, "ab")
    put(rig, "q", 1, "c", second=5)
    assert put(rig, "p", 1, "a", second=5) == [("duplicate", 1)]
    put(rig, "q", 1, "d", second=5)
    for _ in range(2):
        assert put(rig, "p", 1, "az", second=10) == [FORGOTTEN] * 2
        assert put(rig, "q", 1, "cd", second=10) == [("duplicate", 3), ("duplicate", 4)]
        rig.restart()
    assert put(rig, "p", 2, "a", second=10) == [("stored", 5)]
    assert producers.HELD_IDS_MAX == 1 << 20


def test_duplicate_of_what_was_stored_before_the_batch_stays_one() -> None:
    rig = rig_of()
    publish(rig, "a")
    assert put(rig, "p", 1, "ab") == [("duplicate", 1), ("stored", 2)]
    assert put(rig, "p", 1, "ab", second=5) == [("duplicate", 1), ("duplicate", 2)]


@pytest.mark.parametrize("together", [1, 4, 1_024])
def test_held_ids_of_small_appends_share_rows(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedupe, "_HELD_TOGETHER", together)
    rig, ids = rig_of(), string.ascii_letters
    for second, text in enumerate(ids):
        put(rig, "p", 1, text, second=2 * second)
    late = 2 * len(ids)
    everything = [("duplicate", seq) for seq in range(1, len(ids) + 1)]
    for _ in range(2):
        assert put(rig, "p", 1, ids, second=late) == everything
        known = rig.machine.dedupe
        assert (known.held_ids, len(known.held)) == (52, -(-52 // together))
        rows = [key for key in rig.store.rows if key.startswith(keys.DEDUPE)]
        # The last mark may become larger, so its rows are not joined yet.
        assert len(rows) <= 52 // together + min(together, 52)
        rig.restart()
    put(rig, "p", 2, "0", second=late)
    assert put(rig, "p", 2, "a", second=late) == [("stored", len(ids) + 2)]
    assert len([key for key in rig.store.rows if key.startswith(keys.DEDUPE)]) == 2


def test_accepted_loss_makes_batches_unknown() -> None:
    rig = rig_of()
    put(rig, "p", 1, "a")
    rig.apply(0, cmd.AcceptLoss("another", "a lost disk", False, 0, []))
    assert put(rig, "p", 1, "a") == [FORGOTTEN]
    assert put(rig, "p", 2, "a") == [("duplicate", 1)]


def test_sealed_stream_begins_no_batch() -> None:
    rig = rig_of()
    put(rig, "p", 1, "a")
    rig.apply(0, configure(StreamConfig(name="S", subjects=("a.>",), sealed=True)))
    for number in (1, 2):
        assert put(rig, "p", number, "a") == [("refused", errors.STREAM_SEALED.code)]
    assert rig.machine.producers.archived() == [("p", 1, 1)]


def test_producer_that_began_least_lately_is_forgotten_at_the_limit() -> None:
    store, known = RowStore(), Producers(SHARD)

    def begin(*names: str, number: int = 1) -> None:
        writes = Writes()
        for name in names:
            known.begin(name, number, 7, writes)
        store.write(writes.rows)

    def numbers(*names: str) -> list[int]:
        found = [known.find(name) for name in names]
        return [0 if one is None else one.number for one in found]

    begin(*[f"p{number}" for number in range(PRODUCERS_MAX)])
    begin("p0", number=2)
    assert numbers("p0", "p1") == [2, 1]
    begin("new")
    assert numbers("p0", "p1", "p2", "new") == [2, 0, 1, 1]
    # A restart forgets in the same order.
    known = Producers(SHARD)
    known.load(store.scan(keys.shard_key(keys.PRODUCER, SHARD)))
    assert len(known) == len(store.rows) == PRODUCERS_MAX
    begin("newer")
    assert numbers("p0", "p2", "p3", "newer") == [2, 0, 1, 1]
    assert known.held_from == 7


@pytest.mark.parametrize(
    "archived",
    [
        [("p", 0, 0)],
        [("p", INT64_MAX + 1, 0)],
        [("", 1, 0)],
        [("a b", 1, 0)],
        [("p", 1, 3)],
        [("p", 1, -1)],
        [("p", 1, 2), ("q", 1, 1)],
        [("p", 1, 0), ("p", 2, 0)],
        [(f"p{number}", 1, 0) for number in range(PRODUCERS_MAX + 1)],
    ],
)
def test_archive_with_producers_that_no_server_writes_is_refused(
    archived: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rig_of()
    put(rig, "p", 1, "a")
    assert checked(packed(records_of(rig)))[0].producers == [("p", 1, 1)]
    monkeypatch.setattr(rig.machine.producers, "archived", lambda: archived)
    with pytest.raises(ArchiveError, match="producer"):
        checked(packed(records_of(rig)))


def test_header_with_the_longest_producers_fits_a_record() -> None:
    rig = rig_of()
    writes = Writes()
    for number in range(PRODUCERS_MAX):
        rig.machine.producers.begin(f"{number:0255}", INT64_MAX, 1, writes)
    data = packed(records_of(rig))
    assert len(checked(data)[0].producers) == PRODUCERS_MAX
    assert len(restored(data).machine.producers) == PRODUCERS_MAX

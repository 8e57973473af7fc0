"""Deadlines and their removal in one stream machine: what the model does not reach."""

from collections.abc import Iterable

import msgspec
import numpy as np

from contrail_common import errors
from contrail_common.model import TTL_NEVER, Headers, StreamConfig
from contrail_common.timeunits import INT64_MAX, NS_PER_S
from contrail_storage.core import commands as cmd
from contrail_storage.core.id_index import IdHashes
from contrail_storage.core.results import Refused, Removed, Result
from contrail_storage.core.stream.deadlines import NO_DEADLINE
from tests.support.each import each
from tests.unit.storage.machine_rig import (
    Message,
    Rig,
    append_of,
    configure,
    consumer_config,
    hash_of,
    outcomes,
    removal_of,
)

S = NS_PER_S
START_NS = 1_000 * S


def stream(**fields: object) -> Rig:
    """A rig with a stream that captures everything below ``s`` and allows TTLs."""
    rig = Rig()
    rig.apply(START_NS, configure(config_of(**fields)))
    return rig


def config_of(**fields: object) -> StreamConfig:
    return StreamConfig(name="S", subjects=("s.>",), **{"allow_msg_ttl": True, **fields})  # type: ignore[arg-type]


def publish(rig: Rig, *messages: Message, later_s: int = 0) -> Result:
    """Append messages in one entry."""
    return rig.apply(START_NS + later_s * S, append_of(messages))[0]


def of(letter: str, ttl_ns: int | None = None, headers: Headers | None = None) -> Message:
    return Message(f"s.{letter}", b"x", headers, ttl_ns=ttl_ns)


def expire(
    rig: Rig,
    later_s: int,
    seqs: Iterable[int],
    rows: Iterable[tuple[int, int]] = (),
    markers: Iterable[int] = (),
) -> Result:
    """Apply the removal of ``seqs``."""
    command = cmd.Expire(
        np.array(list(seqs), np.int64).tobytes(),
        np.array(list(rows), np.int64).tobytes(),
        np.array(list(markers), np.int64).tobytes(),
    )
    return rig.apply(START_NS + later_s * S, command)[0]


def live(rig: Rig) -> list[int]:
    counters = rig.machine.counters
    return [seq for seq in range(1, counters.last_seq + 1) if rig.machine.is_live(seq)]


def headers_of(rig: Rig, seq: int) -> Headers | None:
    [block] = [each for each in rig.shelf.blocks if each.base_seq <= seq <= each.last_seq]
    headers = block.columns.headers
    return None if headers is None else headers.message(seq - block.base_seq)


def test_messages_of_one_append_with_one_deadline_share_a_row() -> None:
    rig = stream()
    publish(rig, of("a", 5 * S), of("b"), of("a", 9 * S), of("c", 5 * S), of("d", TTL_NEVER))
    assert rig.deadline_rows() == {
        (START_NS + 5 * S, 1): [1, 4],
        (START_NS + 9 * S, 3): [3],
    }
    assert rig.machine.deadlines.earliest_ns == START_NS + 5 * S
    assert 5 in rig.machine.exempt


def test_positions_are_those_of_what_is_stored() -> None:
    rig = stream()
    foreign = Message("elsewhere", b"", ttl_ns=3 * S)
    publish(rig, foreign, of("a"), foreign, of("b", 5 * S))
    assert rig.deadline_rows() == {(START_NS + 5 * S, 2): [2]}


def test_deadline_beyond_time_is_the_end_of_time() -> None:
    rig = stream()
    publish(rig, of("a", INT64_MAX))
    assert rig.deadline_rows() == {(INT64_MAX, 1): [1]}
    rig.restart()
    assert rig.machine.deadlines.earliest_ns == INT64_MAX


def test_refused_ttl_leaves_no_id() -> None:
    rig = stream(allow_msg_ttl=False)
    message = Message("s.a", b"x", msg_id="k", ttl_ns=5 * S)
    assert outcomes(publish(rig, message), 1) == [("refused", errors.TTL_DISABLED.code)]
    assert rig.machine.dedupe.find(IdHashes.of(hash_of("k"))).tolist() == [0]
    assert rig.deadline_rows() == {}


@each("ttl_ns", [0, -2, INT64_MAX + 1])
def test_ttl_that_no_edge_lets_through_is_refused_as_a_whole(ttl_ns: int) -> None:
    rig = stream()
    assert outcomes(publish(rig, of("a", ttl_ns)), 1) == [("refused", errors.INTERNAL.code)]


def test_append_of_a_log_without_ttls_is_read() -> None:
    command = append_of([of("a")])
    fields = msgspec.to_builtins(command, builtin_types=(bytes,))
    old = msgspec.msgpack.encode(fields[:-1])
    read = msgspec.msgpack.decode(old, type=cmd.Append)
    assert (read.subjects, read.ttls, read.is_sound()) == (command.subjects, None, True)


# Raising -----------------------------------------------------------------------------------------


@each(
    ("headers", "stored"),
    [
        (None, {"Nats-TTL": ["1m30s"]}),
        ({"Nats-TTL": ["1s"]}, {"Nats-TTL": ["1m30s"]}),
        ({"A": ["b", "c"], "nats-ttl": ["1"]}, {"A": ["b", "c"], "nats-ttl": ["1m30s"]}),
    ],
)
def test_ttl_below_that_of_markers_is_raised_in_the_message_too(
    headers: Headers | None, stored: Headers
) -> None:
    rig = stream(subject_delete_marker_ttl_ns=90 * S)
    publish(rig, of("a", S, headers), of("b"), of("c", 91 * S))
    assert headers_of(rig, 1) == stored
    assert headers_of(rig, 2) is None
    assert sorted(rig.deadline_rows()) == [(START_NS + 90 * S, 1), (START_NS + 91 * S, 3)]
    assert rig.machine.counters.bytes == sum(sum(each.columns.sizes()) for each in rig.shelf.blocks)


def test_ttl_is_not_raised_where_a_subject_has_one_message() -> None:
    rig = stream(subject_delete_marker_ttl_ns=90 * S, max_msgs_per_subject=1)
    publish(rig, of("a", S, {"Nats-TTL": ["1s"]}), of("b", TTL_NEVER))
    assert headers_of(rig, 1) == {"Nats-TTL": ["1s"]}
    assert list(rig.deadline_rows()) == [(START_NS + S, 1)]


def test_raised_message_is_measured_as_it_is_stored() -> None:
    rig = stream(subject_delete_marker_ttl_ns=90 * S, max_msg_size=len("xNats-TTL1s") + 4)
    short = of("a", S, {"Nats-TTL": ["1s"]})
    assert outcomes(publish(rig, short), 1) == [("refused", errors.MESSAGE_TOO_LARGE.code)]


# Removing ----------------------------------------------------------------------------------------


def test_removal_before_its_time_has_no_effect() -> None:
    rig = stream(max_age_ns=20 * S)
    publish(rig, of("a", 5 * S), of("b"), of("c", TTL_NEVER))
    row = (START_NS + 5 * S, 1)
    assert expire(rig, 4, [1], [row]) == Removed(0)
    assert expire(rig, 19, [1, 2]) == Removed(0)
    assert expire(rig, 20, [1, 2, 3]) == Removed(0)  # one of them is to stay
    assert (live(rig), list(rig.deadline_rows())) == ([1, 2, 3], [row])
    assert expire(rig, 20, [1, 2]) == Removed(2)
    assert expire(rig, 20, [1], [row]) == Removed(0)
    assert (live(rig), rig.deadline_rows()) == ([3], {})


def test_sealed_stream_lets_nothing_expire() -> None:
    rig = stream(sealed=False)
    publish(rig, of("a", 5 * S))
    rig.apply(START_NS, configure(config_of(sealed=True)))
    assert expire(rig, 9, [1], [(START_NS + 5 * S, 1)]) == Removed(0)
    assert live(rig) == [1]


def test_what_went_otherwise_leaves_a_row_until_it_is_due() -> None:
    rig = stream()
    publish(rig, of("a", 5 * S), of("b", 5 * S), of("a"))
    rig.apply(START_NS, cmd.DeleteMessage(1))
    row = (START_NS + 5 * S, 1)
    assert rig.deadline_rows() == {row: [1, 2]}
    assert expire(rig, 5, [1, 2], [row]) == Removed(1)
    assert (live(rig), rig.deadline_rows()) == ([3], {})


def test_older_message_becomes_the_last_of_its_subject() -> None:
    rig = stream()
    publish(rig, of("a"), of("b"), of("a", 5 * S), of("a", 5 * S))
    assert expire(rig, 5, [3, 4], [(START_NS + 5 * S, 3)]) == Removed(2)
    for _ in range(2):
        assert (live(rig), rig.machine.subjects.count("s.a")) == ([1, 2], 1)
        assert (rig.machine.last_live("s.a"), rig.machine.last_live("s.b")) == (None, 2)
        rig.restart()
    publish(rig, of("a"))
    assert rig.machine.last_live("s.a") == 5


def test_head_moves_over_what_expired_and_gone_deliveries_free_their_consumers() -> None:
    rig = stream()
    rig.apply(START_NS, cmd.PutConsumer(consumer_config("c"), 1))
    publish(rig, of("a"), of("b", 5 * S), of("c", 5 * S), of("d"))
    rig.apply(START_NS, cmd.Deliver(1, 1, [1, 2, 3, 4], 5))
    rig.apply(START_NS, cmd.DeleteMessage(1))
    assert rig.machine.counters.first_seq == 2
    assert expire(rig, 5, [2, 3], [(START_NS + 5 * S, 2)]) == Removed(2)
    assert rig.machine.counters.first_seq == 4
    assert sorted(rig.machine.consumers[1].pending) == [4]
    assert rig.machine.state().num_deleted == 0


def test_age_removal_of_the_oldest_stops_before_one_that_stays_and_where_markers_are() -> None:
    rig = stream(max_age_ns=5 * S)
    publish(rig, of("a"), of("b"), of("c", TTL_NEVER), of("d"))
    assert rig.apply(START_NS + 5 * S, cmd.ExpireAge(100)) == [Removed(2)]
    assert live(rig) == [3, 4]
    rig.apply(START_NS, configure(config_of(max_age_ns=5 * S, subject_delete_marker_ttl_ns=S)))
    rig.apply(START_NS, cmd.DeleteMessage(3))
    assert rig.apply(START_NS + 5 * S, cmd.ExpireAge(100)) == [Removed(0)]
    assert live(rig) == [4]


@each("way", ["delete", "purge", "rollup", "trim"])
def test_exempt_message_is_unmarked_when_it_is_removed(way: str) -> None:
    rig = stream(allow_rollup_hdrs=True)
    publish(rig, of("a"), of("b", TTL_NEVER), of("c"))
    gone: dict[str, cmd.Command] = {
        "delete": cmd.DeleteMessage(2),
        "purge": removal_of(rig.machine, ["s.b"]),
        "rollup": append_of([Message("s.b", rollup="sub")]),
        "trim": cmd.Trim(3, 100),
    }
    rig.apply(START_NS, gone[way])
    assert rig.machine.exempt.total == 0
    rig.restart()
    assert 2 not in rig.machine.exempt


def test_purge_of_everything_forgets_deadlines_and_what_was_to_stay() -> None:
    rig = stream(allow_rollup_hdrs=True)
    publish(rig, of("a", 5 * S), of("b", TTL_NEVER))
    publish(rig, Message("s.c", b"", rollup="all", ttl_ns=7 * S))
    assert rig.deadline_rows() == {(START_NS + 7 * S, 3): [3]}
    assert rig.machine.exempt.total == 0
    rig.apply(START_NS, cmd.Trim(1 << 60, 1))
    assert (rig.deadline_rows(), rig.machine.deadlines.earliest_ns) == ({}, NO_DEADLINE)


# Markers -----------------------------------------------------------------------------------------


def markers(rig: Rig) -> dict[int, Headers | None]:
    """The headers of live messages without a payload."""
    return {seq: headers_of(rig, seq) for seq in live(rig) if seq > 3}


def test_marker_is_stored_for_a_subject_that_lost_its_last_message() -> None:
    rig = stream(subject_delete_marker_ttl_ns=90 * S, max_msgs_per_subject=1)
    publish(rig, of("a", 5 * S), of("b", 5 * S), of("c", 5 * S))
    due = (START_NS + 5 * S, 1)
    assert expire(rig, 5, [1, 2, 3], [due], markers=[2]) == Removed(3)
    marker = {"Nats-Marker-Reason": ["MaxAge"], "Nats-TTL": ["1m30s"]}
    assert markers(rig) == {4: marker, 5: marker}
    assert [rig.machine.subjects.last_seq(f"s.{each}") for each in "abc"] == [4, 0, 5]
    own = (START_NS + 95 * S, 4)
    assert rig.deadline_rows() == {own: [4, 5]}
    assert rig.machine.counters.last_id == hash_of(None)
    assert expire(rig, 95, [4, 5], [own], markers=[4, 5]) == Removed(2)
    assert (live(rig), rig.deadline_rows()) == ([], {})
    assert rig.machine.counters.first_seq == 6


def test_no_marker_while_the_subject_has_a_message() -> None:
    rig = stream(subject_delete_marker_ttl_ns=S)
    publish(rig, of("a"), of("b", 5 * S), of("a", 5 * S))
    publish(rig, of("b"))
    due = (START_NS + 5 * S, 2)
    assert expire(rig, 5, [2, 3], [due]) == Removed(2)
    assert live(rig) == [1, 4]


@each(("markers", "left"), [([], [5]), ([1, 4], [5]), ([3], []), ([1, 2, 3, 4], [])])
def test_marker_depends_on_the_last_message_that_is_left(
    markers: list[int], left: list[int]
) -> None:
    """Whatever was removed since the leader looked."""
    rig = stream(subject_delete_marker_ttl_ns=S)
    publish(rig, *[of("a", 5 * S)] * 4)
    rig.apply(START_NS, cmd.DeleteMessage(4))
    expire(rig, 5, [1, 2, 3, 4], [(START_NS + 5 * S, 1)], markers)
    assert live(rig) == left


@each(("room", "left"), [(-1, [4, 5]), (84, [4, 5]), (83, [4]), (41, [])])
def test_full_stream_that_discards_new_ones_stores_no_marker_beyond_its_limit(
    room: int, left: list[int]
) -> None:
    rig = stream(
        subject_delete_marker_ttl_ns=5 * S, max_msgs_per_subject=1, discard="new", max_bytes=room
    )
    publish(rig, of("a", 5 * S), of("b", 5 * S), Message("s.c", b"", ttl_ns=5 * S))
    expire(rig, 5, [1, 2, 3], [(START_NS + 5 * S, 1)], markers=[3])
    assert len("Nats-Marker-ReasonMaxAgeNats-TTL5s") + 2 * 4 == 42
    assert live(rig) == left


def test_marker_counts_for_the_limits_of_the_stream() -> None:
    rig = stream(subject_delete_marker_ttl_ns=5 * S, max_msgs_per_subject=1, max_bytes=50)
    publish(rig, Message("s.a", b"x" * 10, ttl_ns=5 * S), Message("s.b", b"x" * 40))
    expire(rig, 5, [1], [(START_NS + 5 * S, 1)])
    assert live(rig) == [3]
    assert rig.machine.counters.bytes == 42


@each(
    "command",
    [
        cmd.Expire(b"1", b"", b""),
        cmd.Expire(b"", b"12345678", b""),
        cmd.Expire(np.array([2, 1], np.int64).tobytes(), b"", b""),
        cmd.Expire(b"", np.array([-1, 1], np.int64).tobytes(), b""),
        cmd.Expire(b"", b"", b"1234567"),
    ],
)
def test_columns_that_do_not_agree_are_refused(command: cmd.Expire) -> None:
    rig = stream()
    publish(rig, of("a"), of("b"))
    [result] = rig.apply(START_NS, command)
    assert isinstance(result, Refused)
    assert live(rig) == [1, 2]

"""Advisories: what the machines report, and the hub that keeps them while somebody listens."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import AckKind, AckPolicy, Advisory, StreamConfig
from contrail_link.contract.admin import EventsRequest, EventsResult
from contrail_storage.core import commands as cmd
from contrail_storage.core.meta_machine import MetaMachine
from contrail_storage.core.results import Writes
from contrail_storage.replica.advisories import LINGER_S, AdvisoryHub
from tests.support.each import each
from tests.unit.storage.dispatcher_rig import HandLoop, run_by_hand
from tests.unit.storage.machine_rig import Message, Rig, append_of, configure, consumer_config
from tests.unit.storage.naive_models import NaiveConsumer

PATIENCE_S = 60.0
WAIT_NS = 20_000_000_000
MAX_DELIVER = 2
STORED = 6
SEQS = st.integers(1, STORED)
Item = tuple[AckKind, int]
ITEMS = st.lists(st.tuples(st.sampled_from(["ack", "nak", "term", "in_progress"]), SEQS))


# What the machines report ------------------------------------------------------------------------
def rig_with_consumer(ack_policy: AckPolicy) -> Rig:
    rig = Rig()
    config = consumer_config("c", ack_policy=ack_policy, max_deliver=MAX_DELIVER)
    rig.apply(1, configure(StreamConfig(name="S")), cmd.PutConsumer(config, 1))
    rig.apply(1, append_of([Message("S")] * STORED))
    rig.reported.clear()
    return rig


def reported_deliveries(rig: Rig) -> list[tuple[str, int, int, int]]:
    assert {(each.stream, each.consumer) for each in rig.reported} <= {("", "c")}
    return [
        (each.type, each.stream_seq, each.consumer_seq, each.deliveries) for each in rig.reported
    ]


@given(
    again=st.lists(SEQS, unique=True),
    acked=st.lists(SEQS),
    others=ITEMS,
    ack_policy=st.sampled_from(["all", "explicit", "none"]),
)
def test_each_acknowledgement_with_an_effect_is_reported_once_and_in_order(
    again: list[int], acked: list[int], others: list[Item], ack_policy: AckPolicy
) -> None:
    rig = rig_with_consumer(ack_policy)
    naive = NaiveConsumer(rig.machine.consumers[1].config, 1)
    for seqs in (list(range(1, 6)), sorted(again)):
        rig.apply(1, cmd.Deliver(1, 1, seqs, 6))
        naive.deliver(1, seqs, 6)
    expected = []
    kinds = {"nak": "nak", "term": "terminated"}
    for kind, seq in [*(("ack", seq) for seq in acked), *others]:
        pending = naive.pending.get(seq)
        if pending is not None and kind in kinds:
            expected.append((kinds[kind], seq, pending.consumer_seq, pending.attempts))
        naive.acknowledge(2, kind, seq, 0)
    rig.apply(2, cmd.Acknowledge(1, 1, acked, [(kind, seq, 0) for kind, seq in others]))
    assert reported_deliveries(rig) == expected
    rig.reported.clear()
    rig.apply(3, cmd.Exhaust(1, 1, [1, 2, 3, 4, 5, 6]))
    assert reported_deliveries(rig) == [
        ("max_deliver", seq, pending.consumer_seq, pending.attempts)
        for seq, pending in sorted(naive.pending.items())
        if pending.attempts >= MAX_DELIVER
    ]


def test_reason_of_a_term_is_reported_and_no_other() -> None:
    rig = rig_with_consumer("explicit")
    rig.apply(1, cmd.Deliver(1, 1, [1, 2, 3], 4))
    others: list[tuple[AckKind, int, int]] = [("term", 1, 0), ("nak", 2, 0), ("term", 3, 0)]
    rig.apply(2, cmd.Acknowledge(1, 1, [], others, {3: "broken"}))
    assert [each.reason for each in rig.reported] == ["", "", "broken"]


def test_machine_loaded_from_its_rows_reports_nothing() -> None:
    rig = rig_with_consumer("explicit")
    rig.apply(1, cmd.Deliver(1, 1, [1], 2))
    rig.apply(2, cmd.Acknowledge(1, 1, [], [("nak", 1, 0)]))
    assert reported_deliveries(rig) == [("nak", 1, 1, 1)]
    rig.reported.clear()
    rig.restart()
    assert rig.reported == []


def test_changes_of_stream_and_consumers_are_reported_and_repetitions_are_not() -> None:
    rig, config = Rig(), StreamConfig(name="S")
    changed = StreamConfig(name="S", max_msgs=5)
    one, other = consumer_config("c"), consumer_config("c", max_deliver=3)
    rig.apply(1, configure(config), configure(config), configure(changed))
    rig.apply(1, *(cmd.PutConsumer(each, 1) for each in (one, one, other)))
    rig.apply(1, cmd.DropConsumer(1), cmd.DropConsumer(1), cmd.DropStream())
    assert [(each.type, each.consumer, each.action) for each in rig.reported] == [
        ("stream_action", "", "modify"),
        ("consumer_action", "c", "create"),
        ("consumer_action", "c", "modify"),
        ("consumer_action", "c", "delete"),
    ]


def test_stream_is_made_when_it_is_listed_and_gone_when_it_is_unlisted() -> None:
    meta, writes = MetaMachine(), Writes()
    for command in (
        cmd.ReserveStream("A", ("a",), "i"),
        cmd.ListStream("A", ("a",)),
        cmd.ListStream("A", ("a", "b")),
        cmd.UnlistStream("A"),
        cmd.UnlistStream("A"),
        cmd.ReleaseStream("A"),
        cmd.ReserveStream("B", ("b",), "i"),
        cmd.ReleaseStream("B"),
    ):
        meta.apply(command, writes)
    assert [(each.stream, each.action) for each in writes.advisories] == [
        ("A", "create"),
        ("A", "delete"),
    ]


# The hub -----------------------------------------------------------------------------------------
Scene = Callable[[AdvisoryHub], Awaitable[None]]


def play(scene: Scene, **bounds: Any) -> None:
    """Run ``scene`` with a hub."""

    async def whole() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scene(AdvisoryHub(**bounds))

    asyncio.run(whole())


def notify(hub: AdvisoryHub, *consumers: str, stream: str = "S", reason: str = "") -> None:
    reported = [Advisory(type="nak", consumer=each, reason=reason) for each in consumers]
    hub.notify(reported, 5, stream)


async def read(hub: AdvisoryHub, after: str = "", **more: Any) -> EventsResult:
    return await hub.read(EventsRequest(after=after, **more))


def names(found: EventsResult) -> list[str]:
    return [each.consumer for each in found.advisories]


def test_nothing_is_kept_while_nobody_listens() -> None:
    async def scene(hub: AdvisoryHub) -> None:
        notify(hub, "unheard")
        begin = await read(hub)
        assert (begin.advisories, begin.lost) == ([], 0)
        notify(hub, "heard")
        assert names(await read(hub, begin.position)) == ["heard"]

    play(scene)


def test_advisories_get_stream_time_and_ids_of_their_own_that_continue() -> None:
    async def scene(hub: AdvisoryHub) -> None:
        begin = await read(hub)
        notify(hub, "a", "b", "c")
        found = await read(hub, begin.position)
        assert {(each.stream, each.time_ns) for each in found.advisories} == {("S", 5)}
        assert len({each.id for each in found.advisories}) == 3
        assert names(await read(hub, found.advisories[0].id)) == ["b", "c"]
        assert found.position == found.advisories[-1].id
        assert names(await read(hub, found.position)) == []

    play(scene)


@each(
    ("selection", "expected"),
    [
        ({}, ["a", "b", "", "a"]),
        ({"stream": "S"}, ["a", "b"]),
        ({"consumer": "a"}, ["a", "a"]),
        ({"stream": "T", "consumer": "a"}, ["a"]),
        ({"types": ("stream_action",)}, [""]),
        ({"types": ("nak", "stream_action"), "stream": "T"}, ["", "a"]),
        ({"stream": "U"}, []),
    ],
)
def test_filters_select_and_the_position_moves_over_the_rest(
    selection: dict[str, Any], expected: list[str]
) -> None:
    async def scene(hub: AdvisoryHub) -> None:
        begin = await read(hub)
        notify(hub, "a", "b")
        hub.notify([Advisory(type="stream_action", stream="T", action="create")], 5)
        notify(hub, "a", stream="T")
        found = await read(hub, begin.position, **selection)
        assert names(found) == expected
        assert names(await read(hub, found.position)) == []

    play(scene)


def test_page_ends_at_its_limit_and_continues_there() -> None:
    async def scene(hub: AdvisoryHub) -> None:
        begin = await read(hub)
        notify(hub, "a", "b", "c")
        found = await read(hub, begin.position, limit=2)
        assert names(found) == ["a", "b"]
        assert names(await read(hub, found.position, limit=2)) == ["c"]

    play(scene)


def test_reader_waits_for_what_it_selects() -> None:
    async def scene(hub: AdvisoryHub) -> None:
        waiting = asyncio.ensure_future(read(hub, consumer="b", wait_ns=WAIT_NS))
        await asyncio.sleep(0)
        assert hub.readers == 1
        notify(hub, "a")
        await asyncio.sleep(0)
        notify(hub, "b")
        assert names(await waiting) == ["b"]
        assert hub.readers == 0
        assert names(await read(hub, wait_ns=1)) == []

    play(scene)


def test_slow_reader_learns_how_many_it_missed_and_continues() -> None:
    async def scene(hub: AdvisoryHub) -> None:
        begin = await read(hub)
        notify(hub, *"abcd")
        found = await read(hub, begin.position)
        assert (found.advisories, found.lost) == ([], 2)
        assert names(await read(hub, found.position)) == ["c", "d"]
        waiting = asyncio.ensure_future(read(hub, found.position, stream="T", wait_ns=WAIT_NS))
        await asyncio.sleep(0)
        notify(hub, *"efghi")  # more than is kept, before the reader had its turn
        assert (await waiting).lost == 3

    play(scene, kept_max=2)


def test_what_is_kept_has_a_bound_in_bytes() -> None:
    async def scene(hub: AdvisoryHub) -> None:
        begin = await read(hub)
        notify(hub, *"abcd", reason="x" * 744)  # 1,002 bytes each, with all
        found = await read(hub, begin.position)
        assert found.lost == 2
        assert names(await read(hub, found.position)) == ["c", "d"]

    play(scene, kept_bytes_max=2_500)


@each("position", ["", "0-1", "00000000-1", "{period}-9", "{period}-", "x"])
def test_after_a_foreign_position_an_unknown_number_was_missed(position: str) -> None:
    async def scene(hub: AdvisoryHub) -> None:
        begin = await read(hub)
        notify(hub, "a")
        foreign = position.format(period=begin.position.partition("-")[0])
        found = await read(hub, foreign)
        if foreign:
            assert found.lost is None
            found = await read(hub, found.position)
            assert names(found) == ["a"]
        assert (await read(hub, found.position)).lost == 0

    play(scene)


def test_reader_over_the_limit_is_refused_and_an_end_makes_room() -> None:
    async def scene(hub: AdvisoryHub) -> None:
        waiting = [asyncio.ensure_future(read(hub, wait_ns=WAIT_NS)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await read(hub, wait_ns=WAIT_NS)
        assert refused.value.spec is errors.TOO_MANY_WAITERS
        assert (await read(hub)).advisories == []  # who does not wait is none of them
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        more = asyncio.ensure_future(read(hub, wait_ns=WAIT_NS))
        await asyncio.sleep(0)
        notify(hub, "a")
        assert [names(each) for each in await asyncio.gather(waiting[1], more)] == [["a"], ["a"]]

    play(scene, readers_max=2)


def test_listening_ends_when_nobody_comes_back_and_begins_a_new_period() -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HandLoop)
        hub = AdvisoryHub()
        begin = await read(hub)
        waiting = asyncio.ensure_future(read(hub, wait_ns=WAIT_NS * 9))
        listening = []
        for _ in range(9):  # one reads for 180 s, then nobody does
            await loop.quiet()
            loop.now_s += LINGER_S / 2
            await loop.quiet()
            listening.append(hub.listening)
        assert listening == [True] * 7 + [False] * 2
        assert (await waiting).lost == 0
        notify(hub, "unheard")
        found = await read(hub, begin.position)
        assert (found.advisories, found.lost) == ([], None)
        assert names(await read(hub, found.position)) == []

    run_by_hand(scene())

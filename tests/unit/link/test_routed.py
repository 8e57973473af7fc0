"""Requests to a cluster of played nodes: where they go, and what is sent again."""

import asyncio
from typing import Any

import pytest

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import Advisory, Numbered, PublishMessage
from contrail_link.contract.admin import EventsRequest, EventsResult
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.contract.publish import PublishAck, PublishOutcome, PubResult, is_repeatable
from contrail_link.contract.streams import Page
from contrail_link.publishing import publish
from contrail_link.routed.leaders import Learned
from contrail_link.routed.link import RoutedLink
from contrail_link.routed.listing import one_page, one_result, positions_of, sign_of, token_after
from contrail_storage.reading.page_tokens import encode_token
from tests.unit.link.routed_rig import META, SECOND_NS, Cluster, run_virtually, wait_virtually

AGAIN_S = 5.0


def message(subject: str = "S.a", msg_id: str | None = None) -> PublishMessage:
    return PublishMessage(subject, None, b"x", msg_id)


async def refusal(work: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await work
    return caught.value


class Rig:
    """A cluster of three, its routed link, and the requests that each node got."""

    def __init__(self, answer_s: float = 10.0) -> None:
        self.cluster = Cluster(3)
        self.nodes = self.cluster.nodes
        self.link = RoutedLink(self.cluster.routed, AGAIN_S, answer_s)

    def asked(self) -> list[int]:
        """Requests by node since the last call."""
        found = [one.asked for one in self.nodes]
        for one in self.nodes:
            one.asked = 0
        return found


# Replicas ----------------------------------------------------------------------------------------
def test_copy_is_read_where_it_was_found() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.nodes[0].lead("S")
        found = [(await rig.link.link.find_replica("S")).node for _ in range(3)]
        assert sorted(found) == ["n0", "n1", "n2"]  # any of them, in turn
        rig.nodes[1].has_copy = False
        rig.nodes[2].down = True
        assert {(await rig.link.link.find_replica("S")).node for _ in range(6)} == {"n0"}
        rig.nodes[2].down = False
        rig.asked()
        error = await refusal(rig.link.link.get_message("S", 1, replica="n2"))
        assert error.spec is errors.MESSAGE_NOT_FOUND
        assert rig.asked() == [0, 0, 1]
        position = await rig.link.link.replica_position("S", None, "n2")
        assert (position.node, rig.asked()) == ("n2", [0, 0, 1])
        # Without a copy or a leader, nobody waits for one.
        for node in rig.nodes:
            node.has_copy = False
        error = await refusal(rig.link.link.find_replica("S"))
        assert (error.spec, error.applied) == (errors.NOT_READY, False)
        assert rig.asked() == [1, 1, 1]
        gone = await refusal(rig.link.link.get_message("S", 1, replica="n9"))
        assert gone.spec is errors.NOT_READY
        gone = await refusal(rig.link.link.replica_position("S", None, "n9"))
        assert gone.spec is errors.NOT_READY

    run_virtually(scenario())


def test_own_copy_is_read_first() -> None:
    async def scenario() -> None:
        cluster = Cluster(3)
        nodes = cluster.routed
        link = RoutedLink(nodes, AGAIN_S, 10.0, own=nodes[1]).link
        assert [(await link.find_replica("S")).node for _ in range(3)] == ["n1"] * 3
        cluster.nodes[1].has_copy = False
        assert (await link.find_replica("S")).node == "n0"

    run_virtually(scenario())


# Leaders -----------------------------------------------------------------------------------------
def test_request_follows_the_hint_and_the_next_goes_straight_to_the_leader() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.nodes[2].lead("S")
        await rig.link.link.stream_info("S")
        assert rig.asked() == [1, 0, 1]
        await rig.link.link.stream_info("S")
        await publish(rig.link.link, "S", [message()])
        assert rig.asked() == [0, 0, 2]

    run_virtually(scenario())


@pytest.mark.parametrize("hint", ["", "n0", "n1", "stranger"])
def test_leader_is_found_whatever_the_others_say(hint: str) -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.nodes[2].lead("S")
        for node in rig.nodes[:2]:
            node.hint = lambda stream: hint
        assert (await rig.link.link.stream_info("S")).leader == "n2"
        await rig.link.link.stream_info("S")
        assert rig.asked()[2] <= 3

    run_virtually(scenario())


def test_requests_for_a_stream_without_a_leader_share_one_search() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.cluster.leaders["S"] = None
        acks = [
            asyncio.create_task(publish(rig.link.link, "S", [message(msg_id=str(at))]))
            for at in range(500)
        ]
        await wait_virtually(1.0)
        asked = rig.asked()
        rig.nodes[1].lead("S")
        await asyncio.gather(*acks)
        # One question to each node in every pause; each publish was sent once before.
        assert sum(asked) < 500 + 3 * 50
        assert len(rig.cluster.stored["S"]) == 500

    run_virtually(scenario())


@pytest.mark.parametrize("state", ["nobody leads", "all are away"])
def test_request_that_finds_no_leader_is_refused_without_effect_in_time(state: str) -> None:
    async def scenario() -> None:
        rig = Rig()
        for node in rig.nodes:
            node.down = state == "all are away"
        rig.cluster.leaders = dict.fromkeys(rig.cluster.leaders)
        clock = asyncio.get_running_loop()
        works = [
            publish(rig.link.link, "S", [message()]),
            publish(rig.link.link, "", [message()]),
            rig.link.link.purge_stream("S", "", 0, 0),
            rig.link.link.stream_info("S"),
            rig.link.link.begin_restore("NEW"),
        ]
        found = await asyncio.gather(*map(refusal, works))
        assert {(one.spec, one.applied) for one in found} == {(errors.NOT_READY, False)}
        assert AGAIN_S <= clock.time() <= AGAIN_S + 0.5

    run_virtually(scenario())


def test_missing_stream_is_confirmed_by_the_leader_of_the_meta_group_alone() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.nodes[1].lead(META)
        found = await refusal(rig.link.link.stream_info("MISSING"))
        assert found.spec is errors.STREAM_NOT_FOUND
        assert rig.asked() == [1, 1, 0]

    run_virtually(scenario())


def test_memory_of_leaders_is_bounded() -> None:
    learned: Learned[int] = Learned(3)
    for at in range(10):
        learned.note(str(at), at)
    assert len(learned) == 3
    assert [learned.get(str(at)) for at in (0, 6, 7, 9)] == [None, None, 7, 9]
    learned.drop("9", 7)
    assert learned.get("9") == 9
    learned.drop("9", 9)
    assert learned.get("9") is None


# Publishes ---------------------------------------------------------------------------------------
def test_publishes_of_one_frame_go_to_the_leaders_of_their_streams() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.nodes[1].lead("S")
        rig.nodes[2].lead("T")
        for _ in range(2):
            outcomes: dict[int, PublishOutcome] = {}

            def done(positions: list[int], outcome: PublishOutcome, into: Any = outcomes) -> None:
                into.update(dict.fromkeys(positions, outcome))

            rig.asked()
            rig.link.publish_each_then([message(f"{one}.a") for one in "STSTS"], done)
            await wait_virtually(1.0)
            streams = [one.stream for _, one in sorted(outcomes.items())]  # type: ignore[union-attr]
            assert streams == [*"STSTS"]
        assert rig.asked() == [0, 3, 2]

    run_virtually(scenario())


def test_messages_of_one_frame_of_which_some_were_lost_are_sent_again_where_that_is_safe() -> None:
    """A leader that loses its office has stored some of them, refuses some, and lost others."""

    async def scenario() -> None:
        rig = Rig()
        old, new = rig.nodes[0], rig.nodes[1]
        await publish(rig.link.link, "", [message("S.a")])
        found: dict[int, PublishOutcome] = {}

        def partly(messages: list[PublishMessage], done: Any) -> None:
            new.lead("S")
            stored = [rig.cluster.store("S", one) for one in messages[:2]]
            refused = PubResult(0, code=errors.SUBJECT_NOT_CAPTURED.code)
            lost = PubResult(0, code=errors.OUTCOME_UNKNOWN.code, count=2)
            results = [*stored, PubResult(0, code=errors.NOT_LEADER.code), lost, refused]
            done(list(range(6)), PublishAck("S", results, "fsync"))

        def done(positions: list[int], outcome: PublishOutcome) -> None:
            if isinstance(outcome, PublishAck):
                each = [one for run in outcome.results for one in run.each()]
                found.update(zip(positions, each, strict=True))  # type: ignore[arg-type]
            else:
                found.update(dict.fromkeys(positions, outcome))

        old.publish_each_then = partly  # type: ignore[method-assign]
        rig.asked()
        rig.link.publish_each_then(
            [message(msg_id=one) for one in ("1", "2", None, "4", None, "6")], done
        )
        await wait_virtually(1.0)
        assert [found[at] for at in range(4)] == [PubResult(seq) for seq in (2, 3, 4, 5)]
        assert isinstance(found[4], ApiError)
        assert found[4].spec is errors.OUTCOME_UNKNOWN
        assert found[5] == PubResult(0, code=errors.SUBJECT_NOT_CAPTURED.code)
        assert [one.msg_id for one in rig.cluster.stored["S"]] == [None, "1", "2", None, "4"]
        assert new.asked

    run_virtually(scenario())


@pytest.mark.parametrize("lose", ["before", "after", "late"])
@pytest.mark.parametrize("stream", ["S", ""])
def test_lost_publish_with_an_id_is_stored_once(lose: str, stream: str) -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.nodes[0].lose = lose
        ack = asyncio.create_task(publish(rig.link.link, stream, [message(msg_id="1")]))
        await wait_virtually(0.1)
        rig.nodes[2].lead()
        found = await ack
        assert found.results[0].code == 0
        assert found.results[0].duplicate == (lose == "after")
        await wait_virtually(1.0)
        assert len(rig.cluster.stored["S"]) == 1

    run_virtually(scenario())


def test_publishes_that_are_lost_together_ask_once_for_the_window() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.nodes[2].lead("S")
        await publish(rig.link.link, "S", [message()])
        rig.nodes[2].lose = "after"
        acks = [
            asyncio.create_task(publish(rig.link.link, "S", [message(msg_id=str(at))]))
            for at in range(500)
        ]
        await wait_virtually(0.01)
        rig.asked()
        rig.nodes[1].lead()
        await asyncio.gather(*acks)
        assert sum(rig.asked()) < 500 + 3 * 20
        assert len(rig.cluster.stored["S"]) == 501

    run_virtually(scenario())


@pytest.mark.parametrize(
    ("stream", "answer_s", "msg_id"),
    [("S", 10.0, None), ("SHORT", 10.0, "1"), ("S", 56.0, "1")],
    ids=["without an id", "short window", "slow answers"],
)
def test_lost_publish_that_no_window_protects_is_unknown(
    stream: str, answer_s: float, msg_id: str | None
) -> None:
    async def scenario() -> None:
        rig = Rig(answer_s)
        rig.nodes[0].lose = "before"
        content = [message(f"{stream}.a", msg_id)]
        ack = asyncio.create_task(refusal(publish(rig.link.link, stream, content)))
        await wait_virtually(0.1)
        rig.nodes[2].lead()
        assert (await ack).spec is errors.OUTCOME_UNKNOWN
        assert sum(len(one.sent) for one in rig.nodes) == 1

    run_virtually(scenario())


def test_second_try_that_is_refused_leaves_the_outcome_unknown() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.nodes[0].lose = "before"
        ack = asyncio.create_task(publish(rig.link.link, "S", [message(msg_id="1")]))
        await wait_virtually(0.1)
        refused = PubResult(0, code=errors.MESSAGE_TOO_LARGE.code)
        rig.cluster.store = lambda stream, message: refused  # type: ignore[method-assign]
        rig.nodes[2].lead()
        assert (await ack).results[0].code == errors.OUTCOME_UNKNOWN.code

    run_virtually(scenario())


def test_batch_is_repeatable_only_if_every_message_has_an_id() -> None:
    with_ids = [message(msg_id="1"), message(msg_id="2")]
    assert is_repeatable(MessageBatch.of(with_ids))
    assert is_repeatable(with_ids)
    for content in ([*with_ids, message()], [message()]):
        assert not is_repeatable(MessageBatch.of(content))
        assert not is_repeatable(content)
    atomic = MessageBatch.of(with_ids)
    atomic.numbered = Numbered("p", 1)
    assert is_repeatable(atomic)
    # A repetition would be refused, although the first one may have been stored.
    for numbered in (None, Numbered("p", 1)):
        atomic.atomic, atomic.numbered = True, numbered
        assert not is_repeatable(atomic)


def test_publishes_on_their_way_are_unknown_when_the_link_is_closed() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.cluster.leaders["S"] = None
        outcomes: list[PublishOutcome] = []
        rig.link.publish_then("S", [message()], outcomes.append)
        await wait_virtually(0.1)
        assert outcomes == []
        await rig.link.close()
        assert [one.spec for one in outcomes] == [errors.OUTCOME_UNKNOWN]  # type: ignore[union-attr]

    run_virtually(scenario())


# Other requests ----------------------------------------------------------------------------------
def test_waiting_pull_continues_at_the_new_leader_for_the_rest_of_its_time() -> None:
    async def scenario() -> None:
        rig = Rig()
        clock = asyncio.get_running_loop()
        request = PullRequest(stream="S", consumer="c", expires_ns=20 * SECOND_NS)
        empty, full = (asyncio.create_task(rig.link.link.pull(request)) for _ in range(2))
        await wait_virtually(8)
        rig.nodes[1].lead()
        await wait_virtually(8)
        rig.nodes[1].lose = "before"
        rig.nodes[2].lead()
        assert (await empty).deliveries == (await full).deliveries == []
        assert 20 <= clock.time() < 20.2
        third = asyncio.create_task(rig.link.link.pull(request))
        await wait_virtually(3)
        rig.nodes[0].lead()
        await publish(rig.link.link, "S", [message()])
        assert len((await third).deliveries) == 1

    run_virtually(scenario())


@pytest.mark.parametrize(("kind", "again"), [("ack", True), ("term", True), ("nak", False)])
def test_lost_acknowledgements_are_repeated_only_if_that_is_harmless(
    kind: Any, again: bool
) -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.nodes[0].lose = "after"
        items = [AckItem(1, 1, 1, [1], kind)]
        work = asyncio.create_task(rig.link.link.acknowledge("S", "c", items, True))
        await wait_virtually(0.1)
        rig.nodes[2].lead()
        if again:
            assert [one.code for one in await work] == [0]
        else:
            assert (await refusal(work)).spec is errors.OUTCOME_UNKNOWN
        assert len(rig.nodes[2].sent) == again

    run_virtually(scenario())


def test_hold_ends_with_an_error_and_can_be_taken_at_the_new_leader() -> None:
    async def scenario() -> None:
        rig = Rig()
        for node in (*rig.nodes[1:], rig.nodes[0]):
            hold = await rig.link.link.bind_consumer("S", "c")
            node.lead()
            with pytest.raises(ApiError):
                async for _ in hold:
                    pass

    run_virtually(scenario())


def test_restore_stays_at_the_node_that_began_it() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.nodes[2].lead(META)
        token = await rig.link.link.begin_restore("NEW")
        rig.nodes[0].lead()
        await rig.link.link.append_restore(token, 0, b"piece")
        assert rig.nodes[2].sent == [("append", b"piece")]

    run_virtually(scenario())


def test_link_is_ready_while_one_node_is() -> None:
    async def scenario() -> None:
        rig = Rig()
        for node in rig.nodes:
            assert rig.link.readiness() == {}
            node.down = True
        assert rig.link.readiness() == {f"n{at}: link": "down" for at in range(3)}

    run_virtually(scenario())


# Pages of several nodes --------------------------------------------------------------------------
def infos(leader: str, names: str) -> list[Any]:
    cluster = Cluster(3)
    for node in cluster.nodes:
        if node.name == leader:
            node.lead()
    made = cluster.info("S")
    return [
        type(made)(config=type(made.config)(name=name), **_rest(made, leader)) for name in names
    ]


def _rest(made: Any, leader: str) -> dict[str, Any]:
    return {
        "created_ns": 1,
        "state": made.state,
        "incarnation": "i",
        "version": 1,
        "leader": leader,
    }


def test_streams_of_several_nodes_are_listed_once_and_in_order() -> None:
    pages = {
        "n0": Page(streams=infos("n0", "AE"), next_token=token_after("E")),
        "n1": Page(streams=infos("n1", "BC")),
        "n2": Page(streams=infos("n1", "C") + infos("n2", "DG")),
    }

    def names(limit: int) -> tuple[str, str | None]:
        page = one_page(pages, limit)
        return "".join(one.config.name for one in page.streams), page.next_token

    # Node 0 may have streams between E and G.
    assert names(9) == ("ABCDE", encode_token("E"))
    assert names(2) == ("AB", encode_token("B"))
    pages["n0"] = Page(streams=infos("n0", "AE"))
    assert names(9) == ("ABCDEG", None)
    assert names(6) == ("ABCDEG", None)
    assert {one.leader for one in one_page(pages, 9).streams if one.config.name == "C"} == {"n1"}
    assert one_page({"n0": Page()}, 5) == Page()


def event(position: str, time_ns: int) -> Advisory:
    return Advisory(type="stream_action", id=position, time_ns=time_ns)


def test_events_of_several_nodes_have_positions_in_all_of_them() -> None:
    results = {
        "aa": EventsResult([event("a-1", 10), event("a-2", 40)], "a-2"),
        "bb": EventsResult([event("b-1", 20), event("b-2", 30)], "b-3"),
        "cc": EventsResult([], "c-9"),
    }
    before = {"aa": "a-0", "bb": "b-0", "cc": "c-0", "dd": "d-0"}

    def copied() -> dict[str, EventsResult]:
        return {
            node: EventsResult([event(e.id, e.time_ns) for e in one.advisories], one.position)
            for node, one in results.items()
        }

    found = one_result(copied(), before, 10)
    assert [positions_of(one.id) for one in found.advisories] == [
        before | {"aa": "a-1", "cc": "c-9"},
        before | {"aa": "a-1", "bb": "b-1", "cc": "c-9"},
        before | {"aa": "a-1", "bb": "b-2", "cc": "c-9"},
        before | {"aa": "a-2", "bb": "b-2", "cc": "c-9"},
    ]
    assert positions_of(found.position) == {"aa": "a-2", "bb": "b-3", "cc": "c-9", "dd": "d-0"}
    assert found.lost == 0
    part = one_result(copied(), before, 2)
    assert positions_of(part.position) == {"aa": "a-1", "bb": "b-1", "cc": "c-9", "dd": "d-0"}


def test_events_are_read_from_every_node_from_its_own_position() -> None:
    async def scenario() -> None:
        rig = Rig()
        first = await rig.link.read_events(EventsRequest())
        assert set(positions_of(first.position)) == {sign_of(f"n{at}") for at in range(3)}
        rig.nodes[1].events = [EventsResult([event("0000000b-1", 5)], "0000000b-1")]
        asked = EventsRequest(after=first.position, wait_ns=60 * SECOND_NS)
        found = await rig.link.read_events(asked)
        assert asyncio.get_running_loop().time() < 1
        assert [one.time_ns for one in found.advisories] == [5]
        rig.nodes[1].down = True
        rig.nodes[2].events = [EventsResult([], "0000000c-7", None)]
        found = await rig.link.read_events(EventsRequest(after=found.position, wait_ns=SECOND_NS))
        assert found.lost is None
        assert positions_of(found.position) == {
            sign_of("n0"): "0000000a-0",
            sign_of("n1"): "0000000b-1",
            sign_of("n2"): "0000000c-7",
        }

    run_virtually(scenario())


def test_ack_of_a_cluster_is_the_same_as_of_one_node() -> None:
    async def scenario() -> None:
        rig = Rig()
        assert await publish(rig.link.link, "S", [message()]) == PublishAck(
            "S", [PubResult(1)], "fsync"
        )

    run_virtually(scenario())

"""The router under any order of elections, wrong hints, losses and requests."""

import asyncio
from collections.abc import Awaitable
from functools import partial
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import Expected, PublishMessage, StreamConfig
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.contract.publish import PublishAck
from contrail_link.publishing import publish
from contrail_link.routed.link import RoutedLink
from tests.unit.link.routed_rig import (
    META,
    SECOND_NS,
    WINDOWS_S,
    Cluster,
    VirtualLoop,
    wait_virtually,
)

AGAIN_S = 5.0
ANSWER_S = 10.0
COUNT = 3
STREAMS = (META, *WINDOWS_S)
nodes = st.integers(0, COUNT - 1)
fates = st.sampled_from(["", "before", "after", "late"])
"""The way in which a change is lost when it first reaches a leader; "": it is not."""


class Routed(RuleBasedStateMachine):
    """Every request is answered in time, none has an effect twice, and none is wrongly repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.cluster = Cluster(COUNT)
        self.number = 0
        self.link: Any = None
        self.requests: dict[int, asyncio.Task[Any]] = {}
        self.callbacks: dict[int, list[Any]] = {}
        self.deadlines: dict[int, float] = {}
        self.kinds: dict[int, tuple[str, str]] = {}

    @initialize()
    def begin(self) -> None:
        async def make() -> RoutedLink:
            return RoutedLink(self.cluster.routed, AGAIN_S, ANSWER_S)

        self.link = self.loop.run_until_complete(make())

    # The cluster ---------------------------------------------------------------------------------
    @rule(streams=st.lists(st.sampled_from(STREAMS), min_size=1), at=st.none() | nodes)
    def elect(self, streams: list[str], at: int | None) -> None:
        for stream in streams:
            self.cluster.leaders[stream] = None if at is None else self.cluster.nodes[at]

    @rule(at=nodes, hint=st.sampled_from(["right", "", "n0", "n1", "n2", "stranger"]))
    def hint(self, at: int, hint: str) -> None:
        node = self.cluster.nodes[at]
        node.hint = node.right_hint if hint == "right" else lambda stream: hint

    @rule(at=nodes, down=st.booleans())
    def reach(self, at: int, down: bool) -> None:
        self.cluster.nodes[at].down = down

    @rule(at=nodes)
    def lose_all(self, at: int) -> None:
        self.cluster.nodes[at].lose = "before"

    @rule()
    def heal(self) -> None:
        for node in self.cluster.nodes:
            node.down, node.lose, node.hint, node.delay_s = False, "", node.right_hint, 0.001

    @rule(at=nodes, delay_s=st.sampled_from([0.0, 0.001, 0.2, 2.0]))
    def slow(self, at: int, delay_s: float) -> None:
        self.cluster.nodes[at].delay_s = delay_s

    @rule(seconds=st.sampled_from([0.0, 0.005, 0.1, 1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(wait_virtually(seconds))
        for number, deadline in self.deadlines.items():
            assert self.loop.time() <= deadline or self.is_answered(number), self.kinds[number]

    # Requests ------------------------------------------------------------------------------------
    @rule(
        stream=st.sampled_from(sorted(WINDOWS_S)),
        form=st.sampled_from(["named", "subject", "batch", "each", "callback"]),
        safety=st.sampled_from(["id", "plain", "expected"]),
        fate=fates,
    )
    def publish(self, stream: str, form: str, safety: str, fate: str) -> None:
        self.next(fate)
        message = PublishMessage(f"{stream}.a", None, str(self.number).encode())
        message.msg_id = f"id{self.number}" if safety != "plain" else None
        message.expected = Expected(last_seq=0) if safety == "expected" else None
        content = MessageBatch.of([message]) if form == "batch" else [message]
        if form == "each":
            self.by_callback(safety, stream, partial(self.each, message))
        elif form == "callback":
            self.by_callback(safety, stream, partial(self.direct, message))
        else:
            named = "" if form == "subject" else stream
            self.ask(f"publish {safety}", stream, publish(self.link, named, content))

    @rule(stream=st.sampled_from(sorted(WINDOWS_S)), fate=fates)
    def purge(self, stream: str, fate: str) -> None:
        self.next(fate)
        self.ask("purge", stream, self.link.purge_stream(stream, str(self.number), 0, 0))

    @rule(fate=fates)
    def create(self, fate: str) -> None:
        self.next(fate)
        config = StreamConfig(name=str(self.number))
        self.ask("put", META, self.link.put_stream(config, "create", None, False))

    @rule(stream=st.sampled_from([*sorted(WINDOWS_S), "MISSING"]))
    def read(self, stream: str) -> None:
        self.number += 1
        self.ask("read", stream, self.link.stream_info(stream))

    @rule(stream=st.sampled_from(sorted(WINDOWS_S)), expires_s=st.sampled_from([0, 1, 20]))
    def pull(self, stream: str, expires_s: int) -> None:
        self.number += 1
        request = PullRequest(stream=stream, consumer="c", expires_ns=expires_s * SECOND_NS)
        self.ask("pull", stream, self.link.pull(request), expires_s)

    @rule(kind=st.sampled_from(["ack", "term", "nak", "in_progress"]), fate=fates)
    def acknowledge(self, kind: Any, fate: str) -> None:
        self.next(fate)
        items = [AckItem(1, 1, 1, [self.number], kind)]
        self.ask("acknowledge", "S", self.link.acknowledge("S", "c", items, True))

    # Helpers -------------------------------------------------------------------------------------
    def next(self, fate: str) -> None:
        self.number += 1
        self.cluster.fates[str(self.number)] = fate

    def ask(self, kind: str, stream: str, work: Awaitable[Any], wait_s: float = 0) -> None:
        async def outcome() -> Any:
            try:
                return await work
            except ApiError as error:
                return error

        self.requests[self.number] = self.loop.create_task(outcome())
        self.kinds[self.number] = kind, stream
        self.deadlines[self.number] = self.loop.time() + wait_s + AGAIN_S + ANSWER_S

    def by_callback(self, safety: str, stream: str, send: Any) -> None:
        answers: list[Any] = []
        self.callbacks[self.number] = answers
        self.kinds[self.number] = f"publish {safety}", stream
        self.deadlines[self.number] = self.loop.time() + AGAIN_S + ANSWER_S

        async def work() -> None:
            send(answers.append)

        self.loop.run_until_complete(work())

    def each(self, message: PublishMessage, done: Any) -> None:
        self.link.publish_each_then([message], lambda positions, outcome: done(outcome))

    def direct(self, message: PublishMessage, done: Any) -> None:
        try:
            self.link.publish_then("", [message], done)
        except ApiError as error:
            done(error)

    def is_answered(self, number: int) -> bool:
        if number in self.callbacks:
            return len(self.callbacks[number]) == 1
        return self.requests[number].done()

    def outcome(self, number: int) -> Any:
        if number in self.callbacks:
            (found,) = self.callbacks[number]
            return found
        return self.requests[number].result()

    # The end -------------------------------------------------------------------------------------
    def teardown(self) -> None:
        try:
            if self.link is not None:
                self.finish()
        finally:
            self.loop.run_until_complete(self.link.close())
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()

    def finish(self) -> None:
        self.loop.run_until_complete(wait_virtually(20 + AGAIN_S + ANSWER_S))
        stored = [one.payload for all_of in self.cluster.stored.values() for one in all_of]
        assert len(stored) == len(set(stored)), "a message was stored twice"
        changes = self.cluster.changes
        assert len(changes) == len(set(changes)), "a change was made twice"
        for number, (kind, _) in self.kinds.items():
            assert self.is_answered(number), kind
            self.check_outcome(number, kind, stored, changes)
        self.check_sends()
        self.check_that_it_recovers()

    def check_outcome(
        self, number: int, kind: str, stored: list[bytes], changes: list[str]
    ) -> None:
        found = self.outcome(number)
        if isinstance(found, ApiError):
            code, applied = found.spec.code, found.applied
            assert found.spec is not errors.NOT_LEADER
        elif isinstance(found, PublishAck):
            code, applied = found.results[0].code, False
        else:
            code, applied = 0, None
        there = str(number).encode() in stored or str(number) in changes
        if kind.startswith("publish") or kind in ("purge", "put"):
            if code == 0:
                assert there, "something was acknowledged that has not happened"
            elif code != errors.OUTCOME_UNKNOWN.code:
                assert applied is False
                assert not there, "something was refused that has happened"

    def check_sends(self) -> None:
        """Count what reached a leader: only what is safe was sent twice."""
        times: dict[Any, int] = {}
        for node in self.cluster.nodes:
            for name, content in node.sent:
                for one in content if isinstance(content, list) else [content]:
                    if name == "acknowledge":
                        safe, key = one.kind in ("ack", "term"), str(one.seqs[0])
                    elif name == "publish":
                        window = WINDOWS_S[one.subject.partition(".")[0]]
                        safe = bool(one.msg_id) and not one.expected and window > 30
                        key = one.msg_id or one.payload.decode()
                    else:
                        safe, key = False, one
                    if not safe:
                        times[name, key] = times.get((name, key), 0) + 1
        assert set(times.values()) <= {1}, "something unsafe was sent twice"

    def check_that_it_recovers(self) -> None:
        self.heal()
        self.cluster.nodes[1].lead()
        message = PublishMessage("T.last", None, b"last")
        assert self.loop.run_until_complete(publish(self.link, "", [message])).stream == "T"
        for stream in WINDOWS_S:
            assert self.loop.run_until_complete(self.link.stream_info(stream)).leader == "n1"


TestRouted = Routed.TestCase
TestRouted.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)

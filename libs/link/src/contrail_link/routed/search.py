"""The search for the node that answers a request."""

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any, Final

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_link.contract.remote import Goal
from contrail_link.routed.layouts import of_key
from contrail_link.routed.leaders import Learned, Node
from contrail_link.routed.outcomes import Kind, kind_of, no_leader

PAUSE_MIN_S: Final = 0.01
PAUSE_MAX_S: Final = 0.1
_ROUND_S: Final = 0.25
"""Time after which a round of questions goes on without the nodes that do not answer."""
_SEARCHES_MAX: Final = 64
"""Streams whose leaders are asked for at the same time; others wait for their turn."""


class Pauses:
    """Growing pauses between rounds, with jitter, so that requests do not come back together."""

    def __init__(self) -> None:
        self._next_s = PAUSE_MIN_S

    async def pause(self, until: float) -> None:
        """Wait, but not longer than ``until`` (time of the event loop)."""
        left_s = until - _now()
        wait_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, PAUSE_MAX_S)
        await asyncio.sleep(max(0.0, min(wait_s, left_s)))


class Finder:
    """Finds leaders. All fields belong to the event loop."""

    def __init__(self, nodes: Sequence[Node], again_s: float, own: Node | None = None) -> None:
        self.nodes = list(nodes)
        self.again_s = again_s
        self.leaders: Learned[Node] = Learned()
        """By key (`layouts.key_of`) of a stream or one of its shards; "" is the meta group."""
        # Index of the node for requests without a known leader. It moves on when that node fails.
        self._first = 0 if own is None else self.nodes.index(own)
        # The node of this process, if it has one.
        self._own = own
        # Index of the node that was first in the last `in_turn`.
        self._turn = 0
        # Running searches by stream, each shared by all requests for the stream.
        self._searches: dict[str, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(_SEARCHES_MAX)

    @property
    def default(self) -> Node:
        """The node for a request if nothing is known."""
        return self.nodes[self._first % len(self.nodes)]

    def named(self, name: str) -> Node | None:
        """Return the node with this name."""
        return next((one for one in self.nodes if name and one.name == name), None)

    def in_turn(self) -> list[Node]:
        """Return all nodes: the own first or, without one, beginning with another each time."""
        if self._own is not None:
            return sorted(self.nodes, key=lambda node: node is not self._own)
        self._turn = (self._turn + 1) % len(self.nodes)
        return self.nodes[self._turn :] + self.nodes[: self._turn]

    def other(self, asked: set[Node]) -> Node | None:
        """Return a node that was not asked yet, and prefer it from now on."""
        for _ in self.nodes:
            self._first += 1
            if self.default not in asked:
                return self.default
        return None

    async def find(self, stream: str, until: float) -> None:
        """Search for the leader of ``stream``. Return when it is noted, or at ``until``."""
        search = self._searches.get(stream)
        if search is None:
            search = self._start(stream, self._search(stream, until))
        await asyncio.wait([search], timeout=max(0.0, until - _now()))

    async def close(self) -> None:
        """End all searches."""
        searches = list(self._searches.values())
        for one in searches:
            one.cancel()
        await asyncio.gather(*searches, return_exceptions=True)

    def _start(self, stream: str, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        search = asyncio.create_task(work)
        self._searches[stream] = search

        def ended(task: "asyncio.Task[None]") -> None:
            if self._searches.get(stream) is task:
                del self._searches[stream]

        search.add_done_callback(ended)
        return search

    async def _search(self, stream: str, until: float) -> None:
        pauses = Pauses()
        async with self._turns:
            while _now() < until:
                node = await self._ask_all(stream, min(_ROUND_S, until - _now()))
                if node is not None:
                    self.leaders.note(stream, node)
                    return
                await pauses.pause(until)

    async def _ask_all(self, stream: str, timeout_s: float) -> Node | None:
        """Return the node that reads the stream, or else one that may refuse to."""
        asked = {asyncio.create_task(_leads(node, stream)): node for node in self.nodes}
        waiting = set(asked)
        refuser: Node | None = None
        end = _now() + timeout_s
        try:
            while waiting:
                done, waiting = await asyncio.wait(
                    waiting, timeout=end - _now(), return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for task in filter(done.__contains__, asked):  # in the order of the nodes
                    leads = task.result()
                    if leads:
                        return asked[task]
                    if leads is False:
                        refuser = asked[task]
        finally:
            for task in asked:
                task.cancel()
        return refuser


class Search:
    """The nodes that one request asks. ``node`` is the one to ask now."""

    def __init__(self, finder: Finder, goal: Goal, key: str, until: float) -> None:
        self.key = key
        self.until = until
        self._finder = finder
        # Requests for any node say nothing about leaders.
        self._learns = goal is not Goal.ANY
        self._goal = goal
        found = finder.leaders.get(key) if self._learns else None
        self.node = found or finder.default
        # Nodes that did not answer since the last pause.
        self._asked: set[Node] = set()
        self._pauses = Pauses()
        # The leader was searched for before.
        self._searched = False

    async def next(self, error: ApiError) -> None:
        """Choose the next node after ``error``: the one that it names, or one not asked yet.

        Waits if there is none. Raises the error for the caller if the time is over.
        """
        leaders = self._finder.leaders
        if self._learns:
            leaders.drop(self.key, self.node)
        self._asked.add(self.node)
        if _now() >= self.until:
            raise no_leader(error)
        node = self._finder.named(error.leader)
        if node is not None and node not in self._asked:
            if self._learns:
                leaders.note(self.key, node)
        else:
            node = leaders.get(self.key)  # another request may have found the leader
            if node is None or node in self._asked:
                node = await self._search()
            if node is None:
                # No node leads the stream, whatever the one said that was asked first.
                led = self._goal is not Goal.LEADER
                raise no_leader(error if led else ApiError(errors.NOT_LEADER))
        self.node = node

    async def _search(self) -> Node | None:
        finder = self._finder
        if self._goal is not Goal.LEADER:
            node = finder.other(self._asked)
            if node is None:
                await self._pauses.pause(self.until)
                self._asked.clear()
                node = finder.other(self._asked)
            return node
        if self._searched:
            # The node that was found leads the stream, and still did not answer this request.
            await self._pauses.pause(self.until)
        self._searched = True
        self._asked.clear()
        while (node := finder.leaders.get(self.key)) is None and _now() < self.until:
            await finder.find(self.key, self.until)
        return node

    def refused(self, error: ApiError) -> None:
        """Note a final refusal of the node."""
        if error.spec is errors.STREAM_NOT_FOUND and self._learns:
            self._finder.leaders.drop(self.key, self.node)

    def answered(self) -> None:
        """Note that the node has answered."""
        if self._learns:
            self._finder.leaders.note(self.key, self.node)


async def _leads(node: Node, key: str) -> bool | None:
    """Return True if a node reads the stream as its leader, False if it refuses for good."""
    try:
        await node.link.read_position(*of_key(key))
    except ApiError as error:
        return False if kind_of(error) is Kind.FINAL else None
    return True


def _now() -> float:
    return asyncio.get_running_loop().time()

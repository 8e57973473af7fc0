"""``StorageLink`` over the storage nodes of a cluster, which may lead any of its streams."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any, Final, TypeVar, cast

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage
from contrail_common.timeunits import NS_PER_S
from contrail_link.contract import StorageLink
from contrail_link.contract.admin import EventsRequest, EventsResult
from contrail_link.contract.cluster import NodeView
from contrail_link.contract.publish import PublishContent, PublishOutcome
from contrail_link.contract.read import Peeked, ReplicaPosition
from contrail_link.contract.remote import Goal
from contrail_link.contract.streams import Page
from contrail_link.routed.leaders import Node
from contrail_link.routed.listing import one_page, one_result, positions_of, sign_of
from contrail_link.routed.outcomes import Kind, kind_of, may_repeat, no_leader, with_rest
from contrail_link.routed.publishing import Publisher
from contrail_link.routed.search import Finder, Search
from contrail_link.tcp import methods
from contrail_link.tcp.channel import Channel
from contrail_link.tcp.methods import DeclaredMethod
from contrail_link.tcp.metrics import client_metrics, exposition

_R = TypeVar("_R")
AGAIN_S: Final = 5.0
ANSWER_S: Final = 35.0
_VIEW_S: Final = 1.0
"""How long a node may take to say how it is."""


class RoutedLink:
    """A ``StorageLink`` to several nodes: each request goes to the one that can answer it.

    A node that cannot answer refuses with NOT_LEADER, without effect, and may name the leader. Then
    the request goes there, or to the others in turn. A request that was sent and lost is sent again
    only if that is safe. No request is sent again later than ``again_s`` after its begin (for a
    wait: after its end). ``answer_s`` is the longest time in which the link to a node answers.
    ``own`` is the node of this process, if it has one: it is asked first, and its readiness is that
    of this link. The order of ``nodes`` must be the same at all edges, since tokens refer to it.

    Only the methods with code of their own are written out. All others are made from their
    declarations, below the class.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        again_s: float = AGAIN_S,
        answer_s: float = ANSWER_S,
        own: Node | None = None,
    ) -> None:
        self._finder = Finder(nodes, again_s, own)
        self._own = own
        self._publisher = Publisher(self._finder, self.link, answer_s)
        # Requests, other than publishes, that were sent again.
        self._again = 0

    async def close(self) -> None:
        """End searches and repetitions; the links to the nodes stay open."""
        await self._publisher.close()
        await self._finder.close()

    @property
    def link(self) -> StorageLink:
        """This object, typed as what it implements."""
        return cast(StorageLink, self)

    @property
    def again(self) -> int:
        """Number of times that a request was sent again."""
        return self._again + self._publisher.flows.again

    # Publishing ----------------------------------------------------------------------------------
    def publish_then(
        self, stream: str, content: PublishContent, done: Callable[[PublishOutcome], None]
    ) -> None:
        """Store messages; ``done`` gets the outcome."""
        self._publisher.publish_then(stream, content, done)

    async def may_retry(self, refusal: ApiError, refused_at_s: float) -> bool:
        """Return False: everything that is safe was tried."""
        return False

    def publish_each_then(
        self, messages: list[PublishMessage], done: Callable[[list[int], PublishOutcome], None]
    ) -> None:
        """Store each message where its subject goes; each node gets its messages together."""
        self._publisher.publish_each_then(messages, done)

    def peek_message(self, stream: str, seq: int) -> Peeked:
        """Return None: the leader has to be found and asked."""
        return None

    def peek_last(self, stream: str, subject: str) -> Peeked:
        """Return None: the leader has to be found and asked."""
        return None

    # All nodes together --------------------------------------------------------------------------
    async def list_streams(self, subject: str, prefix: str, limit: int, token: str) -> Page:
        """List streams by name, from all nodes that answer."""

        async def page(node: Node) -> Page:
            return await node.link.list_streams(subject, prefix, limit, token)

        return one_page(await self._of_all(page), limit)

    async def read_events(self, request: EventsRequest) -> EventsResult:
        """Return the events of all nodes; wait for the first from any of them."""
        positions = positions_of(request.after)

        async def events(node: Node) -> EventsResult:
            own = positions.get(sign_of(node.name), "" if positions else request.after)
            return await node.link.read_events(msgspec.structs.replace(request, after=own))

        def is_news(result: EventsResult) -> bool:
            return bool(result.advisories) or result.lost != 0

        found = await self._of_all(events, is_news)
        return one_result(
            {sign_of(name): result for name, result in found.items()}, positions, request.limit
        )

    async def find_replica(self, stream: str, shard: int | None = None) -> ReplicaPosition:
        """Find a copy: on the own node, if there is one, or else on any that answers."""
        for node in self._finder.in_turn():
            try:
                return await node.link.find_replica(stream, shard)
            except ApiError as error:
                if kind_of(error) is Kind.FINAL:
                    raise
        detail = "no node that answers has a whole and recent copy of the stream"
        raise ApiError(errors.NOT_READY, detail, retry_after_s=1, applied=False)

    async def _at_replica(self, name: str, method: DeclaredMethod, arguments: Any) -> Any:
        node = self._finder.named(name)
        if node is None:
            detail = f"node {name} does not answer"
            raise ApiError(errors.NOT_READY, detail, retry_after_s=1, applied=False)
        return await getattr(node.link, method.name)(*arguments)

    async def node_views(self) -> list[NodeView]:
        """Return the views of all nodes that answer in time."""

        async def views(node: Node) -> list[NodeView]:
            try:
                async with asyncio.timeout(_VIEW_S):
                    return await node.link.node_views()
            except (ApiError, TimeoutError):
                return []

        answers = await asyncio.gather(*map(views, self._finder.nodes))
        found = [view for answer in answers for view in answer]
        if not found:
            detail = "no storage node answers"
            raise ApiError(errors.NOT_READY, detail, retry_after_s=1, applied=False)
        return found

    async def _of_all(
        self,
        ask: Callable[[Node], Awaitable[_R]],
        enough: Callable[[_R], bool] = lambda _: False,
    ) -> dict[str, _R]:
        """Return the answers of all nodes by their names, or the first that are ``enough``.

        Raises the error of a node if none answers.
        """
        asked = {asyncio.ensure_future(_or_error(ask(node))): node for node in self._finder.nodes}
        found: dict[str, _R] = {}
        refusal = ApiError(errors.NOT_READY, retry_after_s=1, applied=False)
        waiting = set(asked)
        try:
            while waiting and not any(map(enough, found.values())):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in filter(done.__contains__, asked):  # in the order of the nodes
                    answer = task.result()
                    if not isinstance(answer, ApiError):
                        found[asked[task].name] = answer
                    elif kind_of(answer) is Kind.FINAL:
                        raise answer
                    else:
                        refusal = answer
        finally:
            for task in asked:
                task.cancel()
        if not found:
            raise no_leader(refusal)
        return found

    def readiness(self, *, strict: bool = False) -> dict[str, str]:
        """Return why the own node is not ready, or without one, why none is; empty otherwise."""
        if self._own is not None:
            return self._own.link.readiness(strict=strict)
        reasons: dict[str, str] = {}
        for at, node in enumerate(self._finder.nodes, 1):
            one = node.link.readiness()
            if not one:
                return {}
            name = node.name or f"node {at}"
            reasons |= {f"{name}: {part}": reason for part, reason in one.items()}
        return reasons

    async def metrics_text(self) -> str:
        """Return the metrics of the own node, and of this end of the links to the others."""
        channels: dict[str, Channel] = {}
        own = ""
        for at, node in enumerate(self._finder.nodes, 1):
            if not node.channels:
                own += await node.link.metrics_text()
            name = node.name or f"node {at}"
            channels |= {f"{purpose} {name}": one for purpose, one in node.channels.items()}
        return own + exposition(client_metrics(channels, self.again))

    # Restores ------------------------------------------------------------------------------------
    async def begin_restore(self, stream: str) -> str:
        """Begin a restore. The token says which node has it."""
        search = self._search(_BEGIN_RESTORE, (stream,))
        token: str = await self._ask(_BEGIN_RESTORE, (stream,), search)
        return f"{self._finder.nodes.index(search.node)}.{token}"

    async def _at_token(self, method: DeclaredMethod, arguments: tuple[Any, ...]) -> Any:
        number, _, token = arguments[0].partition(".")
        node = self._finder.nodes[int(number)]
        return await getattr(node.link, method.name)(token, *arguments[1:])

    # Calls ---------------------------------------------------------------------------------------
    def _search(self, method: DeclaredMethod, arguments: tuple[Any, ...]) -> Search:
        until = _now() + self._finder.again_s + method.wait_ns(arguments) / NS_PER_S
        return Search(self._finder, method.route.goal, method.key(arguments), until)

    async def _ask(self, method: DeclaredMethod, arguments: tuple[Any, ...], search: Search) -> Any:
        """Return the result of a method from the node that answers."""
        wait_until = _now() + method.wait_ns(arguments) / NS_PER_S
        while True:
            try:
                result = await getattr(search.node.link, method.name)(*arguments)
            except ApiError as error:
                kind = kind_of(error)
                if kind is Kind.FINAL:
                    search.refused(error)
                    raise
                if kind is Kind.LOST and not may_repeat(method, arguments):
                    raise
                self._again += 1
                await search.next(error)
                if method.wait_ns(arguments):
                    rest_ns = round((wait_until - _now()) * NS_PER_S)
                    arguments = with_rest(method, arguments, rest_ns)
            else:
                search.answered()
                return result


async def _or_error(work: Awaitable[_R]) -> _R | ApiError:
    try:
        return await work
    except ApiError as error:
        return error


def _now() -> float:
    return asyncio.get_running_loop().time()


def _forward(method: DeclaredMethod) -> Callable[..., Any]:
    """Return the method of RoutedLink that asks the node of its route."""

    @wraps(method.declaration)
    async def forward(self: RoutedLink, *args: Any, **kwargs: Any) -> Any:
        arguments = method.in_order(args, kwargs)
        if method.route.goal is Goal.TOKEN:
            return await self._at_token(method, arguments)
        replica = method.replica(arguments)
        if replica:
            return await self._at_replica(replica, method, arguments)
        return await self._ask(method, arguments, self._search(method, arguments))

    return forward


_BEGIN_RESTORE: Final = methods.BY_NAME["begin_restore"]
for _method in methods.DECLARED:
    if not hasattr(RoutedLink, _method.name):
        setattr(RoutedLink, _method.name, _forward(_method))

"""Groups that another node leads, as a member with a copy uses them.

Commands go to the leader, and their results are passed on once the own copy has them too. Commands
for a group go in order, those that wait together in one request. If the outcome of one is not known
or the leader refuses it, those behind it are given up as well: they may rely on it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile
from typing import Any, Final, NamedTuple

import msgspec

from contrail_common import errors
from contrail_common.errors import REGISTRY, ApiError
from contrail_common.retention_rules import RetentionProblem
from contrail_storage.core import commands as cmd
from contrail_storage.core.entry_codec import encode_command
from contrail_storage.core.results import ConsumerPut, Done, Refused, Removed, Reserved, Result
from contrail_storage.replica.groups import Groups
from contrail_storage.replica.raft_port import no_leader

Ask = Callable[[str, bytes], Awaitable[bytes]]
"""Sends a request to another node, and returns its answer.

Raises the ApiError with which that node refuses. Raises NOT_LEADER if the request was not sent,
OUTCOME_UNKNOWN if its answer is lost, and OVERLOADED if too many requests to the node are open.
"""

QUEUE_BYTES_MAX: Final = 64 << 20
"""Bytes of commands that wait for the leader of one group; one is taken whatever its size."""
_REQUEST_COMMANDS: Final = 1_000
_REQUEST_BYTES: Final = 1 << 20
"""A request has commands up to this size, or one that is larger."""
_LOOK_S: Final = 0.05
"""How often a node that waits for an answer looks whether the one that it asked still leads."""
_KINDS: Final = (Refused, Removed, Done, ConsumerPut, Reserved)
_ERROR: Final = len(_KINDS)


class Commands(msgspec.Struct, tag=0, array_like=True):
    """Commands by shard for ``group``, in order, of the node that leads ``home`` in ``term``."""

    group: int
    home: int
    term: int
    commands: list[tuple[int, cmd.Command]]


class Position(msgspec.Struct, tag=1, array_like=True):
    """The question for an index of ``group``: a copy that has it is as new as the question."""

    group: int


class _Answer(msgspec.Struct, array_like=True):
    """The copy with the entry ``index`` has the commands. A result is a kind and its fields."""

    index: int
    results: list[tuple[int, list[Any]]] = []


class _Waiting(NamedTuple):
    home: int
    shard_id: int
    command: msgspec.Raw
    done: asyncio.Future[Result]


class _Queue:
    """Commands that are not sent yet, in order."""

    def __init__(self) -> None:
        self.waiting: deque[_Waiting] = deque()
        self.bytes = 0

    def add(self, one: _Waiting) -> None:
        """Add a command (OVERLOADED)."""
        if self.waiting and self.bytes + len(one.command) > QUEUE_BYTES_MAX:
            detail = "too many commands wait for the leader of their group"
            raise ApiError(errors.OVERLOADED, detail, retry_after_s=1, applied=False)
        self.waiting.append(one)
        self.bytes += len(one.command)

    def take(self) -> list[_Waiting]:
        """Take what goes into one request: commands of the same home."""
        some: list[_Waiting] = []
        size = 0
        home = self.waiting[0].home
        for one in takewhile(lambda one: one.home == home, self.waiting):
            if some and (
                size + len(one.command) > _REQUEST_BYTES or len(some) == _REQUEST_COMMANDS
            ):
                break
            size += len(one.command)
            some.append(one)
        for _ in some:
            self.waiting.popleft()
        self.bytes -= size
        return some

    def clear(self) -> list[_Waiting]:
        """Take everything."""
        given_up = list(self.waiting)
        self.waiting.clear()
        self.bytes = 0
        return given_up


_requests: Final = msgspec.msgpack.Decoder(Commands | Position)


class Elsewhere:
    """What other members of groups do for this node, and this one for them, on the event loop."""

    def __init__(self, groups: Groups, ask: Ask | None) -> None:
        """``ask`` sends a request to :meth:`answer` of another node (None: there is none)."""
        self.on_lost: Callable[[int], None] = lambda group: None
        """Learns of a group when the outcome of commands for it is refused or not known."""
        self._groups = groups
        self._ask = ask
        # By group: commands that are not sent yet, and what sends them while there are some.
        self._queues: dict[int, _Queue] = {}
        self._senders: dict[int, asyncio.Task[None]] = {}

    def close(self) -> None:
        """Send nothing any more."""
        for sender in self._senders.values():
            sender.cancel()

    def command(
        self, group: int, home: int, shard_id: int, command: cmd.Command
    ) -> asyncio.Future[Result]:
        """Have a command proposed; the future gives its result once this copy has it too.

        Raises OVERLOADED, without effect. This node leads ``home``; when it does no longer, the
        outcome is unknown.
        """
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        queue = self._queues.setdefault(group, _Queue())
        queue.add(_Waiting(home, shard_id, encode_command(command), done))
        if group not in self._senders:
            self._senders[group] = asyncio.ensure_future(self._send(group, queue))
        return done

    async def confirm(self, group: int) -> None:
        """Wait until this node's copy of a group is no older than this call.

        Raises NOT_LEADER without a leader, and OUTCOME_UNKNOWN if it, or the copy, does not answer.
        """
        if self._groups.leads(group):
            await self._groups.confirm_led(group)
            return
        answer = await self._ask_leader(group, Position(group))
        await self._groups.until_applied(group, answer.index)

    async def _send(self, group: int, queue: _Queue) -> None:
        try:
            while queue.waiting:
                await self._send_some(group, queue)
        finally:
            del self._senders[group]

    async def _send_some(self, group: int, queue: _Queue) -> None:
        some = queue.take()
        try:
            results = await self._results(group, some)
        except BaseException as error:
            refusal = error if isinstance(error, ApiError) else ApiError(errors.OUTCOME_UNKNOWN)
            for one in (*some, *queue.clear()):
                if not one.done.done():
                    one.done.set_exception(refusal)
            self.on_lost(group)
            if not isinstance(error, ApiError):
                raise
            return
        for one, (kind, fields) in zip(some, results, strict=True):
            if one.done.done():
                continue
            if kind == _ERROR:
                one.done.set_exception(_error_of(*fields))
            else:
                one.done.set_result(_result_of(kind, fields))
        if any(kind == _ERROR for kind, _ in results):
            self.on_lost(group)

    async def _results(self, group: int, some: Sequence[_Waiting]) -> list[tuple[int, list[Any]]]:
        """Return the results of commands for the same home, once the own copy has them."""
        home, term = some[0].home, self._groups[some[0].home].term
        commands = [(one.shard_id, one.command) for one in some]
        answer = await self._ask_leader(group, (0, group, home, term, commands))
        try:
            await self._groups.until_applied(group, answer.index)
            if group != home:
                # Otherwise the next leader might lack what this one has confirmed to a client.
                await self._groups.confirm_led(home)
        except ApiError as error:
            raise ApiError(errors.OUTCOME_UNKNOWN, str(error)) from error
        return answer.results

    async def _ask_leader(self, group: int, request: object) -> _Answer:
        """Return the leader's answer to a request."""
        groups, leader = self._groups, self._groups[group].leader
        if self._ask is None or leader in ("", groups.node_id):
            raise no_leader("")
        asked = asyncio.ensure_future(self._ask(leader, msgspec.msgpack.encode(request)))
        try:
            while not asked.done():
                await asyncio.wait((asked,), timeout=_LOOK_S)
                if not asked.done() and groups[group].leader != leader:
                    raise ApiError(errors.OUTCOME_UNKNOWN, f"{leader} leads no longer")
            return msgspec.msgpack.decode(asked.result(), type=_Answer)
        except msgspec.MsgspecError as error:
            raise ApiError(errors.OUTCOME_UNKNOWN, f"the answer of {leader}: {error}") from error
        finally:
            asked.cancel()

    async def answer(self, body: bytes) -> bytes:
        """Answer another member (NOT_LEADER; msgspec.DecodeError)."""
        request, groups = _requests.decode(body), self._groups
        group = request.group
        groups.check_led(group)
        if isinstance(request, Position):
            await groups.confirm_led(group)
            return msgspec.msgpack.encode(_Answer(groups[group].applied_index))
        home = groups.get(request.home)
        if request.home != group and (home is None or home.term > request.term):
            # A node that was stopped does not know that another one leads.
            raise no_leader("" if home is None else home.leader)
        proposed = [self._propose(group, *one) for one in request.commands]
        found = [await _outcome(one) for one in proposed]
        # The others learn what is committed with the next round. One that waits should not wait
        # for the next heartbeat.
        groups[group].read_index(lambda _: None)
        return msgspec.msgpack.encode(_Answer(groups[group].applied_index, found))

    def _propose(
        self, group: int, shard_id: int, command: cmd.Command
    ) -> asyncio.Future[Result] | ApiError:
        try:
            return self._groups.proposers[group].command(shard_id, command)
        except ApiError as error:
            return error


async def _outcome(proposed: asyncio.Future[Result] | ApiError) -> tuple[int, list[Any]]:
    """The outcome of a command as :class:`_Answer` has it."""
    try:
        if isinstance(proposed, ApiError):
            raise proposed
        result = await proposed
    except ApiError as error:
        return _ERROR, [error.spec.code, error.detail, error.applied]
    kind = _KINDS.index(type(result))
    match result:
        case Refused():
            problem = result.problem and (result.problem.spec.code, *result.problem[1:])
            return kind, [result.code, result.detail, problem, result.seq]
        case Removed():
            return kind, [result.count, result.more]
        case Done():
            return kind, [result.changed]
        case ConsumerPut():
            return kind, [result.consumer_id, result.created]
        case Reserved():
            return kind, [result.shard_id]
        case _:
            raise TypeError(f"a result that is not passed on: {result}")


def _result_of(kind: int, fields: list[Any]) -> Result:
    if _KINDS[kind] is Refused and fields[2] is not None:
        code, field, message = fields[2]
        fields[2] = RetentionProblem(REGISTRY[code], field, message)
    return _KINDS[kind](*fields)


def _error_of(code: int, detail: str, applied: bool | None) -> ApiError:
    return ApiError(REGISTRY[code], detail, applied=applied)

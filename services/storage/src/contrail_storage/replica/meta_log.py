"""The log of the meta group, for all nodes: commands go to the node that leads it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_storage.core import commands as cmd
from contrail_storage.core.entry_codec import encode_command
from contrail_storage.core.results import Done, Refused, Reserved, Result
from contrail_storage.replica.proposer import Proposer
from contrail_storage.replica.raft_port import Group

Forward = Callable[[bytes], Awaitable[bytes]]
"""Sends a command to `MetaLog.answer` on the leading node, and returns its answer.

Raises NOT_LEADER while no leader can be reached, and OUTCOME_UNKNOWN if the answer is lost.
"""


_PATIENCE_S: Final = 5.0
"""How long a command waits for a leader."""
_AGAIN_S: Final = 0.05
_decoder: Final = msgspec.msgpack.Decoder(cmd.MetaCommand)


class _Answer(msgspec.Struct, array_like=True):
    """The result of a command; ``index`` is that of its entry, or a later one.

    One of the others is set: whether the command changed anything, a reserved shard id, or the code
    and the sentence of a refusal.
    """

    index: int
    changed: bool | None = None
    shard_id: int | None = None
    refused: tuple[int, str] | None = None


class MetaLog:
    """Accepts commands for the meta machine. Used on the event loop only."""

    def __init__(
        self,
        proposer: Proposer,
        group: Group,
        write_noted: Callable[[], Awaitable[None]],
        forward: Forward | None = None,
    ) -> None:
        # Makes entries of commands, while this node leads.
        self._proposer = proposer
        self._group = group
        # Waits until any entry is written, which is after it was applied.
        self._write_noted = write_noted
        # Reaches the leader; None if this node is the only member.
        self._forward = forward

    async def command(self, command: cmd.MetaCommand) -> Result:
        """Propose a command; return its result once this node has applied it too.

        Waits some seconds for a leader. Raises what the proposer raises.
        """
        deadline_s = asyncio.get_running_loop().time() + _PATIENCE_S
        while True:
            try:
                return await self._try(command)
            except ApiError as error:
                late = asyncio.get_running_loop().time() > deadline_s
                if late or error.spec is not errors.NOT_LEADER:
                    raise
            await asyncio.sleep(_AGAIN_S)

    async def _try(self, command: cmd.MetaCommand) -> Result:
        if self._group.is_leader or self._forward is None:
            return await self._proposer.command(cmd.META_SHARD, command)
        body = await self._forward(encode_command(command))
        answer = msgspec.msgpack.decode(body, type=_Answer)
        # Otherwise the caller would look for the effect of its command in an earlier state.
        while self._group.applied_index < answer.index:
            await self._write_noted()
        return _result_of(answer)

    async def answer(self, body: bytes) -> bytes:
        """Propose a command for another node; return what its :meth:`command` expects.

        Raises msgspec.DecodeError, and what the proposer raises.
        """
        command = _decoder.decode(body)
        result = await self._proposer.command(cmd.META_SHARD, command)
        return msgspec.msgpack.encode(_answer_of(self._group.applied_index, result))


def _answer_of(index: int, result: Result) -> _Answer:
    match result:
        case Refused():
            return _Answer(index, refused=(result.code, result.detail))
        case Reserved():
            return _Answer(index, shard_id=result.shard_id)
        case Done():
            return _Answer(index, changed=result.changed)
        case _:
            raise TypeError(f"the meta machine has no result {result}")


def _result_of(answer: _Answer) -> Result:
    if answer.refused is not None:
        return Refused(*answer.refused)
    if answer.shard_id is not None:
        return Reserved(answer.shard_id)
    return Done(bool(answer.changed))

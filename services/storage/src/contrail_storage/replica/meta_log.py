"""The log of the meta group, for all nodes: commands go to the node that leads it."""

import asyncio
from typing import Final

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_storage.core import commands as cmd
from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.core.results import Result
from contrail_storage.replica.elsewhere import Elsewhere
from contrail_storage.replica.proposer import Proposer
from contrail_storage.replica.raft_port import Group

_PATIENCE_S: Final = 5.0
"""How long a command waits for a leader."""
_AGAIN_S: Final = 0.05


class MetaLog:
    """Accepts commands for the meta machine. Used on the event loop only."""

    def __init__(self, proposer: Proposer, group: Group, elsewhere: Elsewhere | None) -> None:
        # Makes entries of commands, while this node leads.
        self._proposer = proposer
        self._group = group
        # Reaches the leader; None if this node is the only member.
        self._elsewhere = elsewhere

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
        if self._group.is_leader or self._elsewhere is None:
            return await self._proposer.command(cmd.META_SHARD, command)
        return await self._elsewhere.command(META_GROUP, META_GROUP, cmd.META_SHARD, command)

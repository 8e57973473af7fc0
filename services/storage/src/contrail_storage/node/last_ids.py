"""Which id the last message really has, told to a publisher that expected another.

Machines keep ids as keyed hashes, so ``apply`` can only say which message is the last. Its id is
read from the message itself afterwards, for the answer alone.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.link import PubResult
from contrail_common.message_batch import MessageBatch
from contrail_common.model import MSG_ID, Expected, PublishMessage
from contrail_storage.node.entries import Outcome, set_outcome
from contrail_storage.node.reader import Reader
from contrail_storage.node.shard import Shard

if TYPE_CHECKING:
    from contrail_storage.node.shard_logs import PublishLog

Done = Callable[[Outcome], None]

_CODE: Final = errors.WRONG_LAST_MSG_ID.code
_SHOWN_CHARS: Final = 256
_READ_MAX: Final = 16
"""Messages that are read for one request; a batch may have met more last ones than that."""


class LastIdLog:
    """A `PublishLog` that adds to a refusal of an expected last id what that id is."""

    def __init__(self, log: "PublishLog", reader: Reader, shards: Mapping[int, Shard]) -> None:
        self._log = log
        self._reader = reader
        self._shards = shards
        self._telling: set[asyncio.Task[None]] = set()

    def append(self, shard: int, messages: list[PublishMessage]) -> asyncio.Future[list[PubResult]]:
        """See `Proposer.append`."""
        future: asyncio.Future[list[PubResult]] = asyncio.get_running_loop().create_future()
        self.append_then(shard, messages, partial(set_outcome, future))
        return future

    def append_then(self, shard: int, messages: list[PublishMessage], done: Done) -> None:
        """See `Proposer.append_then`."""
        if any(_expects(message.expected) for message in messages):
            done = partial(self._look, shard, done)
        self._log.append_then(shard, messages, done)

    def append_batch(self, shard: int, batch: MessageBatch) -> asyncio.Future[list[PubResult]]:
        """See `Proposer.append_batch`."""
        future: asyncio.Future[list[PubResult]] = asyncio.get_running_loop().create_future()
        self.append_batch_then(shard, batch, partial(set_outcome, future))
        return future

    def append_batch_then(self, shard: int, batch: MessageBatch, done: Done) -> None:
        """See `Proposer.append_batch_then`."""
        if batch.expected and any(map(_expects, batch.expected.values())):
            done = partial(self._look, shard, done)
        self._log.append_batch_then(shard, batch, done)

    def _look(self, number: int, done: Done, outcome: Outcome) -> None:
        shard = self._shards.get(number)
        if isinstance(outcome, ApiError) or shard is None:
            done(outcome)
            return
        seqs = {one.seq for one in outcome if one.code == _CODE and one.seq}
        if not seqs:
            done(outcome)
            return
        task = asyncio.ensure_future(self._tell(shard, sorted(seqs)[:_READ_MAX], done, outcome))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(
        self, shard: Shard, seqs: list[int], done: Done, outcome: list[PubResult]
    ) -> None:
        found: dict[int, str] = {}
        try:
            for seq in seqs:
                found[seq] = await self._id_of(shard, seq)
        finally:  # whatever became of the reads, the publisher has its answer
            done([_told(one, found) if one.code == _CODE else one for one in outcome])

    async def _id_of(self, shard: Shard, seq: int) -> str:
        """The id of a message, "" where it cannot be told."""
        try:
            message = await self._reader.get(shard, seq)
        except ApiError:
            return ""  # it is gone, or cannot be read
        for name, values in (message.headers or {}).items():
            if name.lower() == MSG_ID.lower() and values:
                return values[0][:_SHOWN_CHARS]
        return ""


def _expects(expected: Expected | None) -> bool:
    return expected is not None and expected.last_msg_id is not None


def _told(result: PubResult, ids: Mapping[int, str]) -> PubResult:
    known = ids.get(result.seq, "")
    detail = f"{result.detail}: {known}" if known else result.detail
    return msgspec.structs.replace(result, seq=0, detail=detail)

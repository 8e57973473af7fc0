"""The last message id in a refusal.

Machines keep message ids as keyed hashes, so ``apply`` can only say which message is the last one.
If a publisher expected another last id, the id for the answer is read from the message afterwards.
"""

import asyncio
from collections.abc import Mapping
from operator import attrgetter
from typing import Final

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import MSG_ID
from contrail_link.contract.publish import PubResult
from contrail_storage.reading.reader import Reader
from contrail_storage.replica.entries import Done, Outcome
from contrail_storage.replica.shard import Shard

_CODE: Final = errors.WRONG_LAST_MSG_ID.code
_SHOWN_CHARS: Final = 256
_READ_MAX: Final = 16
"""Messages that are read for one request at most; the other refusals do not name the last id."""
_code_of = attrgetter("code")


class LastIds:
    """Names the actual last message id where another one was expected."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._completing: set[asyncio.Task[None]] = set()

    def complete(self, shard: Shard, done: Done, outcome: Outcome) -> None:
        """Call ``done`` with the outcome of a publish to ``shard``, and with the ids it lacks."""
        if isinstance(outcome, ApiError) or _CODE not in map(_code_of, outcome):
            done(outcome)
            return
        seqs = {one.seq for one in outcome if one.code == _CODE and one.seq}
        if not seqs:
            done(outcome)
            return
        work = self._complete(shard, sorted(seqs)[:_READ_MAX], done, outcome)
        task = asyncio.ensure_future(work)
        self._completing.add(task)
        task.add_done_callback(self._completing.discard)

    async def _complete(
        self, shard: Shard, seqs: list[int], done: Done, outcome: list[PubResult]
    ) -> None:
        found: dict[int, str] = {}
        try:
            for seq in seqs:
                found[seq] = await self._id_of(shard, seq)
        finally:  # the publisher gets its answer even if a read fails
            done([_with_id(one, found) if one.code == _CODE else one for one in outcome])

    async def _id_of(self, shard: Shard, seq: int) -> str:
        """The id of a message; "" if the message has none or cannot be read."""
        try:
            message = await self._reader.get(shard, seq)
        except ApiError:
            return ""  # it is gone, or cannot be read
        for name, values in (message.headers or {}).items():
            if name.lower() == MSG_ID.lower() and values:
                return values[0][:_SHOWN_CHARS]
        return ""


def _with_id(result: PubResult, ids: Mapping[int, str]) -> PubResult:
    known = ids.get(result.seq, "")
    detail = f"{result.detail}: {known}" if known else result.detail
    return msgspec.structs.replace(result, seq=0, detail=detail)

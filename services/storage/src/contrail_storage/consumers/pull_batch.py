"""The messages of one pull: collected one by one, or in columns, while they fit."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from contrail_common import errors
from contrail_common.columns.blocks import Block, MessageColumns, columns_of, message_size
from contrail_common.columns.delivery_columns import (
    HEADERS_OF_MESSAGE,
    HEADERS_STEP,
    DeliveryColumns,
    join_deliveries,
)
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, Headers, StoredMessage
from contrail_common.texts import as_u32, lengths_of
from contrail_link.contract.consume import Delivery, PullRequest, in_deliveries
from contrail_storage.core.subjects.subject_table import SubjectTable

PULL_BYTES_MAX: Final = 8 << 20
_MANY: Final = 16
"""From so many messages on, making all of them of columns is faster than one by one."""
_MESSAGE_SIZE_HEADER: Final = "Nats-Msg-Size"


def check_limits(config: ConsumerConfig, request: PullRequest) -> None:
    """Raise PULL_LIMIT for a pull that asks for more than the consumer allows at once."""
    for limit, asked, what in (
        (config.max_batch, request.batch, "max_batch"),
        (config.max_expires_ns, request.expires_ns, "max_expires"),
        (config.max_bytes, request.max_bytes, "max_bytes"),
    ):
        if limit > 0 and asked > limit:
            raise ApiError(errors.PULL_LIMIT, f"the pull exceeds the consumer's {what} of {limit}")


@dataclass(slots=True, frozen=True)
class Selected:
    """A message selected for delivery, and the number of the attempt."""

    seq: int
    message: StoredMessage
    attempt: int


class Batch:
    """Collects the messages of a pull: at most ``batch`` messages and ``max_bytes``.

    They are either all ``selected`` one by one, or all in columns.
    """

    def __init__(
        self,
        request: PullRequest,
        opened: Callable[[Block, Iterable[int]], MessageColumns],
        *,
        headers_only: bool,
    ) -> None:
        """``opened`` returns the columns of a block, with the given positions decrypted."""
        self.selected: list[Selected] = []
        self.seqs: list[int] = []
        """Sequences of all collected messages."""
        self.too_large = 0
        """Size of the first message if it alone exceeds ``max_bytes``, else 0."""
        self.left = request.batch
        """Messages that it may still take."""
        # Without `max_bytes` in the request, the first message is delivered whatever its size.
        self._bytes_left = request.max_bytes or PULL_BYTES_MAX
        self._strict = request.max_bytes > 0
        self.asked_columns = request.columns
        self._opened = opened
        self._headers_only = headers_only
        self._parts: list[DeliveryColumns] = []
        # Bytes of headers that may still be decoded in this step of the event loop.
        self._step_left = HEADERS_STEP

    @property
    def step_over(self) -> bool:
        """Whether so many headers were decoded that the next message has to :meth:`pause`."""
        return self._step_left <= 0

    async def pause(self) -> None:
        """Let the event loop do other work if the step is over."""
        if self.step_over:
            await asyncio.sleep(0)
            self._step_left = HEADERS_STEP

    @property
    def full(self) -> bool:
        """Whether nothing more fits."""
        return self.left <= 0

    @property
    def in_columns(self) -> bool:
        """Whether messages are taken in columns. Once some were selected one by one, all are."""
        return bool(self._parts) or (self.asked_columns and not self.selected)

    def takes_columns(self, count: int) -> bool:
        """Whether to take ``count`` messages that were found in columns: also if they are many."""
        return self.in_columns or (count >= _MANY and not self.selected)

    def take(self, item: Selected) -> bool:
        """Add ``item`` if it fits; otherwise the batch is full."""
        if self.full:
            return False
        size = message_size(item.message.headers, len(item.message.payload))
        first = not self.seqs
        if size > self._bytes_left and (not first or self._strict):
            self.too_large = size if first else 0
            self.left = 0
            return False
        self.selected.append(item)
        self.seqs.append(item.seq)
        self._bytes_left -= size
        # One by one they take about twice as long as in columns.
        self._step_left -= 2 * (size - len(item.message.payload) + HEADERS_OF_MESSAGE)
        self.left -= 1
        return True

    def take_columns(
        self, block: Block, positions: NDArray[np.intp], subjects: SubjectTable
    ) -> list[int]:
        """Add messages at ``positions`` of ``block`` while they fit; return their sequences.

        Only as many as one step of the event loop allows, so there may be room for more.
        """
        wanted = positions[: self.left]
        if not len(wanted):
            return []
        sizes = block.columns.sizes_at(_as_slice(wanted))
        if self._headers_only or block.columns.seals is not None:  # else none is decoded here
            steps = np.cumsum(sizes + HEADERS_OF_MESSAGE)
            count = 1 + int(np.searchsorted(steps[:-1], self._step_left))
            wanted, sizes = wanted[:count], sizes[:count]
            self._step_left -= int(steps[count - 1])
        ends = np.cumsum(sizes)
        taken = len(wanted)
        if ends[-1] > self._bytes_left:
            taken = int(np.searchsorted(ends, self._bytes_left, side="right"))
        if not (taken or self.seqs):
            if self._strict:
                self.too_large = int(sizes[0])
            else:
                taken = 1
        seqs: list[int] = []
        if taken:
            seqs = self._add(block, wanted[:taken], subjects)
            self._bytes_left -= int(ends[taken - 1])
        self.left = 0 if taken < len(wanted) else self.left - taken
        return seqs

    def _add(self, block: Block, positions: NDArray[np.intp], subjects: SubjectTable) -> list[int]:
        at = _as_slice(positions)
        # A dict takes less time than numpy's `unique` for the usual hundred messages.
        numbers: dict[int, int] = {}
        index = [
            numbers.setdefault(number, len(numbers)) for number in block.subject_ids[at].tolist()
        ]
        columns = _columns_at(self._opened(block, positions), at)
        places = (positions + block.base_seq).astype(np.int64, copy=False)
        self._parts.append(
            DeliveryColumns(
                0,
                0,
                places.tobytes(),
                block.times_ns[at].tobytes(),
                [subjects.name(number) for number in numbers],
                np.array(index, np.uint32).tobytes(),
                _without_payloads(columns) if self._headers_only else columns,
            )
        )
        seqs: list[int] = places.tolist()
        self.seqs += seqs
        return seqs

    def columns(self, first_consumer_seq: int, num_pending: int) -> DeliveryColumns:
        """Return the messages in columns (at least one); ``num_pending`` remain."""
        joined = join_deliveries(self._parts)
        joined.first_consumer_seq = first_consumer_seq
        joined.num_pending = num_pending
        return joined


async def deliveries_in_steps(columns: DeliveryColumns) -> list[Delivery]:
    """Return the deliveries of columns as a list; let the event loop do other work in between."""
    if columns.made_at_once:
        return in_deliveries(columns)
    await asyncio.sleep(0)  # they were read in this step
    deliveries: list[Delivery] = []
    start = 0
    for stop in columns.steps():
        await asyncio.sleep(0)
        deliveries += in_deliveries(columns.slice(start, stop))
        start = stop
    return deliveries


def _as_slice(positions: NDArray[np.intp]) -> NDArray[np.intp] | slice:
    """Return a slice that takes the same elements if there is one: that takes less time."""
    first, stop = int(positions[0]), int(positions[-1]) + 1
    return slice(first, stop) if stop - first == len(positions) else positions


def _columns_at(columns: MessageColumns, positions: NDArray[np.intp] | slice) -> MessageColumns:
    """Return the columns of the messages at ``positions``, which ascend (at least one)."""
    if isinstance(positions, slice):
        whole = positions.stop - positions.start == columns.count
        return columns if whole else columns.slice(positions.start, positions.stop)
    # Each payload is copied by itself: an index of all their bytes would take eight times as much.
    offsets, heap = as_u32(columns.offsets), columns.payload
    starts, ends = offsets[positions].tolist(), offsets[positions + 1].tolist()
    payloads = [heap[begin:end] for begin, end in zip(starts, ends, strict=True)]
    selected = columns_of(payloads, None)
    if columns.headers is not None:
        selected.headers = columns.headers.select(positions)
    return selected


def _without_payloads(columns: MessageColumns) -> MessageColumns:
    count, sizes = columns.count, lengths_of(columns.offsets).tolist()
    headers = [None] * count if columns.headers is None else columns.headers.each()
    return columns_of([b""] * count, list(map(_with_size, headers, sizes)))


def without_payload(message: StoredMessage) -> StoredMessage:
    """Return a message as a consumer with ``headers_only`` gets it."""
    headers = _with_size(message.headers, len(message.payload))
    return msgspec.structs.replace(message, headers=headers, payload=b"")


def _with_size(headers: Headers | None, size: int) -> Headers:
    return {**(headers or {}), _MESSAGE_SIZE_HEADER: [str(size)]}

"""The methods of ``StorageLink`` as they travel: number, arguments, result, and what a loss means.

Numbers are for ever: an end that is older or newer must find the same method under its number.
"""

from enum import Enum
from types import NoneType
from typing import Any, Final, Generic, TypeVar

import msgspec

from contrail_common.columns.message_batch import MessageBatch
from contrail_common.model import (
    ConsumerConfig,
    ConsumerInfo,
    PublishMessage,
    StoredMessage,
    StreamConfig,
    StreamInfo,
)
from contrail_link.contract.admin import ErasureReceipt, EventsRequest, EventsResult
from contrail_link.contract.consume import AckItem, AckResult, PullRequest, PullResult
from contrail_link.contract.publish import PublishAck
from contrail_link.contract.read import (
    DeletedRanges,
    LastRequest,
    RangeRequest,
    RangeResult,
    ReadPosition,
    ReplayPlan,
    ReplayPlanRequest,
    ReplayRequest,
)
from contrail_link.contract.streams import CreateMode, Page

_R = TypeVar("_R")

encode: Final = msgspec.msgpack.Encoder().encode


class OnLoss(Enum):
    """What is left to do for a request that was sent when its connection ended."""

    REPEAT = "safe to repeat: the request changes nothing"
    REFUSE = "safe to refuse: undelivered messages are delivered again"
    UNKNOWN = "outcome unknown: the request may have been applied"


class Method(Generic[_R]):
    """One method. ``may_wait``: it may take as long as its caller wants, and can be cancelled.

    ``streams``: its result only says that a stream of chunks begins.
    """

    def __init__(
        self,
        number: int,
        name: str,
        arguments: Any,
        result: type[_R],
        on_loss: OnLoss,
        *,
        may_wait: bool = False,
        streams: bool = False,
    ) -> None:
        self.number = number
        self.name = name
        self.argument_types = arguments
        self.result_type = result
        self.on_loss = on_loss
        self.may_wait = may_wait
        self.streams = streams
        self.arguments = msgspec.msgpack.Decoder(arguments)
        self.result = msgspec.msgpack.Decoder(result)


_CHANGE: Final = OnLoss.UNKNOWN
_READ: Final = OnLoss.REPEAT

PUT_STREAM: Final = Method(
    1,
    "put_stream",
    tuple[StreamConfig, CreateMode, int | None, bool],
    tuple[StreamInfo, bool],
    _CHANGE,
)
STREAM_INFO: Final = Method(2, "stream_info", tuple[str], StreamInfo, _READ)
LIST_STREAMS: Final = Method(3, "list_streams", tuple[str, str, int, str], Page, _READ)
DELETE_STREAM: Final = Method(4, "delete_stream", tuple[str, int | None], NoneType, _CHANGE)
PURGE_STREAM: Final = Method(5, "purge_stream", tuple[str, str, int, int, int | None], int, _CHANGE)
STREAM_FOR_SUBJECT: Final = Method(6, "stream_for_subject", tuple[str], str, _READ)
PUBLISH: Final = Method(7, "publish", tuple[str, list[PublishMessage]], PublishAck, _CHANGE)
PUBLISH_BATCH: Final = Method(8, "publish_batch", tuple[str, MessageBatch], PublishAck, _CHANGE)
GET_MESSAGE: Final = Method(9, "get_message", tuple[str, int, int | None], StoredMessage, _READ)
READ_RANGE: Final = Method(10, "read_range", tuple[RangeRequest], RangeResult, _READ, may_wait=True)
SUBJECT_COUNTS: Final = Method(
    12, "subject_counts", tuple[str, str, int, str], tuple[list[tuple[str, int]], str | None], _READ
)
DELETE_MESSAGE: Final = Method(13, "delete_message", tuple[str, int, int | None], NoneType, _CHANGE)
REPLAY_PLAN: Final = Method(14, "replay_plan", tuple[ReplayPlanRequest], ReplayPlan, _READ)
REPLAY: Final = Method(
    15, "replay", tuple[ReplayRequest], NoneType, OnLoss.REFUSE, may_wait=True, streams=True
)
PUT_CONSUMER: Final = Method(
    16,
    "put_consumer",
    tuple[str, ConsumerConfig, CreateMode, int | None, bool],
    tuple[ConsumerInfo, bool],
    _CHANGE,
)
CONSUMER_INFO: Final = Method(17, "consumer_info", tuple[str, str], ConsumerInfo, _READ)
LIST_CONSUMERS: Final = Method(18, "list_consumers", tuple[str, int, str], Page, _READ)
DELETE_CONSUMER: Final = Method(
    19, "delete_consumer", tuple[str, str, int | None], NoneType, _CHANGE
)
PULL: Final = Method(20, "pull", tuple[PullRequest], PullResult, OnLoss.REFUSE, may_wait=True)
ACKNOWLEDGE: Final = Method(
    21, "acknowledge", tuple[str, str, list[AckItem], bool], list[AckResult], _CHANGE
)
READ_EVENTS: Final = Method(
    22, "read_events", tuple[EventsRequest], EventsResult, _READ, may_wait=True
)
LAST_MESSAGES: Final = Method(
    23, "last_messages", tuple[LastRequest], tuple[list[StoredMessage], str | None], _READ
)
DELETED_RANGES: Final = Method(
    24, "deleted_ranges", tuple[str, int, str, int | None], DeletedRanges, _READ
)
READ_POSITION: Final = Method(25, "read_position", tuple[str, int | None], ReadPosition, _READ)

SNAPSHOT: Final = Method(
    30, "snapshot", tuple[str, bool], NoneType, OnLoss.REFUSE, may_wait=True, streams=True
)
BEGIN_RESTORE: Final = Method(31, "begin_restore", tuple[str], str, OnLoss.REFUSE)
APPEND_RESTORE: Final = Method(
    32, "append_restore", tuple[str, int, bytes], NoneType, OnLoss.REFUSE
)
"""When its answer is lost nothing is restored: the restore is undone."""
COMMIT_RESTORE: Final = Method(33, "commit_restore", tuple[str], StreamInfo, _CHANGE)
ABORT_RESTORE: Final = Method(34, "abort_restore", tuple[str], NoneType, _READ)

ERASE: Final = Method(36, "erase", tuple[str, list[int], str, int | None], ErasureReceipt, _CHANGE)
ERASURE: Final = Method(37, "erasure", tuple[str, int], ErasureReceipt, _READ, may_wait=True)

BIND_CONSUMER: Final = Method(
    38, "bind_consumer", tuple[str, str], NoneType, OnLoss.REFUSE, may_wait=True, streams=True
)
USE_TICKET: Final = Method(40, "use_ticket", tuple[bytes, int], bool, _CHANGE)

METHODS: Final[dict[int, Method[Any]]] = {
    method.number: method
    for method in (
        PUT_STREAM,
        STREAM_INFO,
        LIST_STREAMS,
        DELETE_STREAM,
        PURGE_STREAM,
        STREAM_FOR_SUBJECT,
        PUBLISH,
        PUBLISH_BATCH,
        GET_MESSAGE,
        READ_RANGE,
        SUBJECT_COUNTS,
        DELETE_MESSAGE,
        REPLAY_PLAN,
        REPLAY,
        PUT_CONSUMER,
        CONSUMER_INFO,
        LIST_CONSUMERS,
        DELETE_CONSUMER,
        PULL,
        ACKNOWLEDGE,
        READ_EVENTS,
        SNAPSHOT,
        BEGIN_RESTORE,
        APPEND_RESTORE,
        COMMIT_RESTORE,
        ABORT_RESTORE,
        LAST_MESSAGES,
        DELETED_RANGES,
        READ_POSITION,
        ERASE,
        ERASURE,
        BIND_CONSUMER,
        USE_TICKET,
    )
}

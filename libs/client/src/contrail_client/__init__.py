"""Python SDK of the Contrail streaming platform.

    from contrail_client import Contrail

    with Contrail("http://127.0.0.1:7420") as contrail:
        contrail.ensure_stream("ORDERS", {"subjects": ["orders.>"]})
        contrail.publish("orders.new", b"one", msg_id="order-1")
        worker = contrail.ensure_consumer("ORDERS", "worker")
        for message in worker.messages():
            print(message.payload)
            message.ack()

`AsyncContrail` is the same with `await`. `publisher`, `subscribe` and `ordered` share one WebSocket
of the client and survive its loss. Errors are in `contrail_client.errors`.
"""

from contrail_client.aio.client import AsyncContrail
from contrail_client.aio.consumer import AsyncConsumer, AsyncPulledMessage
from contrail_client.aio.replay import AsyncReplay
from contrail_client.blocking.client import Contrail
from contrail_client.blocking.consumer import Consumer, PulledMessage
from contrail_client.blocking.replay import Replay
from contrail_client.calls import Retries
from contrail_client.configs import ConsumerConfig, StreamConfig
from contrail_client.errors import (
    AcksRefused,
    ApiProblem,
    Busy,
    Closed,
    Conflict,
    ContrailError,
    Denied,
    Full,
    Invalid,
    NotFound,
    OutcomeUnknown,
    PreconditionFailed,
    PublishesFailed,
    ReplayCut,
    ServerFault,
    SocketRefused,
    SubscriptionEnded,
    UnexpectedAnswer,
    Unreachable,
)
from contrail_client.live.blocking import (
    OrderedReader,
    Publication,
    Publisher,
    PushedMessage,
    Subscription,
)
from contrail_client.live.publisher import AsyncPublication, AsyncPublisher
from contrail_client.live.reader import AsyncOrderedReader
from contrail_client.live.subscription import AsyncPushedMessage, AsyncSubscription
from contrail_client.models import (
    AtomicAck,
    BatchResult,
    Consistency,
    ConsumerInfo,
    ConsumerShardInfo,
    Delivered,
    Delivery,
    Difference,
    Erasure,
    Event,
    Expected,
    Gap,
    Message,
    PubAck,
    Pull,
    Range,
    ReplayPlan,
    ReplaySplit,
    StoredMessage,
    StreamInfo,
    StreamState,
    SubjectCount,
)
from contrail_client.operations.ensuring import ConfigDiffers
from contrail_client.operations.replaying import Bounds
from contrail_client.times import Duration, Time, to_datetime, to_timedelta

__all__ = [
    "AcksRefused",
    "ApiProblem",
    "AsyncConsumer",
    "AsyncContrail",
    "AsyncOrderedReader",
    "AsyncPublication",
    "AsyncPublisher",
    "AsyncPulledMessage",
    "AsyncPushedMessage",
    "AsyncReplay",
    "AsyncSubscription",
    "AtomicAck",
    "BatchResult",
    "Bounds",
    "Busy",
    "Closed",
    "ConfigDiffers",
    "Conflict",
    "Consistency",
    "Consumer",
    "ConsumerConfig",
    "ConsumerInfo",
    "ConsumerShardInfo",
    "Contrail",
    "ContrailError",
    "Delivered",
    "Delivery",
    "Denied",
    "Difference",
    "Duration",
    "Erasure",
    "Event",
    "Expected",
    "Full",
    "Gap",
    "Invalid",
    "Message",
    "NotFound",
    "OrderedReader",
    "OutcomeUnknown",
    "PreconditionFailed",
    "PubAck",
    "Publication",
    "Publisher",
    "PublishesFailed",
    "Pull",
    "PulledMessage",
    "PushedMessage",
    "Range",
    "Replay",
    "ReplayCut",
    "ReplayPlan",
    "ReplaySplit",
    "Retries",
    "ServerFault",
    "SocketRefused",
    "StoredMessage",
    "StreamConfig",
    "StreamInfo",
    "StreamState",
    "SubjectCount",
    "Subscription",
    "SubscriptionEnded",
    "Time",
    "UnexpectedAnswer",
    "Unreachable",
    "to_datetime",
    "to_timedelta",
]

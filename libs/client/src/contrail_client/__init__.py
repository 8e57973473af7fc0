"""Python SDK of the Contrail streaming platform.

    from contrail_client import Contrail

    with Contrail("http://127.0.0.1:7420") as contrail:
        contrail.ensure_stream("ORDERS", {"subjects": ["orders.>"]})
        contrail.publish("orders.new", b"one", msg_id="order-1")
        worker = contrail.ensure_consumer("ORDERS", "worker")
        for delivery in worker.next(batch=10, expires="5s"):
            worker.ack(delivery)

`AsyncContrail` is the same with `await`. Errors are in `contrail_client.errors`.
"""

from contrail_client.aio import AsyncConsumer, AsyncContrail
from contrail_client.calls import Retries
from contrail_client.client import Consumer, Contrail
from contrail_client.errors import (
    AcksRefused,
    ApiProblem,
    ContrailError,
    OutcomeUnknown,
    ReplayCut,
    UnexpectedAnswer,
    Unreachable,
)
from contrail_client.models import (
    AtomicAck,
    BatchResult,
    ConsumerConfig,
    ConsumerInfo,
    Delivery,
    Expected,
    Message,
    PubAck,
    Pull,
    Range,
    ReplayPlan,
    ReplaySplit,
    StoredMessage,
    StreamConfig,
    StreamInfo,
    StreamState,
)
from contrail_client.replaying import Bounds

__all__ = [
    "AcksRefused",
    "ApiProblem",
    "AsyncConsumer",
    "AsyncContrail",
    "AtomicAck",
    "BatchResult",
    "Bounds",
    "Consumer",
    "ConsumerConfig",
    "ConsumerInfo",
    "Contrail",
    "ContrailError",
    "Delivery",
    "Expected",
    "Message",
    "OutcomeUnknown",
    "PubAck",
    "Pull",
    "Range",
    "ReplayCut",
    "ReplayPlan",
    "ReplaySplit",
    "Retries",
    "StoredMessage",
    "StreamConfig",
    "StreamInfo",
    "StreamState",
    "UnexpectedAnswer",
    "Unreachable",
]

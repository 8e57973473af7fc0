"""JetStream's rules about retention: which consumers a stream may have, and how it may change."""

from collections.abc import Iterable
from typing import NamedTuple

from contrail_common import errors
from contrail_common.errors import ApiError, ErrorSpec, FieldProblem
from contrail_common.model import ConsumerConfig, Retention
from contrail_common.subjects import overlaps


class RetentionProblem(NamedTuple):
    """Why a configuration is refused: the error, the field and a message."""

    spec: ErrorSpec
    field: str
    message: str

    def as_error(self) -> ApiError:
        """Return it as a refusal without effect."""
        problem = FieldProblem(f"/{self.field}", self.message)
        return ApiError(self.spec, f"{self.field}: {self.message}", [problem], applied=False)


def kind_problem(config: ConsumerConfig, retention: Retention) -> RetentionProblem | None:
    """Return why a stream with this retention must not have this consumer, or None if it may."""
    if retention != "workqueue":
        return None
    if config.ack_policy != "explicit":
        # An acknowledgement removes the message, so each message needs its own.
        message = "must be explicit on a workqueue stream"
        return RetentionProblem(errors.WORKQUEUE_ACKS, "ack_policy", message)
    if config.deliver_policy != "all":
        # Messages before a later start would belong to no consumer, and stay for ever.
        message = "must be all on a workqueue stream"
        return RetentionProblem(errors.WORKQUEUE_DELIVER_ALL, "deliver_policy", message)
    return None


def replicas_problem(config: ConsumerConfig, stream_replicas: int) -> RetentionProblem | None:
    """Return why a consumer must not have this number of replicas, or None if it may.

    It must be that of the stream, or 0, which means the same. JetStream also allows fewer for a
    consumer of a limits stream; here a consumer is stored with its stream.
    """
    field, asked = "num_replicas", config.num_replicas
    if asked in (0, stream_replicas):
        return None
    if asked > stream_replicas:
        message = f"{asked} is more than the stream's {stream_replicas}"
        return RetentionProblem(errors.CONSUMER_REPLICAS_EXCEEDED, field, message)
    message = f"must be 0 or the stream's {stream_replicas}"
    return RetentionProblem(errors.CONSUMER_REPLICAS_DIFFER, field, message)


def collision(
    config: ConsumerConfig, retention: Retention, others: Iterable[ConsumerConfig]
) -> RetentionProblem | None:
    """Return why a consumer must not exist together with ``others``, or None if it may.

    Each message of a work queue belongs to one consumer. Filters collide if any subject matches
    both, even one that the stream does not capture.
    """
    if retention != "workqueue":
        return None
    field = "filter_subjects"
    for other in others:
        if not config.filter_subjects:
            # Without a filter, every message belongs to this consumer, and none is left for
            # another.
            message = f"is required because consumer {other.name} exists"
            return RetentionProblem(errors.WORKQUEUE_UNFILTERED, field, message)
        theirs = other.filter_subjects or (">",)
        for own in config.filter_subjects:
            met = next((one for one in theirs if overlaps(own, one)), None)
            if met is not None:
                message = f'"{own}" overlaps with "{met}" of consumer {other.name}'
                return RetentionProblem(errors.WORKQUEUE_NOT_UNIQUE, field, message)
    return None


def may_become(old: Retention, new: Retention) -> bool:
    """Return True if a stream may change its retention from ``old`` to ``new``.

    A work queue remains one, and no other stream becomes one.
    """
    return old == new or "workqueue" not in (old, new)

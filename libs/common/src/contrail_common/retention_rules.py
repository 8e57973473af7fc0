"""What a stream's retention asks of its consumers, and how it may change: JetStream's rules."""

from collections.abc import Iterable
from typing import NamedTuple

from contrail_common import errors
from contrail_common.errors import ApiError, ErrorSpec, FieldProblem
from contrail_common.model import ConsumerConfig, Retention
from contrail_common.subjects import overlaps


class RetentionProblem(NamedTuple):
    """Why a consumer cannot be, and the field that says so."""

    spec: ErrorSpec
    field: str
    message: str

    def as_error(self) -> ApiError:
        """The refusal, which had no effect."""
        problem = FieldProblem(f"/{self.field}", self.message)
        return ApiError(self.spec, f"{self.field}: {self.message}", [problem], applied=False)


def kind_problem(config: ConsumerConfig, retention: Retention) -> RetentionProblem | None:
    """Why no stream of this retention can have such a consumer, None when it can."""
    if retention != "workqueue":
        return None
    if config.ack_policy != "explicit":
        message = "must be explicit on a workqueue stream"
        return RetentionProblem(errors.WORKQUEUE_ACKS, "ack_policy", message)
    if config.deliver_policy != "all":
        message = "must be all on a workqueue stream"
        return RetentionProblem(errors.WORKQUEUE_DELIVER_ALL, "deliver_policy", message)
    return None


def replicas_problem(config: ConsumerConfig, stream_replicas: int) -> RetentionProblem | None:
    """Why a consumer cannot have so many replicas: its stream's (0 says the same) or none.

    JetStream lets a consumer of a limits stream have fewer; here it is stored with its stream.
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
    """Why a consumer cannot stand beside ``others``: of a workqueue each message is one's alone.

    Filters collide when some subject matches both, whether the stream captures it or not.
    """
    if retention != "workqueue":
        return None
    field = "filter_subjects"
    for other in others:
        if not config.filter_subjects:
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
    """Whether a stream may change its retention so; a workqueue stays one, and none becomes one."""
    return old == new or "workqueue" not in (old, new)
